"""Gradients of a loop of one's own, added up over all ranks."""

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


def parameters_of(trained: Sequence[Trained]) -> list[Tensor]:
    """Return what is to be trained of some modules, optimizers and parameters, each once.

    Raises:
        UserError: there is nothing to train in them, or something else is among them.
    """
    found: dict[int, Tensor] = {}
    for one in trained:
        if isinstance(one, nn.Module):
            parameters: list[Any] = [*one.parameters()]
        elif isinstance(one, torch.optim.Optimizer):
            parameters = [p for group in one.param_groups for p in group["params"]]
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
    """Return what a rank's loss is multiplied by, so that the sum over all ranks is the mean.

    Args:
        share: the part of the global batch that this rank has.
        terms: what its loss is a mean over, where that is not samples.
        loss: of this rank.
        world: this rank among the others.

    Raises:
        UserError: on every rank, where there are no terms on any. On a GPU the weight is NaN, as
            asking it would make the host wait in each step.
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


def backward(
    loss: Tensor,
    parameters: Sequence[Tensor],
    world: World,
    weight: float | Tensor,
    *,
    retain_graph: bool = False,
) -> None:
    """Add the gradient of the sum over all ranks of weight × loss to that of each parameter.

    Other parameters that the loss depends on get none. A parameter that no rank has used keeps the
    gradient that it had, or none. Where the weight is 0 the loss may be NaN, and adds nothing.

    Raises:
        UserError: a gradient is sparse.
    """
    if not world.connected:
        _backward(loss, parameters, retain_graph=retain_graph)
        return
    before = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None  # what is there already is a sum over all ranks
    _backward(loss * weight, parameters, retain_graph=retain_graph)
    for bucket in _buckets(parameters):
        _add_up(bucket, world, weight)
    for p, old in zip(parameters, before, strict=True):
        if old is not None:
            p.grad = old if p.grad is None else old.add_(p.grad)


def _backward(loss: Tensor, parameters: Sequence[Tensor], *, retain_graph: bool) -> None:
    inputs = list(parameters)
    loss.backward(inputs=inputs, retain_graph=retain_graph)  # type: ignore[no-untyped-call]


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


def _add_up(bucket: list[Tensor], world: World, weight: float | Tensor) -> None:
    """Overwrite gradients with their sums over all ranks, by one all-reduce."""
    grads = [p.grad for p in bucket]
    if any(g is not None and g.layout != torch.strided for g in grads):
        raise UserError(
            "run.backward cannot add up sparse gradients. Make the embedding with sparse=False.",
            on_all_ranks=True,
        )
    like = bucket[0]
    used = torch.tensor([float(g is not None) for g in grads], dtype=like.dtype).to(like.device)
    parts = [torch.zeros_like(p) if g is None else g for p, g in zip(bucket, grads, strict=True)]
    own = torch.cat([part.detach().reshape(-1) for part in parts])
    if isinstance(weight, Tensor):
        own = torch.where(weight == 0, 0, own)
    elif weight == 0:
        own.zero_()
    flat = torch.cat([own, used])
    world.add_up(flat)
    *sums, used = torch.split(flat, [*(p.numel() for p in bucket), len(bucket)])
    # Only a rank that has none of its own asks the others: reading makes the host wait.
    anywhere = used.tolist() if None in grads else [1.0] * len(bucket)
    for p, g, total, some in zip(bucket, grads, sums, anywhere, strict=True):
        if g is not None:
            g.copy_(total.view_as(p))
        elif some:
            p.grad = total.view_as(p).clone()
