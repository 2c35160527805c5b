"""Copies without memory, and what differs between two states: for trials of what is resumed."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samestep.launch.ranks.mesh import is_sharded


class Hollowing(TorchFunctionMode):
    """Lets `copy.deepcopy` take no memory for tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        return hollow(args[0]) if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def hollow(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type without memory; a single number as it is."""
    if tensor.dim() == 0 and not is_sharded(tensor):
        return tensor.detach().clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def difference(one: Any, other: Any, path: str = "") -> str:
    """Return what differs first in a state and what came of it, "" if nothing does."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(key, value, other.get(key, _GONE)) for key, value in one.items()]
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = list(zip(range(len(one)), one, [*other, *[_GONE] * len(one)], strict=False))
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        empty = one.is_meta or other.is_meta
        # torch loads a fused optimizer's counts as float32, to where the parameters are.
        typed = one.dtype == other.dtype or (empty and one.dim() == 0)
        same = one.shape == other.shape and typed
        same = same and (empty or torch.equal(*(t.cpu().nan_to_num(0.5) for t in (one, other))))
        return "" if same else _told(path, one, other)
    else:
        with contextlib.suppress(Exception):  # of a class that does not compare
            if one != other and repr(one) != repr(other):  # two NaNs differ, and are written alike
                return _told(path, one, other)
        return ""
    found = (difference(mine, its, f"{path}[{key!r}]") for key, mine, its in pairs)
    return next(filter(None, found), "")


class _Gone:
    def __repr__(self) -> str:
        return "missing"


_GONE = _Gone()


def _told(path: str, one: Any, other: Any) -> str:
    def short(value: Any) -> str:
        if isinstance(value, Tensor) and value.dim():
            return f"a {str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}"
        return f"{value!r:.40}"

    return f"state_dict(){path} is {short(one)}, and {short(other)} once it is loaded"
