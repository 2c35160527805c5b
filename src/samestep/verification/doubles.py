"""Keep in float64 what a model or a loss casts to float32 by itself: `outputs.float()`.

Such a cast is common and harmless, but in a comparison in float64 it would bring back the rounding
of float32, or make types that do not fit each other.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)


class _Doubles(TorchFunctionMode):
    """Take float64 wherever a narrower floating-point type is asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _CASTS:
            return args[0].double()
        if func is not Tensor.view:  # which reads bits as another type
            args = tuple(map(_wide, args))
            kwargs = {name: _wide(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def in_doubles(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward or a loss that casts to no narrower type than float64."""

    @functools.wraps(function)  # with its arguments' names
    def call(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # of constants that it makes
        try:
            with _Doubles():
                return function(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return call
