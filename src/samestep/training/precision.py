"""The four precisions: the type that data and weights are held in, autocast, gradient scaling."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from samestep.errors import UserError
from samestep.settings import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = ("cpu", "cuda", "mps")
"""Kinds of devices that samestep trains on."""


def data_dtype(precision: Precision) -> torch.dtype:
    """Return the floating-point type of weights and stored data."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type that autocast computes in, or None where there is no autocast."""
    return _AUTOCAST.get(precision)


def autocast(precision: Precision, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a forward pass."""
    dtype = autocast_dtype(precision)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


@contextlib.contextmanager
def outside_autocast() -> Iterator[None]:
    """Compute as if no `torch.autocast` were open around this; afterwards all are again.

    `torch.autocast(enabled=False)` would not do: PyTorch forgets the weights that it has cast only
    when the outermost context ends, so the contexts of single steps within it would go on with the
    weights of the first one.
    """
    kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    cached = torch.is_autocast_cache_enabled()
    depth = torch.autocast_increment_nesting()
    for _ in range(depth):
        torch.autocast_decrement_nesting()
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    torch.set_autocast_cache_enabled(True)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(cached)
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth - 1):
            torch.autocast_increment_nesting()


def make_scaler(precision: Precision, device: torch.device) -> torch.amp.GradScaler | None:
    """Return the gradient scaler that fp16 needs, and None for the others."""
    return torch.amp.GradScaler(device.type) if precision == "fp16" else None


def check_precision(precision: Precision, device: torch.device) -> None:
    """Check that a device can compute in a precision.

    Raises:
        UserError: it cannot.
    """
    if device.type == "mps" and precision == "fp64":
        raise UserError("--precision fp64: Apple GPUs have no float64. Use --device cpu.")
    if (
        device.type == "cuda"
        and precision == "bf16"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise UserError("--precision bf16: this GPU has no bfloat16. Use fp16 or fp32.")
