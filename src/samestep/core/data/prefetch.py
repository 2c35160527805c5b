"""Batches on their way from the host to the device: on CUDA, one is copied ahead of its use.

The copy runs on a stream of its own, while the device still computes the batch before. On other
devices a batch is copied when it is asked for, and on the CPU there is nothing to copy.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from samestep.base.trees import map_leaves, tree_leaves
from samestep.core.data.order import Lap

Pair = tuple[Any, Any]
"""Inputs and targets of a batch: trees of tensors."""


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for a copy to a CUDA device.

    For that the copy has to start from pinned memory. PyTorch reuses pinned memory only after the
    copies from it are done, so the caller need not keep the tensor.
    """
    if device.type != "cuda":
        return tensor.to(device)
    if tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def on_device(pairs: Iterable[Pair], device: torch.device, lap: Lap) -> Iterator[Pair]:
    """Yield batches on the device, in order; what fails is raised in place of its own batch.

    `lap` is called when the host has read a batch ("data"), and the device has it ("to_device").
    """
    if (copier := _copier(device)) is not None:
        yield from _one_ahead(iter(pairs), copier, lap)
        return
    for pair in pairs:
        lap("data")
        inputs, targets = (map_leaves(partial(_place, device), tree) for tree in pair)
        lap("to_device")
        yield inputs, targets


def _place(device: torch.device, leaf: Any) -> Any:
    """Move a leaf of a batch to a device, if it can be moved."""
    if isinstance(leaf, Tensor) and leaf.device == device:
        return leaf
    if hasattr(leaf, "pin_memory"):
        return send(leaf, device)
    return leaf.to(device) if hasattr(leaf, "to") else leaf


def _one_ahead(pairs: Iterator[Pair], copier: "SideStream", lap: Lap) -> Iterator[Pair]:
    """Read and begin to copy the next batch before each batch is yielded."""
    ready: Any = None
    while True:
        following: Any = None
        failed: Exception | None = None
        try:
            pair = next(pairs, None)
            lap("data")
            if pair is not None:
                following = copier.start(pair)
        except Exception as error:  # the batch before was read, and comes first
            failed = error
        if ready is not None:
            ready = copier.wait(ready)
            lap("to_device")
            yield ready
        if failed is not None:
            raise failed
        if following is None:
            return
        ready = following


class SideStream:
    """Copies on a CUDA stream of its own.

    The host begins a copy only when the device has begun with the batch that it was given last,
    so that few batches are on the device at a time, however far ahead of it the host could be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._begun = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def start(self, pair: Pair) -> tuple[Pair, Any]:
        """Begin to copy a batch; return the copies, and an event that says when they are whole."""
        self._begun.synchronize()  # returns at once before the first batch
        with torch.cuda.stream(self._stream):
            inputs, targets = (map_leaves(partial(_place, self._device), tree) for tree in pair)
            return (inputs, targets), self._stream.record_event()

    def wait(self, started: tuple[Pair, Any]) -> Pair:
        """Make the computing stream wait for the batch; return the batch."""
        pair, copied = started
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copied)
        for leaf in tree_leaves(pair):
            # Its memory belongs to the other stream, which would reuse it while it is computed on.
            if hasattr(leaf, "record_stream"):
                leaf.record_stream(stream)
        self._begun.record(stream)
        return pair


@lru_cache(maxsize=8)
def _copier(device: torch.device) -> SideStream | None:
    """Return the copier of a device that can copy and compute at once."""
    # One for all data sets: PyTorch keeps freed memory apart by stream.
    return SideStream(device) if device.type == "cuda" else None
