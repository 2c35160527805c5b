"""The four precisions: the type that data and weights are held in, autocast, gradient scaling."""

import contextlib
from typing import Any

import torch

from samestep.errors import UserError
from samestep.settings import Precision

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
