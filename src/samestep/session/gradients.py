"""Gradients of a user's own loop, added up over all ranks."""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.ranks.world import World

Trained = nn.Module | torch.optim.Optimizer | Tensor
"""What a gradient is for: a module, what an optimizer steps, or a parameter by itself."""

_BUCKET_BYTES = 8 << 20
"""Of gradients that are copied together and reduced at once."""
_MOST_KEPT = 8
"""Sets of parameters of which the buckets are kept."""
_COMPARED = 20
"""Steps in which ranks compare how often they go backward, once that number has changed."""
_STEP_MODULUS = 1024
"""Ranks compare steps modulo this; sums of such numbers over the ranks are exact."""


def parameters_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return what an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def parameters_of(trained: Sequence[Trained]) -> list[Tensor]:
    """Return what is to be trained of some modules, optimizers and parameters, each once."""
    found: dict[int, Tensor] = {}
    for one in trained:
        if isinstance(one, nn.Module):
            parameters: list[Any] = [*one.parameters()]
        elif isinstance(one, torch.optim.Optimizer):
            parameters = parameters_in(one)
        elif isinstance(one, Tensor):
            parameters = [one]
        else:
            raise UserError(
                f"run.backward(loss, …) takes modules, optimizers or parameters, not a "
                f"{type(one).__name__}."
            )
        found |= {id(p): p for p in parameters if p.requires_grad}
    if not found:
        raise UserError(
            "run.backward(loss, …) was given nothing to train: name the modules or the optimizers "
            "whose gradients are wanted, as in run.backward(loss, model)."
        )
    return list(found.values())


