"""Turn the order into tensors on the device: whole-batch gather from memory, or a DataLoader.

Both sources yield the same blocks for the same arguments, so the loop does not know which it has.
"""

import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from samestep.data.keys import mix, sample_keys
from samestep.data.order import epoch_order, share, step_range, steps_per_epoch
from samestep.errors import UserError
from samestep.recipe import InMemory, Recipe
from samestep.world import World

# One gather serves several steps: it spares a small model's steps most of their overhead, and
# stays in the processor's cache.
_BYTES_PER_GATHER = 1 << 20
_STEPS_PER_GATHER = 64


@dataclass(frozen=True, slots=True)
class Block:
    """One rank's part of consecutive steps of an epoch, each with the same number of samples."""

    first_step: int
    """Position in the epoch of the first step."""
    num_steps: int
    inputs: Any
    """(num_steps × rows, …) on the device, ready for the model; a tensor or a tree of tensors."""
    targets: Any
    """(num_steps × rows, …) on the device."""
    rows: int
    """Rows of this rank in each step."""
    weight: float
    """1, or 0 where the rows only stand in for an empty share, so that every rank takes part in
    the step's collectives."""
    global_size: int
    """Samples of each step over all ranks."""

    def part(self, start: int, num_steps: int) -> "Block":
        """Return some of the steps, from the `start`-th of this block, without copying."""
        if num_steps == self.num_steps:
            return self
        first, length = start * self.rows, num_steps * self.rows
        return Block(
            self.first_step + start,
            num_steps,
            narrow(self.inputs, first, length),
            narrow(self.targets, first, length),
            self.rows,
            self.weight,
            self.global_size,
        )

    def singles(self) -> Iterator["Block"]:
        """Yield the steps one by one, without copying; many times faster than `part` by part."""
        if self.num_steps == 1:
            yield self
            return
        pieces = zip(_cut(self.inputs, self.rows), _cut(self.targets, self.rows), strict=True)
        for step, (inputs, targets) in enumerate(pieces, start=self.first_step):
            yield Block(step, 1, inputs, targets, self.rows, self.weight, self.global_size)


def _cut(tree: Any, rows: int) -> Sequence[Any]:
    """Return consecutive pieces of so many rows of each tensor of a tree, as views."""
    if isinstance(tree, Tensor):
        return torch.split(tree, rows)
    leaves, form = torch.utils._pytree.tree_flatten(tree)  # noqa: SLF001
    pieces = zip(*(torch.split(leaf, rows) for leaf in leaves), strict=True)
    return [torch.utils._pytree.tree_unflatten(piece, form) for piece in pieces]  # noqa: SLF001


def narrow(tree: Any, start: int, length: int) -> Any:
    """Return rows [start, start + length) of each tensor of a tree, as views."""
    if isinstance(tree, Tensor):
        return tree.narrow(0, start, length)
    return torch.utils._pytree.tree_map(lambda leaf: leaf.narrow(0, start, length), tree)  # noqa: SLF001


