"""Samples read one by one through PyTorch's DataLoader and its workers."""

import signal
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from samestep.data.blocks import Block, Lap, spans, untimed
from samestep.data.keys import mix, sample_keys
from samestep.data.order import epoch_order, share
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.recipe import Augment, Transform


class LoaderSource:
    """A map-style data set read through a DataLoader, in the same order as data in memory."""

    def __init__(
        self,
        dataset: Dataset[Any],
        world: World,
        *,
        seed: int,
        dtype: torch.dtype,
        num_workers: int,
        transform: Transform | None = None,
        augment: Augment | None = None,
        lap: Lap = untimed,
    ) -> None:
        self.num_samples = len(dataset)  # type: ignore[arg-type]
        self._world, self._seed, self._dtype = world, seed, dtype
        self._transform, self._augment = transform, augment
        self._lap = lap
        self._plan: list[list[tuple[int, int]]] = []
        reads_batches = hasattr(dataset, "read_batch")
        self._loader = DataLoader(
            _Batched(dataset) if reads_batches else _Keyed(dataset, seed),
            collate_fn=_as_it_is if reads_batches else None,
            batch_sampler=_Plan(self._plan),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=world.device.type == "cuda",
            worker_init_fn=_ignore_stop_signals,
        )
        # Also at Python's exit, which else waits for ever: it ends what is left by SIGTERM, and
        # the workers ignore that.
        weakref.finalize(self, _end_workers, self._loader)

    def steps_per_block(self, global_batch: int) -> int:  # noqa: ARG002 - as every source has it
        """Return the most steps that a block holds: the loader's batches are steps."""
        return 1

    def blocks(
        self, epoch: int, first_step: int, *, global_batch: int, drop_last: bool
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on."""
        order = epoch_order(self.num_samples, self._seed, epoch)
        parts = list(
            spans(
                order,
                first_step,
                1,
                global_batch=global_batch,
                drop_last=drop_last,
                world=self._world,
            )
        )
        self._plan[:] = [[(epoch, index) for index in span.indices.tolist()] for span in parts]
        for span, (inputs, targets) in zip(parts, self._batches(), strict=True):
            if self._augment is not None:
                keys = sample_keys(self._seed, epoch, span.indices.to(self._world.device))
                inputs = self._augment(inputs, keys)  # noqa: PLW2901
            yield Block(
                span.first_step,
                1,
                self._finish(inputs),
                targets,
                span.rows,
                span.weight,
                span.global_size,
            )

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""
        mine = share(range(self.num_samples), self._world.rank, self._world.world_size)
        self._plan[:] = [
            [(0, index) for index in mine[start : start + batch_size]]
            for start in range(0, len(mine), batch_size)
        ]
        for inputs, targets in self._batches():
            yield self._finish(inputs), targets

    def close(self) -> None:
        """End the workers. They ignore SIGTERM, so that Python, at its end, would wait for them."""
        iterator = getattr(self._loader, "_iterator", None)  # PyTorch has no public way
        if iterator is not None:
            iterator._shutdown_workers()  # noqa: SLF001

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        try:
            for inputs, targets in self._loader:
                self._lap("data")
                placed = self._place(inputs), self._place(targets)
                self._lap("to_device")
                yield placed[0], self._cast(placed[1])
        except Exception as error:
            _end_workers(self._loader)
            if isinstance(error, UserError):
                # A worker's comes with its traceback in the text; the last line is what it said.
                raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error
            raise

    def _place(self, tree: Any) -> Any:
        return torch.utils._pytree.tree_map(  # noqa: SLF001
            lambda leaf: leaf.to(self._world.device, non_blocking=True), tree
        )

    def _finish(self, inputs: Any) -> Any:
        if self._transform is not None:
            inputs = self._transform(inputs)
        return self._cast(inputs)

    def _cast(self, tree: Any) -> Any:
        return torch.utils._pytree.tree_map(  # noqa: SLF001
            lambda leaf: leaf.to(self._dtype) if leaf.is_floating_point() else leaf, tree
        )


class _Plan:
    """The batches that a DataLoader reads next: the list is replaced before each pass."""

    def __init__(self, batches: list[list[tuple[int, int]]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(list(self._batches))

    def __len__(self) -> int:
        return len(self._batches)


class _Keyed(Dataset[Any]):
    """A data set whose random augmentation depends on (seed, epoch, sample), not on the worker."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        import random  # noqa: PLC0415

        import numpy as np  # noqa: PLC0415

        epoch, index = key
        drawn = mix(self._seed, epoch, index)
        torch.default_generator.manual_seed(drawn)
        random.seed(drawn)
        np.random.seed(drawn & 0xFFFFFFFF)  # noqa: NPY002 - what existing data sets draw from
        return self._dataset[index]


class _Batched(Dataset[Any]):
    """A data set that draws no random numbers and reads a whole batch of samples at a time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        return self._dataset.read_batch([index for _epoch, index in keys])


def _as_it_is(batch: Any) -> Any:
    return batch


def _end_workers(loader: DataLoader[Any]) -> None:
    iterator, loader._iterator = loader._iterator, None  # noqa: SLF001
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # noqa: SLF001


def _ignore_stop_signals(_worker: int) -> None:
    # A stop is the ranks' to handle: their workers serve until the step is done.
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
