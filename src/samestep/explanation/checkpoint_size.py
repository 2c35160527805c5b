"""How large a checkpoint file is: what it would hold is written, and only its bytes are counted."""

import io
from typing import Any, BinaryIO, cast

import torch

from samestep.session.build import Built
from samestep.session.request import Request
from samestep.session.resuming import settings_text
from samestep.training.snapshot import capture


class _ByteCount(io.RawIOBase):
    """Count bytes, and keep none."""

    def __init__(self) -> None:
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size


def checkpoint_bytes(request: Request, built: Built) -> int:
    """Return the bytes of a checkpoint of a training that has taken a step."""
    content = capture(built.work, built.state, request.recipe.name)
    count = _ByteCount()
    made_with = settings_text(request, built.work)
    torch.save({**content, "made_with": made_with}, cast("BinaryIO", count))
    return count.bytes