class Source(Protocol):
    """A data set that yields blocks."""

    num_samples: int

    def steps_per_block(self, global_batch: int) -> int:
        """Return the most steps that a block holds: a power of two."""

    def blocks(
        self, epoch: int, first_step: int, *, global_batch: int, drop_last: bool
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on."""

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive steps of equal size, as positions in the epoch's order."""

    first_step: int
    num_steps: int
    indices: Tensor
    rows: int
    weight: float
    global_size: int


def _spans(
    order: Tensor, first_step: int, limit: int, *, global_batch: int, drop_last: bool, world: World
) -> Iterator[_Span]:
    """Cut an epoch's order into spans of at most `limit` full steps, then the incomplete one."""
    num_samples = len(order)
    num_full = num_samples // global_batch
    mine, weight = _share_or_stand_in(range(global_batch), world)
    step = first_step
    while step < num_full:
        # Aligned to the start of the epoch, so that a resumed epoch has the same blocks.
        count = min(limit - step % limit, num_full - step)
        table = order[step * global_batch : (step + count) * global_batch]
        indices = table.view(count, global_batch)[:, mine.start : mine.stop].reshape(-1)
        yield _Span(step, count, indices, len(mine), weight, global_batch)
        step += count
    total = steps_per_epoch(num_samples, global_batch, drop_last=drop_last)
    if step < total:
        positions = step_range(num_samples, global_batch, step)
        mine, weight = _share_or_stand_in(positions, world)
        indices = order[mine.start : mine.stop]
        yield _Span(step, 1, indices, len(mine), weight, len(positions))


def _share_or_stand_in(positions: range, world: World) -> tuple[range, float]:
    """Return this rank's share and weight 1; where it is empty, all positions and weight 0."""
    mine = share(positions, world.rank, world.world_size)
    return (mine, 1.0) if len(mine) else (positions, 0.0)


class MemorySource:
    """Samples held in memory as they are stored, on the device if they fit there."""

    def __init__(
        self, data: InMemory, recipe: Recipe, world: World, *, seed: int, dtype: torch.dtype
    ) -> None:
        inputs, targets = data
        if len(inputs) != len(targets):
            raise UserError(
                f"The recipe's data has {len(inputs)} inputs and {len(targets)} targets; "
                "each sample needs both."
            )
        self.num_samples = len(inputs)
        self._recipe, self._world, self._seed, self._dtype = recipe, world, seed, dtype
        size = inputs.nbytes + targets.nbytes
        home = world.device if _fits(size, world.device) else torch.device("cpu")
        self._inputs = _store(inputs, home, dtype)
        self._targets = _store(targets, home, dtype)
        row = max(1, self._inputs[:1].numel() * 4)  # bytes of a sample as float32
        self._rows_per_gather = max(1, _BYTES_PER_GATHER // row)

    def steps_per_block(self, global_batch: int) -> int:
        """Return the most steps that a block holds: a power of two."""
        rows = -(-global_batch // self._world.world_size)
        limit = min(max(1, self._rows_per_gather // rows), _STEPS_PER_GATHER)
        # A power of two, so that compiled groups of steps never straddle two blocks.
        return 1 << (limit.bit_length() - 1)

    def blocks(
        self, epoch: int, first_step: int, *, global_batch: int, drop_last: bool
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on."""
        order = epoch_order(self.num_samples, self._seed, epoch).to(self._inputs.device)
        limit = self.steps_per_block(global_batch)
        for span in _spans(
            order, first_step, limit, global_batch=global_batch, drop_last=drop_last,
            world=self._world,
        ):  # fmt: skip
            inputs, targets = self._gather(span.indices)
            if self._recipe.augment is not None:
                keys = sample_keys(self._seed, epoch, span.indices.to(inputs.device))
                inputs = self._recipe.augment(inputs, keys)
            yield Block(
                span.first_step, span.num_steps, self._finish(inputs), targets, span.rows,
                span.weight, span.global_size,
            )  # fmt: skip

    def evaluation(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""
        mine = share(range(self.num_samples), self._world.rank, self._world.world_size)
        for start in range(mine.start, mine.stop, batch_size):
            rows = slice(start, min(start + batch_size, mine.stop))
            # A copy, since the recipe's transform may work in place.
            inputs = self._inputs[rows].to(self._world.device, copy=True)
            yield self._finish(inputs), self._targets[rows].to(self._world.device)

    def _gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        device = self._world.device
        inputs = self._inputs.index_select(0, indices)
        targets = self._targets.index_select(0, indices)
        return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    def _finish(self, inputs: Tensor) -> Tensor:
        if self._recipe.transform is not None:
            inputs = self._recipe.transform(inputs)
        return inputs.to(self._dtype) if inputs.is_floating_point() else inputs


def _fits(num_bytes: int, device: torch.device) -> bool:
    """Whether data of this size may live on the device and leave most of it to the model."""
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return num_bytes < free // 4
    return True  # the CPU's memory already holds it, and MPS shares that memory


def _store(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Place data where it stays; floating-point data takes the model's type once, not per batch."""
    if tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.to(device).contiguous()


class LoaderSource:
    """A map-style data set read through a DataLoader, in the same order as data in memory."""

    def __init__(
        self, dataset: Dataset[Any], recipe: Recipe, world: World, *, seed: int,
        dtype: torch.dtype, num_workers: int,
    ) -> None:  # fmt: skip
        self.num_samples = len(dataset)  # type: ignore[arg-type]
        self._recipe, self._world, self._seed, self._dtype = recipe, world, seed, dtype
        self._plan: list[list[tuple[int, int]]] = []
        self._loader = DataLoader(
            _Keyed(dataset, seed),
            batch_sampler=_Plan(self._plan),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=world.device.type == "cuda",
            worker_init_fn=_ignore_stop_signals,
        )

    def steps_per_block(self, global_batch: int) -> int:  # noqa: ARG002 - as every source has it
        """Return the most steps that a block holds: the loader's batches are steps."""
        return 1

    def blocks(
        self, epoch: int, first_step: int, *, global_batch: int, drop_last: bool
    ) -> Iterator[Block]:
        """Yield this rank's part of the steps of a training epoch, from `first_step` on."""
        order = epoch_order(self.num_samples, self._seed, epoch)
        spans = list(
            _spans(order, first_step, 1, global_batch=global_batch, drop_last=drop_last,
                   world=self._world)
        )  # fmt: skip
        self._plan[:] = [[(epoch, index) for index in span.indices.tolist()] for span in spans]
        for span, (inputs, targets) in zip(spans, self._batches(), strict=True):
            if self._recipe.augment is not None:
                keys = sample_keys(self._seed, epoch, span.indices.to(self._world.device))
                inputs = self._recipe.augment(inputs, keys)  # noqa: PLW2901
            yield Block(
                span.first_step, 1, self._finish(inputs), targets, span.rows, span.weight,
                span.global_size,
            )  # fmt: skip

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""
        mine = share(range(self.num_samples), self._world.rank, self._world.world_size)
        self._plan[:] = [
            [(0, index) for index in mine[start : start + batch_size]]
            for start in range(0, len(mine), batch_size)
        ]
        for inputs, targets in self._batches():
            yield self._finish(inputs), targets

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        for inputs, targets in self._loader:
            yield self._place(inputs), self._cast(self._place(targets))

    def _place(self, tree: Any) -> Any:
        return torch.utils._pytree.tree_map(  # noqa: SLF001
            lambda leaf: leaf.to(self._world.device, non_blocking=True), tree
        )

    def _finish(self, inputs: Any) -> Any:
        if self._recipe.transform is not None:
            inputs = self._recipe.transform(inputs)
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


def _ignore_stop_signals(_worker: int) -> None:
    # A stop is the ranks' to handle: their workers serve until the step is done.
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def open_source(
    data: InMemory | Dataset[Any], recipe: Recipe, world: World, *, seed: int,
    dtype: torch.dtype, num_workers: int,
) -> Source:  # fmt: skip
    """Return the source that suits a data set: memory for tensors, else a DataLoader.

    Raises:
        UserError: the data has no samples, or is neither tensors nor a map-style data set.
    """
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = (data.tensors[0], data.tensors[1])
    if isinstance(data, tuple):
        if [isinstance(part, Tensor) for part in data] != [True, True]:
            kinds = ", ".join(type(part).__name__ for part in data)
            raise UserError(
                f"The recipe's data is a tuple of {len(data)} ({kinds}); it must be (inputs, "
                "targets), both tensors. torch.from_numpy makes one of a NumPy array."
            )
        source: Source = MemorySource(data, recipe, world, seed=seed, dtype=dtype)
    elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        source = LoaderSource(data, recipe, world, seed=seed, dtype=dtype, num_workers=num_workers)
    else:
        raise UserError(
            f"The recipe's data is a {type(data).__name__}; it must be (inputs, targets) tensors "
            "or a map-style Dataset with __len__ and __getitem__."
        )
    if source.num_samples == 0:
        raise UserError("The recipe's data has no samples.")
    return source
