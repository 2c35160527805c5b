"""PyTorch's process-wide switches: set for one training, and afterwards as they were.

They decide with which kernels the model computes: TF32, cuDNN's choice, deterministic ones.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from samestep.errors import UserError
from samestep.settings import MatmulPrecision, Settings

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def switched(settings: Settings, device: torch.device) -> Iterator[None]:
    """Compute as the settings say within this context; what they leave open stays PyTorch's.

    It has to be entered before the first matrix product on the device: cuBLAS reads its variable
    once.

    Raises:
        UserError: the switches are in a state that PyTorch itself refuses.
    """
    with ExitStack() as stack:
        if settings.matmul_precision is not None:
            stack.enter_context(_float32_products(settings.matmul_precision))
        if settings.deterministic:
            stack.enter_context(_deterministic(device))
            if settings.virtual_ranks is not None:
                stack.enter_context(_unfilled())
        elif settings.cudnn_benchmark:
            stack.enter_context(_cudnn(benchmark=True))
        yield


def kernels_of(device: torch.device) -> dict[str, Any]:
    """Return which kernels a CUDA device computes with, for the records; nothing for others."""
    if device.type != "cuda":
        return {}
    # The newer names can always be read; the older ones raise where somebody has set a newer one.
    return {
        "kernels": {
            "tf32_products": torch.backends.cuda.matmul.fp32_precision == "tf32",
            "tf32_convolutions": torch.backends.cudnn.conv.fp32_precision == "tf32",  # type: ignore[attr-defined]
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
    }


@contextmanager
def _float32_products(precision: MatmulPrecision) -> Iterator[None]:
    """Set the precision within float32 products, and that of convolutions alike.

    By the older of PyTorch's two interfaces, which sets the newer one too: `torch.compile` reads
    the older one, and that raises where only the newer one was set.
    """
    try:
        with _no_deprecation():
            kept, convolutions = torch.get_float32_matmul_precision(), _tf32_convolutions()
    except RuntimeError as error:
        raise UserError(
            f"--matmul-precision {precision}: the recipe, or what it imports, has set a part of "
            "torch.backends' fp32_precision already, and PyTorch does not let both be mixed. Leave "
            "one of them out."
        ) from error
    _set_float32(precision, tf32_convolutions=precision != "highest")
    try:
        yield
    finally:
        _set_float32(kept, tf32_convolutions=convolutions)


def _tf32_convolutions() -> bool:
    return bool(torch.backends.cudnn.allow_tf32)


def _set_float32(precision: str, *, tf32_convolutions: bool) -> None:
    with _no_deprecation():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32_convolutions


@contextmanager
def _no_deprecation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TF32 behavior")
        yield


@contextmanager
def _cudnn(*, benchmark: bool, deterministic: bool = False) -> Iterator[None]:
    cudnn = torch.backends.cudnn
    kept = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = benchmark, deterministic
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = kept


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic operations alone; one that has no such form raises a RuntimeError."""
    kept = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    adds = device.type == "cuda" and _WORKSPACE not in os.environ
    if adds:
        os.environ[_WORKSPACE] = ":4096:8"  # cuBLAS would share a workspace between streams
    torch.use_deterministic_algorithms(True)
    try:
        with _cudnn(benchmark=False, deterministic=True):
            yield
    finally:
        torch.use_deterministic_algorithms(kept, warn_only=warns)
        if adds:
            os.environ.pop(_WORKSPACE, None)


@contextmanager
def _unfilled() -> Iterator[None]:
    """Leave new memory as it is: deterministic mode fills it with NaN, a twentieth of a step.

    A model that reads what it has never written shows in the digests of the weights.
    """
    mode: Any = torch.utils.deterministic
    kept = mode.fill_uninitialized_memory
    mode.fill_uninitialized_memory = False
    try:
        yield
    finally:
        mode.fill_uninitialized_memory = kept
