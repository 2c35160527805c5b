"""Samples held in memory: gathered whole batches at a time, for several steps at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from samestep.data.blocks import Block, Lap, spans, untimed
from samestep.data.keys import sample_keys
from samestep.data.order import epoch_order, share
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.recipe import Augment, InMemory, Transform

# One gather serves several steps: it spares a small model's steps most of their overhead, and
# stays in the processor's cache.
_BYTES_PER_GATHER = 1 << 20
_STEPS_PER_GATHER = 64


class MemorySource:
    """Samples held in memory as they are stored, on the device if they fit there."""

    def __init__(
        self,
        data: InMemory,
        world: World,
        *,
        seed: int,
        dtype: torch.dtype,
        transform: Transform | None = None,
        augment: Augment | None = None,
        lap: Lap = untimed,
    ) -> None:
        inputs, targets = data
        if len(inputs) != len(targets):
            raise UserError(
                f"The recipe's data has {len(inputs)} inputs and {len(targets)} targets; "
                "each sample needs both."
            )
        self.num_samples = len(inputs)
        self._world, self._seed, self._dtype = world, seed, dtype
        self._transform, self._augment = transform, augment
        size = inputs.nbytes + targets.nbytes
        home = world.device if _fits(size, world.device) else torch.device("cpu")
        self._inputs = _store(inputs, home, dtype)
        self._targets = _store(targets, home, dtype)
        row = max(1, self._inputs[:1].numel() * 4)  # bytes of a sample as float32
        self._lap = lap
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
        for span in spans(
            order,
            first_step,
            limit,
            global_batch=global_batch,
            drop_last=drop_last,
            world=self._world,
        ):
            inputs, targets = self._gather(span.indices)
            if self._augment is not None:
                keys = sample_keys(self._seed, epoch, span.indices.to(inputs.device))
                inputs = self._augment(inputs, keys)
            yield Block(
                span.first_step,
                span.num_steps,
                self._finish(inputs),
                targets,
                span.rows,
                span.weight,
                span.global_size,
            )

    def evaluation(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of all samples once, as batches of inputs and targets."""
        mine = share(range(self.num_samples), self._world.rank, self._world.world_size)
        for start in range(mine.start, mine.stop, batch_size):
            rows = slice(start, min(start + batch_size, mine.stop))
            # A copy, since the recipe's transform may work in place.
            inputs = self._inputs[rows].to(self._world.device, copy=True)
            yield self._finish(inputs), self._targets[rows].to(self._world.device)

    def close(self) -> None:
        """Do nothing: nobody else reads."""

    def _gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        device = self._world.device
        inputs = self._inputs.index_select(0, indices)
        targets = self._targets.index_select(0, indices)
        self._lap("data")
        moved = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        self._lap("to_device")
        return moved

    def _finish(self, inputs: Tensor) -> Tensor:
        if self._transform is not None:
            inputs = self._transform(inputs)
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
