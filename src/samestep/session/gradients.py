"""Gradients of a user's own loop, added up over all ranks."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from samestep.errors import UserError
from samestep.ranks.world import World

Trained = nn.Module | torch.optim.Optimizer | Tensor
"""What a gradient is for: a module, what an optimizer steps, or a parameter by itself."""

_BUCKET_BYTES = 32 << 20
"""Of gradients that are copied together and reduced at once."""
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


def backward(
    loss: Tensor,
    parameters: Sequence[Tensor],
    world: World,
    weight: float | Tensor,
    *,
    step: int = 0,
    retain_graph: bool = False,
) -> Tensor:
    """Add the gradient of the sum over all ranks of weight × loss to that of each parameter.

    Return that sum, the same on every rank. A parameter that no rank has used keeps the gradient
    that it had, or none. Where the weight is 0 the loss may be NaN, and adds nothing.
    """
    inputs = list(parameters)
    if not world.connected:
        loss.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        return loss.detach()
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None  # what is there already is a sum over all ranks
    mine = loss * weight
    mine.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]
    mine, apart = mine.detach().reshape(1), step % _STEP_MODULUS
    # The loss travels with the first bucket: mine[1:] is empty.
    totals = [
        _add_up(bucket, world, weight, mine[number:], apart)
        for number, bucket in enumerate(_buckets(parameters))
    ]
    for p, old in zip(parameters, before, strict=True):
        if old is not None:
            p.grad = old if p.grad is None else old.add_(p.grad)
    return (totals or [mine])[0].reshape(()).to(loss.dtype)


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of one type and device, not too many at a time."""

    def kind(p: Tensor) -> str:
        return f"{p.dtype} {p.device}"

    for _, alike in groupby(sorted(parameters, key=kind), key=kind):
        bucket: list[Tensor] = []
        size = 0
        for p in alike:
            bucket.append(p)
            size += p.nbytes
            if size >= _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _add_up(
    bucket: list[Tensor], world: World, weight: float | Tensor, more: Tensor, step: int
) -> Tensor:
    """Replace gradients by their sums over all ranks, in one all-reduce; return that of `more`."""
    grads = [p.grad for p in bucket]
    if any(g is not None and g.layout != torch.strided for g in grads):
        raise UserError(
            "run.backward cannot add up sparse gradients. Make the embedding with sparse=False.",
            on_all_ranks=True,
        )
    like = bucket[0]
    marks = [*(float(g is not None) for g in grads), float(step)]
    used = torch.tensor(marks, dtype=like.dtype).to(like.device)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(bucket, grads, strict=True)]
    own = torch.cat([*(part.detach().reshape(-1) for part in parts), more.to(like)])
    if isinstance(weight, Tensor):
        own = torch.where(weight == 0, 0, own)
    elif weight == 0:
        own.zero_()
    flat = torch.cat([own, used])
    world.add_up(flat)
    sizes = [*(p.numel() for p in bucket), len(more), len(bucket), 1]
    *sums, more, used, steps = torch.split(flat, sizes)
    exact = like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64)
    if exact and float(steps) != step * world.world_size:  # elsewhere reading makes the host wait
        raise _unequal("unequally often, so that ranks meet in different steps")
    # Only a rank that has none of its own asks the others: reading makes the host wait.
    anywhere = used.tolist() if None in grads else [1.0] * len(bucket)
    for p, g, total, some in zip(bucket, grads, sums, anywhere, strict=True):
        if g is not None:
            g.copy_(total.view_as(p))
        elif some:
            p.grad = total.view_as(p).clone()
    return more
