"""Bring what a checkpoint holds from a GPU to the host: all copies at once, then one wait."""

import copy
from typing import Any

import torch
from torch import Tensor

_DEVICE = "cuda"


def on_host(state: Any) -> Any:
    """Return a state with copies on the host of the tensors that are on CUDA devices.

    `torch.save` would copy them one by one through memory that the driver cannot write to
    directly. These copies go to pinned memory, without a wait between them; PyTorch keeps the
    memory for the next checkpoint. Two entries that are one tensor stay one.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return state
    copies: dict[tuple[Any, ...], Tensor] = {}
    found = _walk(state, copies)
    for device in {key[0] for key in copies}:
        torch.cuda.current_stream(device).synchronize()
    return found


def _walk(value: Any, copies: dict[tuple[Any, ...], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return _copy(value.detach(), copies) if value.device.type == _DEVICE else value
    if isinstance(value, dict):
        changed = {key: _walk(item, copies) for key, item in value.items()}
        # A module's state_dict carries its version in an attribute, which torch.save keeps.
        return _like(value, changed)
    if type(value) in (list, tuple):
        return type(value)(_walk(item, copies) for item in value)
    return value


def _like(value: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    if type(value) is dict:
        return changed
    same = copy.copy(value)
    same.update(changed)
    return same


def _copy(tensor: Tensor, copies: dict[tuple[Any, ...], Tensor]) -> Tensor:
    place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    key = (tensor.device, *place)
    if key not in copies:
        copies[key] = _pinned_like(tensor).copy_(tensor, non_blocking=True)
    return copies[key]


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
