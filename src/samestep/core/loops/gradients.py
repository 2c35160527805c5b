"""Gradients of a user's own loop, added up over all ranks."""

from collections.abc import Callable, Sequence
from itertools import islice
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError
from samestep.core.learner import model_state
from samestep.core.learner.optimizer_state import parameters_in
from samestep.launch.ranks.world import World

Trained = nn.Module | torch.optim.Optimizer | Tensor
"""What a gradient is for: a module, what an optimizer steps, or a parameter by itself."""

_BUCKET_BYTES = 8 << 20
"""Of gradients that are copied together and reduced at once."""
_LARGE_BYTES = 4 << 20
"""Of a gradient that is reduced by itself."""
_EXACT = (torch.float32, torch.float64)
_MOST_KEPT = 8
"""Sets of parameters of which the buckets are kept."""
_COMPARED = 20
"""Steps in which ranks compare how often they go backward, once that number has changed."""
_CALLS = {"samestep.gather": 1 << 20, "run.validation": 1 << 21}
"""Tells these from a backward pass, where ranks compare which one they have come to."""
_STEP_MODULUS = 1024
"""Ranks compare steps modulo this; sums of such numbers over the ranks are exact."""


def parameters_of(trained: Sequence[Trained]) -> list[Tensor]:
    """Return the trainable parameters of modules, optimizers and parameters, each once."""
    by_id: dict[int, Tensor] = {}
    for part in trained:
        if isinstance(part, nn.Module):
            parameters: list[Any] = [*model_state.parameters_of(part)]
        elif isinstance(part, torch.optim.Optimizer):
            parameters = parameters_in(part)
        elif isinstance(part, Tensor):
            parameters = [part]
        else:
            raise UserError(
                f"run.backward(loss, …) takes modules, optimizers or parameters, not a "
                f"{type(part).__name__}."
            )
        by_id |= {id(p): p for p in parameters if p.requires_grad}
    if not by_id:
        raise UserError(
            "run.backward(loss, …) got no parameters to train. Name the modules or optimizers that "
            "need gradients: run.backward(loss, model)."
        )
    return list(by_id.values())


def weight_of(
    share: float, terms: float | Tensor | None, loss: Tensor, world: World
) -> float | Tensor:
    """Return the factor of a rank's loss that makes the sum over all ranks the mean.

    `share` is this rank's part of the global batch, `terms` the number of what its loss is a mean
    over where that is not samples.
    """
    if terms is None:
        return share
    given = torch.as_tensor(terms, dtype=torch.float64).detach()
    counted = given.sum() if share > 0 else torch.zeros_like(given.sum())
    is_wrong = ~((counted >= 0) & counted.isfinite()) | (given.numel() != 1)
    # The second sum tells all ranks of a rank whose terms are wrong.
    total, wrongs = world.reduce(torch.stack([counted, is_wrong.to(counted)]))
    if total.device.type != "cpu":
        on_device: Tensor = (counted / total).to(loss)
        return on_device
    if wrongs:
        ranks = enumerate(world.gather(f"{terms!r:.80}" if is_wrong else ""))
        rank, text = next((rank, text) for rank, text in ranks if text)
        raise UserError(
            f"run.backward(…, terms={text}) on rank {rank}: it must be one number, 0 or more.",
            remedy="Pass the number of terms that the loss is a mean over, such as mask.sum().",
            on_all_ranks=True,
        )
    if not total:
        raise UserError(
            "run.backward(…, terms=…) was given 0 terms on all ranks, so the mean has no gradient. "
            "Leave samples without terms out of the data.",
            on_all_ranks=True,
        )
    return float(counted / total)


class Passes:
    """The backward passes of each step, of which every rank has the same number.

    A rank that goes backward once more than others would wait for them until it times out. Ranks
    compare their numbers until these have been the same for some steps.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._count = 0
        self._usual = 0
        self._to_compare = _COMPARED

    def add(self, step: int) -> None:
        """Count one more pass of a step; all ranks call it."""
        self._count += 1
        self._compare(self._count, step)

    def call(self, name: str, step: int) -> None:
        """Count another call that waits for all ranks as well; all ranks call it."""
        self._count += 1
        self._compare(_CALLS[name] + self._count, step)

    def end(self, step: int) -> None:
        """End a step; all ranks call it."""
        self._compare(0, step)
        self._to_compare -= 1
        if self._count != self._usual:
            self._usual, self._to_compare = self._count, _COMPARED
        self._count = 0

    def _compare(self, number: int, step: int) -> None:
        if not self._world.connected or self._to_compare <= 0:
            return
        most, least = self._world.reduce(torch.tensor([number, -number]), "max").tolist()
        for call, tag in reversed(_CALLS.items()):
            if most > tag > -least:
                raise UserError(
                    f"{call} was called in step {step + 1} on some ranks, while others continued "
                    "without it. It waits for every rank: call it equally often on all of them.",
                    on_all_ranks=True,
                )
        if most != -least:
            raise _unequal(f"{most} times in step {step + 1} on some ranks, {most - 1} on others")


def meet(world: World, call: str) -> None:
    """Check, between the batches of two epochs, that all ranks have come to the same call."""
    calls = world.gather(call)
    if len(set(calls)) > 1:
        at = [f"{each} on rank {calls.index(each)}" for each in dict.fromkeys(calls)]
        raise UserError(
            f"The ranks reached different places: {' and '.join(at)}. Each of these calls waits "
            "for all ranks: make it equally often on every rank, and put `if run.is_main` only "
            "around what one rank does, such as printing.",
            on_all_ranks=True,
        )


def _unequal(times: str) -> UserError:
    return UserError(
        f"run.backward was called {times}. Each call adds up over all ranks, so every rank "
        "must call it equally often: base such decisions on values that all ranks share. "
        "run.backward returns the loss over all ranks: return it from a closure for LBFGS.",
        on_all_ranks=True,
    )


def check_loss(loss: Any) -> None:
    """Check that backward can start from a loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(
            f"run.backward was given a {type(loss).__name__}{shape}; it takes one "
            "number, the mean over the samples of the batch: loss.mean()."
        )
    if not loss.requires_grad:
        raise UserError(
            "run.backward was given a loss without a gradient: it does not depend on any "
            "trained weight. Leave out .detach(), .item(), torch.no_grad() and NumPy between the "
            "weights and the loss."
        )


