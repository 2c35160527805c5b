"""Copies of a state on the host: a checkpoint is written from them while the training continues."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

_DEVICE = "cuda"
_AS_THEY_ARE = {int, float, bool, type(None)}


def map_state(function: Callable[[str, Any], Any], value: Any, path: str = "") -> Any:
    """Return a state with `function(path, leaf)` in place of what its dicts and lists hold.

    Numbers stay as they are.
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, dict):
        within = path and f"{path}/"
        changed = {k: map_state(function, v, f"{within}{k}") for k, v in value.items()}
        if type(value) is dict:
            return changed
        # A module's state_dict carries its version in an attribute, which torch.save keeps.
        same = copy.copy(value)
        dict.update(same, changed)  # a Counter's own update adds up
        return same
    if type(value) in (list, tuple):
        if {*map(type, value)} <= _AS_THEY_ARE:  # the 625 of a generator's state, for instance
            return value[:]
        return type(value)(map_state(function, v, f"{path}/{n}") for n, v in enumerate(value))
    return function(path, value)


def bytes_of(state: Any) -> int:
    """Return the bytes of a state's tensors; what several entries share counts once."""
    sizes: dict[tuple[Any, ...], int] = {}

    def count(_path: str, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            sizes[(leaf.device, leaf.data_ptr(), leaf.nbytes)] = leaf.nbytes

    map_state(count, state)
    return sum(sizes.values())


class HostCopies:
    """Copy states into the same memory each time.

    Memory that is new costs more than the copy into it: each page is cleared first, and pinned
    memory is slow to get. So one copy of the state stays allocated between two checkpoints.
    """

    def __init__(self) -> None:
        self._held: list[Tensor] = []

    def take(self, state: Any) -> Any:
        """Return a copy of a state, which is valid until the next call."""
        free: dict[tuple[Any, ...], list[Tensor]] = {}
        for buffer in self._held:
            form = (buffer.dtype, tuple(buffer.shape), buffer.stride(), buffer.is_pinned())
            free.setdefault(form, []).append(buffer)
        copying = _Copying(free, only_devices=False)
        copied = map_state(copying.leaf, state)
        copying.wait()
        self._held = [*copying.copies.values()]
        return copied


def on_host(state: Any) -> Any:
    """Return a state with copies on the host of the tensors that are on CUDA devices.

    `torch.save` would copy them one by one through memory that the driver cannot write to
    directly. These copies go to pinned memory, without a wait between them; PyTorch keeps the
    memory for the next checkpoint.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return state
    copying = _Copying({}, only_devices=True)
    copied = map_state(copying.leaf, state)
    copying.wait()
    return copied


class _Copying:
    """One copy of a state. Two entries that are one tensor stay one."""

    def __init__(self, free: dict[tuple[Any, ...], list[Tensor]], *, only_devices: bool) -> None:
        self._free, self._only_devices = free, only_devices
        self.copies: dict[tuple[Any, ...], Tensor] = {}

    def wait(self) -> None:
        """Wait for the copies from devices."""
        for device in {key[0] for key in self.copies if key[0].type == _DEVICE}:
            torch.cuda.current_stream(device).synchronize()

    def leaf(self, _path: str, value: Any) -> Any:
        """Return a tensor's copy; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if self._only_devices and value.device.type != _DEVICE:
            return value
        copied = self._copy(value.detach())
        if isinstance(value, nn.Parameter):
            return nn.Parameter(copied, value.requires_grad)
        return copied.detach().requires_grad_() if value.requires_grad else copied

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.cpu().clone()
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        key = (tensor.device, *place)
        if key not in self.copies:
            pins = tensor.device.type == _DEVICE
            fitting = self._free.get((tensor.dtype, *place[2:], pins))
            copied = fitting.pop() if fitting else _new_like(tensor, pins=pins)
            self.copies[key] = copied.copy_(tensor, non_blocking=pins)
        return self.copies[key]


def _new_like(tensor: Tensor, *, pins: bool) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=pins)
