"""A recipe's data cut down to a few samples, spread evenly over it, read as in training."""

from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from samestep.data.recipe_splits import SPLITS, PreparedOnRanks
from samestep.data.stream_lanes import Lane, Route, is_stream
from samestep.errors import UserError
from samestep.recipe import Splits

_MOST_BROKEN = 100
_OF_STREAM = 512
"""Elements of a stream that are looked at: the first ones."""


class _FewInBatches(Subset[Any]):
    """Some samples of a data set that reads a whole batch at a time."""

    def read_batch(self, indices: list[int]) -> Any:
        """Return a batch, as the data set does."""
        dataset: Any = self.dataset
        return dataset.read_batch([self.indices[index] for index in indices])


class _Elements(Dataset[Any]):
    """Elements of a stream, as a data set."""

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __len__(self) -> int:
        return len(self._elements)

    def __getitem__(self, index: int) -> Any:
        return self._elements[index]


def without_streams(splits: Splits, seed: int) -> Splits:
    """Return the splits with the first elements of each stream in its place, as a data set."""
    route = Route(seed=seed, epoch=0, global_batch=1, lanes=1, mine=range(1))
    for name in SPLITS:
        data: Any = getattr(splits, name)
        if is_stream(data):
            changed: dict[str, Any] = {name: _Elements(Lane(data, route, 0).take(_OF_STREAM))}
            splits = replace(splits, **changed)
    return splits


def num_samples(data: Any) -> int:
    """Return the number of samples of a split; 0 if it is absent or has no length."""
    if isinstance(data, tuple) and data:
        data = data[0]
    return len(data) if hasattr(data, "__len__") else 0


def evaluated_split(splits: Splits) -> str:
    """Return the name of the split that is evaluated."""
    return next((n for n in ("validation", "test") if num_samples(getattr(splits, n))), "train")


def cut_down(splits: Splits, num_train: int, num_evaluated: int) -> Splits:
    """Return a few samples of the training data, and of what is evaluated as `validation`."""
    evaluated = _some(getattr(splits, evaluated_split(splits)), num_evaluated)
    train = _some(splits.train, num_train)
    return replace(splits, train=train, validation=evaluated, test=None, notes=(), left_out=())


def _some(data: Any, count: int) -> Any:
    """Return some samples of a split; what is no data at all is left for others to refuse."""
    total = num_samples(data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if isinstance(data, tuple):
        if [isinstance(part, Tensor) for part in data] != [True, True]:
            return data
        taken = torch.tensor(_spread(total, count), dtype=torch.int64)
        return data[0][taken], data[1][taken]
    if not hasattr(data, "__getitem__"):
        return data
    # Samples that cannot be read are left out only where a run would leave them out, too.
    places = _readable(data, count) if isinstance(data, PreparedOnRanks) else _spread(total, count)
    return (_FewInBatches if hasattr(data, "read_batch") else Subset)(data, places)


def _spread(total: int, count: int) -> list[int]:
    """Return places spread evenly: the first ones of a folder are all of one class."""
    return [place * total // count for place in range(min(count, total))]


def _readable(dataset: Any, count: int) -> list[int]:
    """Return places of samples that can be read, where those that cannot are left out."""
    total, broken = len(dataset), 0
    found: set[int] = set()
    for place in chain(_spread(total, count), range(total)):
        if place in found or len(found) == count:
            continue
        try:
            dataset[place]
            found.add(place)
        except UserError:
            broken += 1
            if broken == _MOST_BROKEN:
                raise
    return sorted(found)
