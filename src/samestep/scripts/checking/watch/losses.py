"""What the graph of a loss shows: what a summand counts for, and whose rows its labels point at.

In a contrastive loss over the rows of all ranks, the label of a row is the column of its partner,
or the rows of one class belong together. Which columns are a rank's own, the values show: they are
what it gave to the gather. So they do in an evaluation, where predictions are compared with labels.
"""

import contextlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import cosine_similarity

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, checksum, is_tracing
from samestep.scripts.hooks import loss_of
from samestep.scripts.probes import BACKWARD, Probe, ProbedCall, listening

_CROSS_ENTROPY = Probe((functional, "cross_entropy"))
_EQUAL = Probe((Tensor, "__eq__"), (Tensor, "eq"), (torch, "eq"))
_FEWEST, _FEW = 4, 8  # rows that tell which they are, and samples that tell their order
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
    """Note labels that are of other rows, or come in another order, while inside."""
    labels = _Labels(recorder)
    pairs = ((_CROSS_ENTROPY, labels.on_cross_entropy), (_EQUAL, labels.on_equal))
    return listening(*pairs, (BACKWARD, labels.on_backward))


class _Labels:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._compared: list[tuple[str, Tensor]] = []
        """Where the step has compared labels of many rows, and these."""

    def on_cross_entropy(self, call: ProbedCall) -> None:
        logits, labels = call.argument(0, "input"), call.argument(1, "target")
        is_plain = logits.ndim == 2 and labels.ndim == 1 and logits.grad_fn is not None
        if self._recorder.quiet or not self._recorder.gathered or not is_plain or is_tracing():
            return
        with self._recorder.unwatched():
            if (rows := len(logits)) < _FEWEST:
                return
            first = int(labels[0])
            counted = torch.arange(first, first + rows, dtype=labels.dtype, device=labels.device)
            if first % rows or not torch.equal(labels, counted):
                return
            parts = self._own_parts(logits, logits.shape[1])
            places = [place * rows for own, place in parts if own == rows]
        if places and first not in places:
            self._recorder.once(ev.RowsLabelled(rows, own=places[0], first=first))

    def _own_parts(self, output: Tensor, columns: int) -> list[tuple[int, int]]:
        """Return the lengths of what this rank gave to a gather, and which part that is of it."""
        whole = [matrix for matrix in _factors_of(output) if len(matrix) == columns]
        return [
            (len(own), place)
            for matrix in whole
            for own in self._recorder.gathered
            if own.ndim == 2 and _FEWEST <= len(own) < columns
            for place, other in enumerate(torch.split(matrix, len(own)))
            if (own.shape, own.device) == (other.shape, other.device)
            and cosine_similarity(own, other.float()).min() > _SAME
        ]

    def on_equal(self, call: ProbedCall) -> None:
        """Keep labels that a loss compares; note those of an evaluation in another order."""
        pair = call.argument(0, "input"), call.argument(1, "other")
        recorder, event = self._recorder, None
        if recorder.quiet or not all(type(value) is Tensor for value in pair) or is_tracing():
            return
        if torch.is_grad_enabled():
            # Every row with every other, and not predictions with labels.
            for value in pair if recorder.gathered and pair[0].shape != pair[1].shape else ():
                if value.numel() == max(value.shape, default=0) and not value.is_floating_point():
                    self._compared = [*self._compared, (recorder.where(), value.flatten())][-4:]
        elif recorder.evaluated is not None and pair[0].numel() == pair[1].numel():
            # What cannot be compared, as booleans in a matrix, tells no order.
            with recorder.unwatched(), contextlib.suppress(Exception):
                event = self._orders_of(*map(torch.ravel, pair))
        if event is not None:
            recorder.once(event)

    def on_backward(self, call: ProbedCall) -> None:
        """Note what a loss over gathered rows has compared as the labels of each rank's rows."""
        compared, self._compared = self._compared, []
        if self._recorder.quiet or is_tracing():
            return
        for where, labels in compared:
            with self._recorder.unwatched():
                ((rows, place), *_) = self._own_parts(loss_of(call), len(labels)) or [(0, 0)]
                blocks = [*map(checksum, torch.split(labels, rows))] if rows else []
            if blocks:
                own = place * rows
                event = ev.RowsLabelled(rows, own=own, first=own, blocks=blocks)
                self._recorder.note(event, where=where)
                return

    def _orders_of(self, one: Tensor, other: Tensor) -> ev.OrdersDiffer | None:
        """Compare where own predictions are that were gathered, and the labels of their samples."""
        read, recorder = self._recorder.evaluated, self._recorder
        labels = [torch.cat(parts) for parts in zip(*read.columns, strict=True)]
        n = len(labels[0]) if labels else 0
        places = {
            "rank by rank": torch.arange(n) + recorder.rank * n,
            "one of each rank in turn": torch.arange(n) * recorder.world_size + recorder.rank,
            "in the order of the data set": torch.tensor(read.indices),
        }
        places = {name: at for name, at in places.items() if len(at) == n}
        for given in (tensor for tensor in read.given if len(tensor) == n):
            own = given if given.ndim == 1 else given.argmax(-1)
            for first, second in ((one, other), (other, one)):
                at = _standing(first, own, places)
                right = [name for values in labels for name in _standing(second, values, places)]
                if at and right and not {*at} & {*right}:
                    return ev.OrdersDiffer((at[0], right[0]))
        return None


def _standing(values: Tensor, own: Tensor, places: dict[str, Tensor]) -> list[str]:
    """Return the orders in which a rank's own values are in those of all; none if they are few."""
    inside = [(name, at, at < len(values)) for name, at in places.items()]
    many = [(name, at[known], own[known]) for name, at, known in inside if known.sum() >= _FEW]
    return [name for name, at, there in many if torch.equal(values[at], there)]


def _factors_of(logits: Tensor) -> Iterator[Tensor]:
    """Yield the matrices (columns, features) of which a product gave the columns of some logits."""
    nodes: list[Any] = [logits.grad_fn]
    for _ in range(2 * _DEEPEST):
        for node in nodes:
            kind = type(node).__name__
            if not kind.endswith(("mmBackward0", "MmBackward0")):
                continue
            with contextlib.suppress(Exception):  # it may be packed away, or freed
                pair = node._saved_self, node._saved_mat2  # noqa: SLF001 - there is no public place
                left, right = (m[0] if m is not None and m.ndim == 3 else m for m in pair)
                yield from filter(torch.is_tensor, (left, None if right is None else right.mT))
        straight = (n for n in nodes if not type(n).__name__.startswith(_REORDERS))
        ahead = (following for n in straight for following, _ in n.next_functions if following)
        nodes = [*dict.fromkeys(ahead)]
