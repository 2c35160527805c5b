"""Samples held in memory: gathered whole batches at a time, for several steps at once."""

from collections.abc import Iterator, Sequence
from itertools import islice, tee
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.trees import real_parts
from samestep.core.data.order import Block, Read, untimed
from samestep.core.data.source import OrderedSource, ReadOptions
from samestep.core.recipe import InMemory
from samestep.launch.ranks.world import World

# One gather serves several steps: it spares a small model's steps most of their overhead. On a
# CPU it stays in the processor's cache. A GPU has no such limit, and gathering and augmenting start
# dozens of kernels there that hardly take longer for more samples.
_BYTES_PER_GATHER = 1 << 20
_BYTES_PER_GATHER_ON_CUDA = 64 << 20
_STEPS_PER_GATHER = 64
_ALIGNED_BYTES = 64
"""Where PyTorch lets memory begin on a CPU."""
_MARKED_ROWS = 64
_RESIDENT_FRACTION = 0.25
"""What data takes at most of a GPU's memory: the rest is the training's."""


class MemorySource(OrderedSource):
    """Samples held in memory as they are stored, on the device if they fit there."""

    _rows_are_samples = True

    def __init__(self, data: InMemory, reading: ReadOptions) -> None:
        inputs, targets = data
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.layout != torch.strided:
                layout = str(tensor.layout).removeprefix("torch.")
                raise UserError(
                    f"{reading.data} has {name} of layout {layout}, which cannot be indexed by "
                    f"row. Return {name}.to_dense(), or a Dataset whose samples are dense."
                )
            if tensor.dim() == 0:
                raise UserError(f"{reading.data} has {name} without a row per sample: one number.")
        if len(inputs) != len(targets):
            raise UserError(
                f"{reading.data} has {len(inputs)} inputs and {len(targets)} targets; "
                "each sample needs both."
            )
        super().__init__(len(inputs), reading)
        device = self._world.device
        # Floating-point data takes the model's type here once, not in every batch.
        stored = self._cast(inputs), self._cast(targets)
        self.is_resident = _fits_on(stored, self._world)
        """Whether the data is where the model is; else batches of it are copied."""
        home = device if self.is_resident else torch.device("cpu")
        self._inputs, self.targets = (tensor.to(home).contiguous() for tensor in stored)
        self.held_bytes = self._inputs.nbytes + self.targets.nbytes
        self._order_device = self._inputs.device
        row = max(1, inputs[:1].numel() * 4)  # bytes of a sample as float32
        most = _BYTES_PER_GATHER_ON_CUDA if device.type == "cuda" else _BYTES_PER_GATHER
        self._rows_per_gather: int = max(1, most // row)
        bytes_of_rows = (self._inputs[:1].nbytes, self.targets[:1].nbytes)
        self._aligned_rows = lcm(*(_ALIGNED_BYTES // gcd(_ALIGNED_BYTES, n) for n in bytes_of_rows))

    def marks(self) -> list[float]:
        """Return a number for each of some rows: equal, to rounding, where the data is."""
        marks: list[float] = []
        for part in (self._inputs, self.targets):
            rows = torch.linspace(0, len(part) - 1, min(_MARKED_ROWS, len(part))).long()
            some = real_parts(part[rows.to(part.device)].cpu())
            if some.numel():
                some = some.double().reshape(len(rows), -1)
                marks += (some * torch.arange(some.shape[1]).cos()).sum(1).tolist()
        return marks

    def steps_per_block(self, global_batch: int) -> int:
        """Return the most steps that a block holds: a power of two."""
        if self._world.virtual_ranks and self._world.device.type != "cpu":
            return 1
        rows = -(-global_batch // self._world.world_size)
        limit = min(max(1, self._rows_per_gather // rows), _STEPS_PER_GATHER)
        # A power of two, so that compiled groups of steps never straddle two blocks.
        return 1 << (limit.bit_length() - 1)

    def _read(self, unread: Iterator[Block], _epoch: int) -> Read:
        device, lap = self._world.device, self._reading.lap
        if not self.is_resident:
            from samestep.core.data.prefetch import on_device  # noqa: PLC0415

            blocks, wanted = tee(unread)
            pairs = on_device(map(self._gather, wanted), device, lap)
            for block, (inputs, targets) in zip(blocks, pairs, strict=True):
                yield block, inputs, targets
            return
        if self._world.virtual_ranks and device.type == "cpu":
            yield from self._read_together(unread)
            return
        for block in unread:
            inputs = self._inputs.index_select(0, block.inputs)
            targets = self.targets.index_select(0, block.inputs)
            lap("data")
            lap("to_device")
            yield block, inputs, targets

    def _read_together(self, unread: Iterator[Block]) -> Read:
        """Gather many micro-steps of virtual ranks at once.

        Each begins where memory of its own might: a kernel may round otherwise elsewhere.
        """
        for first in unread:
            most = min(max(1, self._rows_per_gather // max(1, first.rows)), _STEPS_PER_GATHER)
            blocks = [first, *islice(unread, most - 1)]
            indices, sizes = torch.cat([b.inputs for b in blocks]), [b.rows for b in blocks]
            inputs = self._inputs.index_select(0, indices).split(sizes)
            targets = self.targets.index_select(0, indices).split(sizes)
            self._reading.lap("data")
            self._reading.lap("to_device")
            row = 0
            for block, mine, wanted in zip(blocks, inputs, targets, strict=True):
                if row % self._aligned_rows:
                    yield block, mine.clone(), wanted.clone()
                else:
                    yield block, mine, wanted
                row += block.rows

    def _gather(self, block: Block) -> tuple[Tensor, Tensor]:
        """Return the samples of a block in memory that the device can copy from by itself."""
        pinned = self._world.device.type == "cuda"

        def rows(stored: Tensor) -> Tensor:
            shape = (len(block.inputs), *stored.shape[1:])
            into = torch.empty(shape, dtype=stored.dtype, pin_memory=pinned)
            return torch.index_select(stored, 0, block.inputs, out=into)

        return rows(self._inputs), rows(self.targets)

    def _read_in_turn(self, batches: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Any]]:
        pairs = ((_rows(self._inputs, b), _rows(self.targets, b)) for b in batches)
        if not self.is_resident:
            from samestep.core.data.prefetch import on_device  # noqa: PLC0415

            yield from on_device(pairs, self._world.device, untimed)
            return
        for inputs, targets in pairs:
            yield inputs.clone(), targets.clone()  # a recipe's functions may work in place


def _rows(stored: Tensor, indices: Sequence[int]) -> Tensor:
    if isinstance(indices, range):
        return stored[indices.start : indices.stop]
    return stored.index_select(0, torch.tensor(indices, device=stored.device))


def _fits_on(stored: tuple[Tensor, Tensor], world: World) -> bool:
    """Whether data can lie where the model is. A CPU already holds it, and MPS shares that."""
    if world.device.type != "cuda" or all(tensor.device == world.device for tensor in stored):
        return True
    return sum(tensor.nbytes for tensor in stored) < _room(world)


def _room(world: World) -> float:
    """Return the bytes of this rank's GPU that its data may still take.

    All that the rank already holds there counts, data that was placed earlier above all. A rank
    that shares the GPU may have placed its own, and then leaves less: never more than their share.
    """
    device = world.device
    free, _total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)  # by PyTorch, in use or not
    # Ranks that share a GPU are connected by Gloo: NCCL refuses two ranks on one.
    gpus = world.local_world_size if world.backend == "nccl" else torch.cuda.device_count()
    sharing = -(-world.local_world_size // max(1, gpus))
    share = _RESIDENT_FRACTION * (free + reserved) / sharing
    return share - torch.cuda.memory_allocated(device)
