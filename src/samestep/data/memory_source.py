"""Samples held in memory: gathered whole batches at a time, for several steps at once."""

from collections.abc import Iterator

import torch
from torch import Tensor

from samestep.data.blocks import Block, Read
from samestep.data.source import Reading, Source
from samestep.errors import UserError
from samestep.recipe import InMemory

# One gather serves several steps: it spares a small model's steps most of their overhead, and
# stays in the processor's cache.
_BYTES_PER_GATHER = 1 << 20
_STEPS_PER_GATHER = 64


class MemorySource(Source):
    """Samples held in memory as they are stored, on the device if they fit there."""

    _rows_are_samples = True

    def __init__(self, data: InMemory, reading: Reading) -> None:
        inputs, targets = data
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.layout != torch.strided:
                layout = str(tensor.layout).removeprefix("torch.")
                raise UserError(
                    f"The recipe's data has {name} of layout {layout}, and rows cannot be taken "
                    f"from it. Give {name}.to_dense(), or a Dataset whose samples are dense."
                )
            if tensor.dim() == 0:
                raise UserError(
                    f"The recipe's data has {name} without a row for each sample: a single number."
                )
        if len(inputs) != len(targets):
            raise UserError(
                f"The recipe's data has {len(inputs)} inputs and {len(targets)} targets; "
                "each sample needs both."
            )
        super().__init__(len(inputs), reading)
        home = self._world.device
        # Most of a GPU is left to the model. A CPU already holds the data, and MPS shares that.
        if home.type == "cuda" and (
            inputs.nbytes + targets.nbytes >= torch.cuda.mem_get_info(home)[0] // 4
        ):
            home = torch.device("cpu")
        # Floating-point data takes the model's type here once, not in every batch.
        self._inputs = self._cast(inputs).to(home).contiguous()
        self.targets = self._cast(targets).to(home).contiguous()
        self._order_device = self._inputs.device
        row = max(1, self._inputs[:1].numel() * 4)  # bytes of a sample as float32
        self._rows_per_gather: int = max(1, _BYTES_PER_GATHER // row)

    def steps_per_block(self, global_batch: int) -> int:
        """Return the most steps that a block holds: a power of two."""
        rows = -(-global_batch // self._world.world_size)
        limit = min(max(1, self._rows_per_gather // rows), _STEPS_PER_GATHER)
        # A power of two, so that compiled groups of steps never straddle two blocks.
        return 1 << (limit.bit_length() - 1)

    def _read(self, unread: Iterator[Block], _epoch: int) -> Read:
        device, lap = self._world.device, self._reading.lap
        for block in unread:
            inputs = self._inputs.index_select(0, block.inputs)
            targets = self.targets.index_select(0, block.inputs)
            lap("data")
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            lap("to_device")
            yield block, inputs, targets

    def _read_in_turn(self, batches: list[range]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            rows = slice(batch.start, batch.stop)
            # A copy, since the recipe's transform may work in place.
            inputs = self._inputs[rows].to(self._world.device, copy=True)
            yield inputs, self.targets[rows].to(self._world.device)