def is_sum(loss: Tensor, rows: int) -> bool:
    """Whether a loss is a sum over its samples, of which backward takes the mean."""
    made, sizes = loss.grad_fn, getattr(loss.grad_fn, "_saved_self_sym_sizes", ())
    summed = made is not None and made.name() == "SumBackward0" and sizes[:1] == (rows,)
    if made is not None and summed and (of := made.next_functions[0][0]) is not None:
        summed = not of.name().startswith(("Mul", "Div"))  # by weights
    return rows > 1 and (summed or getattr(made, "_saved_reduction", 0) == 2)


Kept = dict[tuple[int, ...], "_Sums"]
"""What is used again, by the ids of the parameters, which it holds: no id is used twice."""


def _is_large(parameter: Tensor) -> bool:
    """Whether a gradient is added up in its own memory: to copy it would cost more than to send."""
    return parameter.nbytes >= _LARGE_BYTES and parameter.is_contiguous()


class _GradBucket:
    """Gradients of one type and device that travel together in a buffer; a large one needs none."""

    def __init__(self, parameters: list[Tensor], like: Tensor, more: int = 0) -> None:
        self.parameters = parameters
        self.missing = 0
        """`missing` gradients of the running pass are still to come."""
        self.is_buffer = more > 0 or not _is_large(like)
        sizes = [p.numel() for p in parameters if self.is_buffer]
        self.flat = torch.empty(sum(sizes) + more, dtype=like.dtype, device=like.device)
        views = torch.split(self.flat[: sum(sizes)], sizes) if sizes else ()
        self.parts = [view.view_as(p) for view, p in zip(views, parameters, strict=False)]

    def fill(self) -> None:
        """Take this rank's gradients, and 0 for those that it has not."""
        grads = [p.grad for p in self.parameters]
        there = [g for g in grads if g is not None]
        if any(g.layout != torch.strided for g in there):
            raise UserError(
                "run.backward cannot add up sparse gradients. Make the embedding with "
                "sparse=False.",
                on_all_ranks=True,
            )
        if not self.is_buffer:
            self.flat = there[0].contiguous() if there else torch.zeros_like(self.parameters[0])
        elif len(there) < len(grads):
            for part, g in zip(self.parts, grads, strict=True):
                part.zero_() if g is None else part.copy_(g)
        elif there:
            torch._foreach_copy_(self.parts, there)

    def give(self, used: Sequence[float]) -> None:
        """Put the sums in place of the gradients, and of those that only other ranks have."""
        there = [p.grad for p in self.parameters if p.grad is not None]
        if not self.is_buffer:
            total, self.flat = self.flat, torch.empty(0)  # else its memory is held for ever
            self.parameters[0].grad = total if there or used[0] else None
        elif len(there) < len(self.parameters):
            for p, part, some in zip(self.parameters, self.parts, used, strict=True):
                p.grad = part.clone() if p.grad is not None or some else None
        elif there:
            torch._foreach_copy_(there, self.parts)


