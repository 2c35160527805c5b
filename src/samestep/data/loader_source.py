"""Samples read one by one through PyTorch's DataLoader and its workers."""

import random
import signal
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from samestep.data.blocks import Block, Read
from samestep.data.keyed_random import mix
from samestep.data.prefetch import on_device
from samestep.data.source import Reading, Source
from samestep.data.trees import describe, tree_leaves
from samestep.errors import UserError, blame, defined_at
from samestep.ranks.startup import stop_signals


class LoaderSource(Source):
    """A map-style data set read through a DataLoader, in the same order as data in memory."""

    def __init__(self, dataset: Dataset[Any], reading: Reading, num_workers: int) -> None:
        super().__init__(len(dataset), reading)  # type: ignore[arg-type]
        self._plan = _Plan()
        reads_batches = hasattr(dataset, "read_batch")
        self._loader = DataLoader(
            _Batched(dataset) if reads_batches else _Keyed(dataset, reading.seed),
            collate_fn=partial(_as_pair, dataset) if reads_batches else partial(_collate, dataset),
            batch_sampler=self._plan,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self._world.device.type == "cuda",
            worker_init_fn=_ignore_stop_signals,
        )
        # Also at Python's exit, which else waits for ever: it ends what is left by SIGTERM, and
        # the workers ignore that.
        weakref.finalize(self, _end_workers, self._loader)

    def close(self) -> None:
        """End the workers. They ignore SIGTERM, so that Python, at its end, would wait for them."""
        _end_workers(self._loader)

    def _read(self, unread: Iterator[Block], epoch: int) -> Read:
        wanted = list(unread)
        self._plan[:] = [[(epoch, index) for index in block.inputs.tolist()] for block in wanted]
        for block, (inputs, targets) in zip(wanted, self._batches(), strict=True):
            yield block, inputs, targets

    def _read_in_turn(self, batches: list[range]) -> Iterator[tuple[Any, Any]]:
        self._plan[:] = [[(0, index) for index in batch] for batch in batches]
        return self._batches()

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        try:
            for inputs, targets in on_device(self._loader, self._world.device, self._reading.lap):
                yield inputs, self._cast(targets)
        except Exception as error:
            _end_workers(self._loader)
            if isinstance(error, UserError):
                # A worker's comes with its traceback in the text; the last line is what it said.
                raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error
            raise


class _Plan(list[list[tuple[int, int]]]):
    """The batches that a DataLoader reads next: replaced before each pass, which reads a copy."""

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self[:])


class _Keyed(Dataset[Any]):
    """A data set whose random augmentation depends on (seed, epoch, sample), not on the worker."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, index = key
        drawn = mix(self._seed, epoch, index)
        torch.default_generator.manual_seed(drawn)
        random.seed(drawn)
        np.random.seed(drawn & 0xFFFFFFFF)  # noqa: NPY002 - what existing data sets draw from
        try:
            return self._dataset[index]
        except Exception as error:
            size = len(self._dataset)  # type: ignore[arg-type]
            blame(f"{_name(self._dataset)} failed at sample {index} of {size}", error)


class _Batched(Dataset[Any]):
    """A data set that draws no random numbers and reads a whole batch of samples at a time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        indices = [index for _epoch, index in keys]
        try:
            return self._dataset.read_batch(indices)
        except Exception as error:
            blame(f"{_name(self._dataset)} failed to read samples {_few(indices)}", error)


def _collate(dataset: object, samples: list[Any]) -> tuple[Any, Any]:
    """Return a batch of samples, each of which has to be a pair.

    Raises:
        UserError: they are none, or do not go together.
    """
    for sample in samples:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise _no_pair(dataset, sample)
    try:
        batch = default_collate(samples)
    except Exception as error:
        kinds = list(dict.fromkeys(map(describe, samples)))
        raise UserError(
            f"{_name(dataset)} gives samples that cannot be put into one batch: "
            f"{'; '.join(kinds[:3])}. All must have tensors, arrays or numbers of the same shape "
            f"({type(error).__name__}: {str(error).partition(': found')[0]})."
        ) from error
    return _as_pair(dataset, batch)


def _as_pair(dataset: object, batch: Any) -> tuple[Any, Any]:
    """Return inputs and targets of a batch, which have to be tensors."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise _no_pair(dataset, batch)
    if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(list(batch))):
        raise UserError(
            f"{_name(dataset)} gives {describe(list(batch))} as inputs and targets of a batch; "
            "both must be tensors, or trees of them. Turn names into numbers, and None into a "
            "value or into nothing."
        )
    return batch[0], batch[1]


def _no_pair(dataset: object, found: Any) -> UserError:
    if isinstance(found, dict):
        what = f"a dict with the keys {', '.join(map(repr, found))}"
    elif isinstance(found, tuple | list):
        what = f"{len(found)} values ({describe(found)})"
    else:
        what = describe(found)
    return UserError(
        f"{_name(dataset)} gives {what}; a sample must be a pair (input, target), each a tensor or "
        "a tree of tensors. Return such a pair from __getitem__."
    )


def _name(dataset: object) -> str:
    return f"The data set {type(dataset).__name__}{defined_at(dataset)}"


def _few(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:5]))
    return f"{shown}, …" if len(indices) > 5 else shown


def _end_workers(loader: DataLoader[Any]) -> None:
    iterator, loader._iterator = loader._iterator, None  # noqa: SLF001
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # noqa: SLF001


def _ignore_stop_signals(_worker: int) -> None:
    # A stop is the ranks' to handle: their workers serve until the step is done.
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
