"""What the graph of a loss shows: what a summand counts for, and whose rows its labels point at.

In a contrastive loss over the rows of all ranks, the label of a row is the column of its partner.
Which columns are a rank's own, the values show: they are what it gave to the gather.
"""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cosine_similarity

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, is_tracing
from samestep.scripts.probes import Probe, ProbedCall, listening

_CROSS_ENTROPY = Probe((functional, "cross_entropy"))
_FEWEST = 4  # rows that tell which they are
_SAME = 0.999  # cosine of two rows: they may have been normalised, or rounded, in between
_DEEPEST = 8  # factors of a loss
_REORDERS = ("Roll", "Index", "Gather", "Flip", "Cat")  # columns: their labels are not its own
_LOSSES = (
    "NllLoss",
    "NllLoss2D",
    "MseLoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BinaryCrossEntropy",
    "BinaryCrossEntropyWithLogits",
)


def average_of(loss: Tensor) -> ev.LossAverage | None:
    """Return the weight of each summand of a loss by its graph; None if that does not show it."""
    node: Any = loss.grad_fn
    weight = by = other = 1.0
    for _ in range(_DEEPEST):
        name = type(node).__name__
        if name not in ("DivBackward0", "MulBackward0"):
            if (count := _count(node, name)) is None:
                return None
            return ev.LossAverage(weight / count, by=by * count, other=other, count=count)
        factor = getattr(node, "_saved_other", None)
        if not isinstance(factor, Tensor) or factor.numel() != 1:
            return None
        number = float(factor)
        if not number or not math.isfinite(number):
            return None
        weight = weight / number if name == "DivBackward0" else weight * number
        # A world size is an integer; a weight of a loss is a float.
        if not number.is_integer() or (name[0] == "M" and factor.dtype == torch.float64):
            other *= number
        elif name == "DivBackward0":
            by *= number
        node = node.next_functions[0][0]
    return None


def _count(node: Any, name: str) -> float | None:
    """Return over how many values a node takes the mean: 1 for a sum, None for another node."""
    if name == "SumBackward0":
        return 1.0
    if name == "MeanBackward0":
        return float(node._saved_self_sym_numel)  # noqa: SLF001 - there is no public place
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (1, 2) or not name.removesuffix("Backward0").endswith(_LOSSES):
        return None
    if reduction == 2:
        return 1.0
    total = getattr(node, "_saved_total_weight", None)  # of targets that are not ignored
    if total is None:
        return float(node._saved_self.numel())  # noqa: SLF001 - as above
    number = float(total)
    return number if number and number.is_integer() else None  # else classes have weights


def watching(recorder: Recorder) -> AbstractContextManager[None]:
    """Note labels that point at other ranks' rows while inside."""
    return listening((_CROSS_ENTROPY, partial(_on_cross_entropy, recorder)))


def _on_cross_entropy(recorder: Recorder, call: ProbedCall) -> None:
    logits, labels = call.argument(0, "input"), call.argument(1, "target")
    is_plain = logits.ndim == 2 and labels.ndim == 1 and logits.grad_fn is not None
    if recorder.quiet or not recorder.gathered or not is_plain or is_tracing():
        return
    with recorder.unwatched():
        rows, columns = logits.shape
        if rows < _FEWEST:
            return
        first = int(labels[0])
        counted = torch.arange(first, first + rows, dtype=labels.dtype, device=labels.device)
        if first % rows or not torch.equal(labels, counted):
            return
        whole = (matrix for matrix in _factors_of(logits) if len(matrix) == columns)
        places = [
            place * rows
            for matrix in whole
            for place, other in enumerate(torch.split(matrix, rows))
            for own in recorder.gathered
            if (own.shape, own.device) == (other.shape, other.device)
            and cosine_similarity(own, other.float()).min() > _SAME
        ]
    if places and first not in places:
        recorder.once(ev.LabelsElsewhere(rows=rows, first=first, own=places[0]))


def _factors_of(logits: Tensor) -> Iterator[Tensor]:
    """Yield the matrices (columns, features) of which a product gave the columns of some logits."""
    nodes: list[Any] = [logits.grad_fn]
    for _ in range(_DEEPEST):
        for node in nodes:
            kind = type(node).__name__
            if not kind.endswith(("mmBackward0", "MmBackward0")):
                continue
            with contextlib.suppress(Exception):  # it may be packed away, or freed
                pair = node._saved_self, node._saved_mat2  # noqa: SLF001 - there is no public place
                left, right = (m[0] if m is not None and m.ndim == 3 else m for m in pair)
                yield from filter(torch.is_tensor, (left, None if right is None else right.mT))
        straight = (n for n in nodes if not type(n).__name__.startswith(_REORDERS))
        nodes = [following for n in straight for following, _ in n.next_functions if following]
