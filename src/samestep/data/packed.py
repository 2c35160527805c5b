"""Batches on their way from a loader worker: all tensors of one in a single piece of shared memory.

PyTorch sends each tensor in a piece of its own, and opening one takes longer than collating a few
samples. A batch of graphs has a dozen.
"""

import io
import math
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

_ALIGNED = 64
"""Bytes: each tensor begins at a multiple of this, as PyTorch's own do on the CPU."""


class Packing:
    """Collate, and pack the batch where a worker sends it to another process."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch, packed in a worker."""
        batch = self._collate(samples)
        return batch if get_worker_info() is None else Packed(batch)


def unpacked(batch: Any) -> Any:
    """Return what was collated, packed or not."""
    return batch.batch() if isinstance(batch, Packed) else batch


class Packed:
    """A batch without its tensors, and one vector of bytes that holds them."""

    def __init__(self, batch: Any) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(batch)
        self._rest, self._places = file.getvalue(), pickler.places
        size = max(1, pickler.size)
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # noqa: SLF001
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        for place, tensor in zip(self._places, pickler.tensors, strict=True):
            _view(self._bytes, *place).copy_(tensor)

    def batch(self) -> Any:
        """Return the batch; its tensors are views of the one vector."""
        return _Unpickler(io.BytesIO(self._rest), self._bytes, self._places).load()

    def pin_memory(self) -> Any:
        """Return the batch with its tensors in pinned memory, as PyTorch's loader asks for it."""
        return pin_memory(self.batch())  # type: ignore[no-untyped-call]


_Place = tuple[torch.dtype, tuple[int, ...], int]
"""Type, shape and first byte of a tensor."""


class _Pickler(ForkingPickler):
    """Leave out dense tensors on the CPU; all else is pickled as between processes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[Tensor] = []
        self.places: list[_Place] = []
        self.size = 0
        self._numbers: dict[int, int] = {}

    def persistent_id(self, found: Any) -> int | None:
        """Return the number of a tensor that is left out."""
        if type(found) is not Tensor or not _is_plain(found):
            return None
        number = self._numbers.setdefault(id(found), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(found)
            self.places.append((found.dtype, tuple(found.shape), self.size))
            self.size += -(-found.nbytes // _ALIGNED) * _ALIGNED
        return number


class _Unpickler(pickle.Unpickler):
    """Put the tensors back."""

    def __init__(self, file: io.BytesIO, whole: Tensor, places: list[_Place]) -> None:
        super().__init__(file)
        self._tensors = [_view(whole, *place) for place in places]

    def persistent_load(self, number: int) -> Tensor:
        """Return the tensor of this number."""
        return self._tensors[number]


def _is_plain(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return False
    return tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_quantized)


def _view(whole: Tensor, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    length = math.prod(shape) * dtype.itemsize
    return whole[start : start + length].view(dtype).view(shape)