def weight_of(
    share: float, terms: float | Tensor | None, loss: Tensor, world: World
) -> float | Tensor:
    """Return the factor of a rank's loss that makes the sum over all ranks the mean.

    `share` is this rank's part of the global batch, `terms` the number of what its loss is a mean
    over where that is not samples.
    """
    if terms is None:
        return share
    counted = torch.as_tensor(terms, dtype=torch.float64).detach() * (share > 0)
    total = world.reduce(counted)
    if total.device.type != "cpu":
        return (counted / total).to(loss)
    if not total:
        raise UserError(
            "run.backward(…, terms=…) was given 0 terms on all ranks: the mean over nothing has no "
            "gradient. Leave samples without any term out of the data.",
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
        self._count, self._usual, self._to_compare = 0, 0, _COMPARED

    def add(self, step: int) -> None:
        """Count one more pass of a step; all ranks call it."""
        self._count += 1
        self._compare(self._count, step)

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
        if most != -least:
            raise _unequal(f"{most} times in step {step + 1} on some ranks, {most - 1} on others")


def _unequal(times: str) -> UserError:
    return UserError(
        f"run.backward was called {times}. Each call adds up over all ranks, so every rank "
        "has to call it equally often: base such a decision on values that all ranks share. "
        "run.backward returns the loss over all ranks: return that from a closure for LBFGS.",
        on_all_ranks=True,
    )


def check_loss(loss: Any) -> None:
    """Check that backward can start from a loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise UserError(
            f"run.backward was given a {type(loss).__name__}{shape}; it takes a loss that is one "
            "number, the mean over the samples of the batch: loss.mean()."
        )
    if not loss.requires_grad:
        raise UserError(
            "run.backward was given a loss without a gradient: it does not depend on any weight "
            "that is trained. Leave out .detach(), .item(), torch.no_grad() and NumPy between the "
            "weights and the loss."
        )


class _Bucket:
    """Gradients of one type and device that travel together, in a buffer that lasts."""

    def __init__(self, parameters: list[Tensor], *, with_loss: bool) -> None:
        sizes = [*(p.numel() for p in parameters), int(with_loss), len(parameters), 1]
        like, total = parameters[0], sum(sizes)
        self.parameters = parameters
        self.flat = torch.empty(total, dtype=like.dtype, device=like.device)
        *parts, self.loss, self.used, self.step = torch.split(self.flat, sizes)
        self.parts = [part.view_as(p) for part, p in zip(parts, parameters, strict=True)]
        self.sums = self.flat[: total - len(parameters) - 1]
        """What is zeroed where a rank's weight is 0."""
        self.missing = 0
        """Gradients of the running pass that are still to come."""
        self.wait: Callable[[], object] | None = None


Buckets = dict[tuple[int, ...], list[_Bucket]]
"""The buckets by the ids of the parameters, which they hold, so that no id is used twice."""


def _buckets(parameters: Sequence[Tensor], kept: Buckets) -> list[_Bucket]:
    """Return the parameters in buckets, the last parameters first: backward begins with them.

    The order depends on nothing else: a resumed run adds up in the same one, to the same bits.
    """
    key = tuple(map(id, parameters))
    if (found := kept.pop(key, None)) is None:
        groups: list[list[Tensor]] = []
        filling: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for p in reversed(parameters):
            group = filling.setdefault((p.dtype, p.device), [])
            group.append(p)
            if sum(one.nbytes for one in group) >= _BUCKET_BYTES:
                groups.append(filling.pop((p.dtype, p.device)))
        groups += filling.values()
        found = [_Bucket(group, with_loss=not n) for n, group in enumerate(groups)]
        if len(kept) == _MOST_KEPT:
            del kept[next(iter(kept))]
    kept[key] = found  # as the newest
    return found


class _Pass:
    """One backward pass: each bucket is sent off once its gradients are there.

    All ranks send them in the same order, so a bucket waits for those before it.
    """

    def __init__(
        self, buckets: list[_Bucket], world: World, weight: float | Tensor, loss: Tensor, step: int
    ) -> None:
        self._buckets, self._world, self._weight = buckets, world, weight
        self._loss, self._step, self._sent = loss, step % _STEP_MODULUS, 0
        self._lock = Lock()  # each device has a thread of its own
        self._bucket_of = {id(p): bucket for bucket in buckets for p in bucket.parameters}
        for bucket in buckets:
            bucket.missing = len(bucket.parameters)

    def ready(self, parameter: Tensor) -> None:
        """Take note of a gradient."""
        grad = parameter.grad
        with self._lock:
            if grad is not None and grad.layout == torch.strided:
                self._bucket_of[id(parameter)].missing -= 1
            while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
                self._send(self._buckets[self._sent])

    def _send(self, bucket: _Bucket) -> None:
        grads = [p.grad for p in bucket.parameters]
        there = [g for g in grads if g is not None]
        if any(g.layout != torch.strided for g in there):
            raise UserError(
                "run.backward cannot add up sparse gradients. Make the embedding with "
                "sparse=False.",
                on_all_ranks=True,
            )
        bucket.used.fill_(1)
        bucket.step.fill_(self._step)
        bucket.loss.copy_(self._loss) if bucket.loss.numel() else None
        if bucket.missing:
            bucket.used.copy_(torch.tensor([float(g is not None) for g in grads]))
            for part, g in zip(bucket.parts, grads, strict=True):
                part.zero_() if g is None else part.copy_(g)
        else:
            torch._foreach_copy_(bucket.parts, there)
        if isinstance(self._weight, Tensor):
            bucket.sums.masked_fill_(self._weight == 0, 0)
        elif self._weight == 0:
            bucket.sums.zero_()
        bucket.wait = self._world.begin_add_up(bucket.flat)
        self._sent += 1

    def finish(self) -> Tensor:
        """Replace the gradients by their sums over all ranks; return that of the loss."""
        for bucket in self._buckets[self._sent :]:
            self._send(bucket)
        for bucket in self._buckets:
            self._take(bucket)
        return self._buckets[0].loss.reshape(()).to(self._loss.dtype, copy=True)

    def _take(self, bucket: _Bucket) -> None:
        assert bucket.wait is not None
        bucket.wait()
        flat, world_size = bucket.flat, self._world.world_size
        exact = flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64)
        # Elsewhere reading makes the host wait.
        if exact and float(bucket.step) != self._step * world_size:
            raise _unequal("unequally often, so that ranks meet in different steps")
        if not bucket.missing:
            there = [p.grad for p in bucket.parameters if p.grad is not None]
            torch._foreach_copy_(there, bucket.parts)
            return
        # Only a rank that has none of its own asks the others.
        for p, part, used in zip(
            bucket.parameters, bucket.parts, bucket.used.tolist(), strict=True
        ):
            if p.grad is not None:
                p.grad.copy_(part)
            elif used:
                p.grad = part.clone()


def backward(
    loss: Tensor,
    parameters: Sequence[Tensor],
    world: World,
    weight: float | Tensor,
    *,
    step: int = 0,
    retain_graph: bool = False,
    kept: Buckets | None = None,
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
    buckets = _buckets(inputs, {} if kept is None else kept)
    running = _Pass(buckets, world, weight, mine.detach(), step)
    # The script's own hooks get the sum, as in one process: parts that are clipped add up to more.
    hooks = [h for p in inputs for h in _hooks_of(p) if h]
    taken = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    ours = [p.register_post_accumulate_grad_hook(running.ready) for p in inputs]
    try:
        mine.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    finally:
        for one in ours:
            one.remove()
        for h, those in zip(hooks, taken, strict=True):
            h.update(those)
    total = running.finish()
    with torch.no_grad():
        for p, old in zip(inputs, before, strict=True):
            _add(p, old)
    return total


def _hooks_of(parameter: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that get a new gradient, and those that get the parameter afterwards."""
    before, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return before or {}, after or {}


def _add(parameter: Tensor, old: Tensor | None) -> None:
    """Add the new gradient to the old one, and call the hooks of the parameter."""
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
