"""Samples to a batch: by the recipe's own function, or by PyTorch's where they are alike."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from samestep.data.trees import describe, num_rows, tree_leaves
from samestep.errors import UserError, blame, defined_at
from samestep.recipe import Collate


class Collating:
    """Put samples together, in a loader's process or in this one.

    Args:
        dataset: where they come from, for messages.
        collate: the recipe's own function, or None for PyTorch's.
        whole: whether a batch stays one thing; else it is a pair of inputs and targets.
    """

    def __init__(self, dataset: object, collate: Collate | None, *, whole: bool) -> None:
        self._dataset, self._collate, self._whole = dataset, collate, whole
        self._packs = False
        """Whether samples are known to be more or less than a row each: they cannot be counted."""

    def __call__(self, samples: list[Any]) -> tuple[Any, Any]:
        """Return inputs and targets of a batch; of a whole batch that, and None."""
        if self._collate is None:
            return self._by_default(samples)
        batch = self._by_recipe(self._collate, samples)
        pair = (batch, None) if self._whole else as_pair(self._dataset, batch, self._collate)
        leaves = tree_leaves(list(pair))
        if not any(
            isinstance(leaf, Tensor) or callable(getattr(leaf, "to", None)) for leaf in leaves
        ):
            raise UserError(
                f"The recipe's collate{defined_at(self._collate)} returned {describe(batch)}: "
                "there is no tensor in it."
            )
        return pair

    def _by_recipe(self, collate: Collate, samples: list[Any]) -> Any:
        try:
            batch = collate(samples)
        except Exception as error:
            kinds = "; ".join(list(dict.fromkeys(map(describe, samples)))[:3])
            blame(f"The recipe's collate failed with {len(samples)} samples ({kinds})", error)
        rows = num_rows(batch)
        if rows not in (None, len(samples)) and self._counts(collate, samples, rows):
            what = "leaves out" if rows < len(samples) else "adds"
            raise UserError(
                f"The recipe's collate{defined_at(collate)} {what} {abs(rows - len(samples))} of "
                f"{len(samples)} samples: its batch has {rows} rows. Each sample belongs to one "
                "step, so every one must be in the batch once. Leave samples out in the data set."
            )
        return batch

    def _counts(self, collate: Collate, samples: list[Any], rows: int) -> bool:
        """Whether each sample in a batch is one row of it: leaving it out takes one row away.

        Where samples are put one behind the other, it takes as many as the sample is long; where
        they are columns, it takes none, or only the longest one takes any.
        """
        if self._packs or len(samples) < 2:
            return False
        single = 0
        for left_out in range(len(samples)):
            try:
                fewer = num_rows(collate(samples[:left_out] + samples[left_out + 1 :]))
            except Exception:
                return False
            if fewer is None or rows - fewer not in (0, 1):
                self._packs = True
                return False
            single += rows - fewer
        return single >= min(rows, len(samples))

    def _by_default(self, samples: list[Any]) -> tuple[Any, Any]:
        for sample in samples if not self._whole else ():
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise _no_pair(self._dataset, sample)
        try:
            batch = default_collate(samples)
        except Exception as error:
            kinds = list(dict.fromkeys(map(describe, samples)))
            raise UserError(
                f"{name_of(self._dataset)} gives samples that cannot be put into one batch: "
                f"{'; '.join(kinds[:3])}. Write a collate into the recipe, or give all tensors, "
                f"arrays or numbers of the same shape ({type(error).__name__}: "
                f"{str(error).partition(': found')[0]})."
            ) from error
        return (batch, None) if self._whole else as_pair(self._dataset, batch)


def as_pair(
    dataset: object, batch: Any, collate: Callable[..., Any] | None = None
) -> tuple[Any, Any]:
    """Return inputs and targets of a batch, which have to be tensors."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise _no_pair(dataset, batch, collate)
    if collate is None and not all(isinstance(leaf, Tensor) for leaf in tree_leaves(list(batch))):
        raise UserError(
            f"{name_of(dataset)} gives {describe(list(batch))} as inputs and targets of a batch; "
            "both must be tensors, or trees of them. Turn names into numbers, and None into a "
            "value or into nothing."
        )
    return batch[0], batch[1]


def name_of(dataset: object) -> str:
    """Return what a message calls a data set."""
    return f"The data set {type(dataset).__name__}{defined_at(dataset)}"


def _no_pair(dataset: object, found: Any, collate: Callable[..., Any] | None = None) -> UserError:
    if isinstance(found, dict):
        what = f"a dict with the keys {', '.join(map(repr, found))}"
    elif isinstance(found, tuple | list):
        what = f"{len(found)} values ({describe(found)})"
    else:
        what = describe(found)
    whole = "or give the recipe a forward(model, batch), and a loss that takes (outputs, batch)."
    if collate is not None:
        return UserError(
            f"The recipe's collate{defined_at(collate)} returned {what}; without a forward a batch "
            f"must be a pair (inputs, targets). Return such a pair, {whole}"
        )
    return UserError(
        f"{name_of(dataset)} gives {what}; a sample must be a pair (input, target), each a tensor "
        f"or a tree of tensors. Return such a pair from __getitem__, {whole}"
    )
