"""What `samestep predict` shows of a model's outputs, sample by sample."""

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from samestep.data.trees import describe, map_leaves, tree_leaves
from samestep.errors import UserError, blame, defined_at

_TAKEN = ("file", "row", "classes", "problem")
"""Fields of a prediction, which `show` cannot name again."""


class RowsOfFiles(Dataset[Any]):
    """Samples that `read` gave."""

    def __init__(self, samples: Sequence[Any]) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[index]


def class_scores(
    outputs: Any, classes: Sequence[str], top: int, *, numbered: bool
) -> list[tuple[tuple[str, float], ...]] | None:
    """Return the most probable classes of each sample, or None where outputs are no class scores.

    Args:
        outputs: the model's.
        classes: the names of the classes, if they have any.
        top: how many to return.
        numbered: whether outputs are class scores even without names: then numbers are the names.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() != 2 or not outputs.is_floating_point():
        return None
    width = outputs.shape[1]
    names = classes or (tuple(map(str, range(width))) if numbered else ())
    if len(names) != width:
        return None
    best = outputs.cpu().to(torch.float64).softmax(dim=1).topk(min(top, width))
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [tuple((names[k], p) for k, p in zip(*row, strict=True)) for row in rows]


def rows_of(name: str, tree: Any, count: int) -> list[dict[str, Any]]:
    """Return what each sample has of a tree of tensors, under a name.

    Raises:
        UserError: a tensor has not one number, or one row of numbers, for each sample.
    """
    if not fits(tree, count):
        raise UserError(
            f"The model's outputs for {count} samples are {describe(tree)}, and predict shows one "
            "number or one row of numbers a sample. Say what to show: Recipe(show=…), a function "
            "(outputs, targets) → a dict for each sample; with forward, (outputs, batch)."
        )
    here = map_leaves(Tensor.cpu, tree)
    return [{name: _plain(map_leaves(itemgetter(place), here))} for place in range(count)]


def fits(tree: Any, count: int) -> bool:
    """Whether a tree has tensors with one number, or one row of numbers, for each sample."""
    leaves = tree_leaves(tree)
    return bool(leaves) and all(
        isinstance(leaf, Tensor) and leaf.dim() in (1, 2) and len(leaf) == count for leaf in leaves
    )


def named(row: dict[str, Any], classes: Sequence[str]) -> dict[str, Any]:
    """Return a sample's target with the name of its class in place of the number."""
    return {
        key: classes[value] if isinstance(value, int) and 0 <= value < len(classes) else value
        for key, value in row.items()
    }


def shown_by(
    show: Callable[[Any, Any], Sequence[Mapping[str, Any]]], outputs: Any, targets: Any, count: int
) -> list[dict[str, Any]]:
    """Return what the recipe's own `show` says of each sample.

    Raises:
        UserError: it fails, or returns something else than a dict for each sample.
    """
    try:
        rows = list(show(outputs, targets))
    except Exception as error:
        blame(f"The recipe's show failed with outputs {describe(outputs)}", error, show)
    if len(rows) != count or not all(isinstance(row, Mapping) for row in rows):
        kinds = ", ".join(dict.fromkeys(type(row).__name__ for row in rows))
        raise UserError(
            f"The recipe's show{defined_at(show)} returned {len(rows)} values ({kinds}) for "
            f"{count} samples; it must return a dict for each."
        )
    for name in _TAKEN:
        if any(name in row for row in rows):
            raise UserError(
                f"The recipe's show{defined_at(show)} names a value {name!r}, which predict says "
                f"itself. Give it another name, such as 'own_{name}'."
            )
    return [{str(name): _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; a number that is none becomes None."""
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return _plain(value.item())
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int) or value is None else str(value)