class _Sums:
    """The gradients of some parameters, added up over all ranks while backward computes others.

    The last parameters go first, as backward begins with them. All ranks send the buckets in this
    one order: each waits for those before it. As it depends on nothing else, a resumed run adds up
    in the same order, to the same bits.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        groups: list[list[Tensor]] = []
        filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in reversed(parameters):
            if _is_large(p):
                groups.append([p])
                continue
            group = filling.setdefault((p.dtype, p.device), [])
            group.append(p)
            if sum(gradient.nbytes for gradient in group) >= _BUCKET_BYTES:
                groups.append(filling.pop((p.dtype, p.device)))
        groups += filling.values()
        if _is_large(groups[-1][0]):
            groups.append([])
        *others, last = groups
        more = [1, len(parameters), 1]
        self._buckets = [_GradBucket(group, group[0]) for group in others]
        self._buckets.append(_GradBucket(last, (last or parameters)[0], sum(more)))
        # With the last one goes what is known by then: the loss, and which gradients there are.
        ending = self._buckets[-1].flat[-sum(more) :]
        self._loss, self._used, self._step = (part.real for part in torch.split(ending, more))
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._lock = Lock()  # each device has a thread of its own
        self._waits: list[Callable[[], object]] = []
        """What waits for each bucket that was sent."""

    def begin(self, world: World, weight: float | Tensor, loss: Tensor, step: int) -> None:
        """Begin the backward pass of a loss that has its weight already."""
        self._world = world
        self._waits = []
        self._step_now = step % _STEP_MODULUS
        self._nothing = weight == 0
        self._own_loss = self._zeroed(loss.clone())
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    def ready(self, parameter: Tensor) -> None:
        """Send off what is complete with this gradient."""
        with self._lock:
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                self._bucket_of[id(parameter)].missing -= 1
            for bucket in self._buckets[len(self._waits) :]:
                if bucket.missing:
                    break
                self._send()

    def _zeroed(self, values: Tensor) -> Tensor:
        """Zero what counts for nothing, as it may be NaN; the host reads no tensor for that."""
        if isinstance(self._nothing, Tensor):
            return values.masked_fill_(self._nothing, 0)
        return values.zero_() if self._nothing else values

    def _send(self) -> None:
        bucket = self._buckets[len(self._waits)]
        bucket.fill()
        self._zeroed(bucket.flat)
        if bucket is self._buckets[-1]:
            used = [p.grad is not None for sent in self._buckets for p in sent.parameters]
            self._used.fill_(1) if all(used) else self._used.copy_(torch.tensor(used))
            self._loss.copy_(self._own_loss)
            self._step.fill_(self._step_now)
        self._waits.append(self._world.begin_add_up(bucket.flat))

    def finish(self) -> Tensor:
        """Replace the gradients by their sums over all ranks; return that of the loss."""
        while len(self._waits) < len(self._buckets):
            self._send()
        for wait in self._waits:
            wait()
        self._waits = []  # they hold the gradients
        exact = self._step.device.type == "cpu" and self._step.dtype in _EXACT
        if exact and float(self._step) != self._step_now * self._world.world_size:
            raise _unequal("unequally often, so that ranks meet in different steps")
        # Only a rank that lacks one asks the others: reading makes the host wait.
        lacks = any(bucket.missing for bucket in self._buckets)
        used = iter(self._used.tolist() if lacks else [1.0] * len(self._used))
        for bucket in self._buckets:
            bucket.give([*islice(used, len(bucket.parameters))])
        total: Tensor = self._loss.reshape(()).to(self._own_loss.dtype, copy=True)
        return total


def backward(
    loss: Tensor,
    parameters: Sequence[Tensor],
    world: World,
    weight: float | Tensor,
    *,
    step: int = 0,
    retain_graph: bool = False,
    kept: Kept | None = None,
) -> Tensor:
    """Add the gradient of the sum over all ranks of weight × loss to that of each parameter.

    Return that sum, the same on every rank. A parameter that no rank has used keeps the gradient
    that it had, or none. Where the weight is 0 the loss may be NaN, and adds nothing. Gradients are
    added up while backward computes others, in the buffers of `kept`.
    """
    inputs: list[Any] = list(parameters)
    if not world.connected:
        loss.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss.detach()
    before = [p.grad for p in inputs]
    for p in inputs:
        p.grad = None  # what is there already is a sum over all ranks
    mine = loss * weight
    key, kept = tuple(map(id, inputs)), {} if kept is None else kept
    sums = kept[key] = kept.pop(key) if key in kept else _Sums(inputs)  # as the newest
    if len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    sums.begin(world, weight, mine.detach(), step)
    # The script's own hooks get the sum, as in one process: parts that are clipped add up to more.
    hooks = [h for p in inputs for h in _hooks_of(p) if h]
    taken = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    ours = [p.register_post_accumulate_grad_hook(sums.ready) for p in inputs]
    try:
        mine.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    finally:
        for hook in ours:
            hook.remove()
        for h, those in zip(hooks, taken, strict=True):
            h.update(those)
    total = sums.finish()
    with torch.no_grad():
        for p, old in zip(inputs, before, strict=True):
            _add(p, old)
    return total


def _hooks_of(parameter: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that get a new gradient, and those that get the parameter afterwards."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return before or {}, after or {}


def _add(parameter: Tensor, old: Tensor | None) -> None:
    if parameter.grad is None:
        parameter.grad = old
        return
    before, after = _hooks_of(parameter)
    for hook in [*before.values()]:
        if (changed := hook(parameter.grad)) is not None:
            parameter.grad = changed
    if old is not None:
        parameter.grad = old.add_(parameter.grad)
    for hook in [*after.values()]:
        hook(parameter)
