"""How a process computes: precision, PyTorch's process-wide switches, threads and memory; how much.

The operations of a model are counted once, as `torch.utils.flop_counter` does: matrix products,
convolutions and attention, a multiplication and an addition as two.
"""

import ctypes
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.base.errors import UserError
from samestep.base.machine import peak_flops_per_s
from samestep.base.settings import MatmulPrecision, Precision, Settings
from samestep.base.startup import threads_wished
from samestep.launch.ranks.world import World

T = TypeVar("T")

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_KINDS = ("cpu", "cuda", "mps")
_OF_A_STEP = 3
"""A backward computes twice what a forward does: a gradient by the inputs and one by the weights.
So count PaLM (arXiv 2204.02311, appendix B) and Megatron-LM; what is recomputed does not count."""

_UNCOUNTED = {
    *("aten::_cudnn_rnn", "aten::miopen_rnn", "aten::mkldnn_rnn_layer"),
    *("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"),
}
"""Operations of PyTorch that multiply matrices, and have no formula in `flop_counter`."""


def data_dtype(precision: Precision) -> torch.dtype:
    """Return the floating-point type of weights and stored data."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward pass."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@contextmanager
def casting_anew() -> Iterator[None]:
    """Let autocast cast a weight in each of its uses, as Lightning does, and not once a forward.

    The gradients of several uses are then added up in float32 instead of in half precision.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Suspend any `torch.autocast` that is open around this.

    `torch.autocast(enabled=False)` is not enough: PyTorch forgets the weights it has cast only when
    the outermost context ends, so each step inside it would reuse the first step's weights.
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


def make_scaler(
    precision: Precision, device: torch.device, share: float
) -> torch.amp.GradScaler | None:
    """Return the gradient scaler that fp16 needs, and None for the others.

    Its scale begins at this `share` of PyTorch's: see `share_of_scale`.
    """
    if precision != "fp16":
        return None
    return torch.amp.GradScaler(device.type, init_scale=2.0**16 * share)


def share_of_scale(world_size: int, virtual_ranks: int) -> float:
    """Return which part of a single process's scale fp16 has where DDP averages gradients.

    Each is `world_size` times as large as its part of the single process's, and would overflow
    earlier; those of virtual ranks are added up. A power of two rounds nothing.
    """
    return 1.0 if virtual_ranks else 2.0 ** -math.ceil(math.log2(world_size))


def check_precision(precision: Precision, device: torch.device) -> None:
    """Check that a device can compute in a precision."""
    if device.type == "mps" and precision == "fp64":
        raise UserError("--precision fp64: Apple GPUs have no float64. Use --device cpu.")
    bf16_on_cuda = device.type == "cuda" and precision == "bf16"
    if bf16_on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError("--precision bf16: this GPU has no bfloat16. Use fp16 or fp32.")


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def switched(settings: Settings, device: torch.device) -> Iterator[None]:
    """Compute as the settings say within this context; keep PyTorch's choice elsewhere.

    Enter it before the first matrix product on the device: cuBLAS reads its variable once.
    """
    with ExitStack() as stack:

        def switch(holder: Any, **values: bool) -> None:
            for name, value in values.items():
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, value)

        if (precision := settings.matmul_precision) is not None:
            stack.callback(_set_float32, *_float32_of(precision))
            _set_float32(precision, precision != "highest")
        if settings.deterministic:
            if device.type == "cuda" and _WORKSPACE not in os.environ:
                os.environ[_WORKSPACE] = ":4096:8"  # cuBLAS would share a workspace between streams
                stack.callback(os.environ.pop, _WORKSPACE, None)
            was_deterministic = torch.are_deterministic_algorithms_enabled()
            warns = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, was_deterministic, warn_only=warns)
            torch.use_deterministic_algorithms(True)  # other operations raise a RuntimeError
            switch(torch.backends.cudnn, benchmark=False, deterministic=True)
            if settings.virtual_ranks is not None:
                # Filling new memory with NaN takes 5% of a step. A model that reads memory it never
                # wrote shows in the digests of the weights.
                switch(torch.utils.deterministic, fill_uninitialized_memory=False)
        elif settings.cudnn_benchmark:
            switch(torch.backends.cudnn, benchmark=True, deterministic=False)
        if settings.newton_schulz == "fp32":
            from torch.optim import _muon  # noqa: PLC0415

            from samestep.base.patches import patched  # noqa: PLC0415 - rarely needed

            stack.enter_context(patched((_muon, "_zeropower_via_newtonschulz", _in_single)))
        yield


def _in_single(original: Callable[..., Tensor], update: Tensor, *args: Any, **more: Any) -> Tensor:
    """Let torch's Muon orthogonalise in float32: what it calls to round its copy rounds nothing."""
    from samestep.base.patches import patched  # noqa: PLC0415 - imported long before

    def copied(_: object, tensor: Tensor) -> Tensor:
        return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)

    with patched((Tensor, "bfloat16", copied)):
        updated = original(update, *args, **more)
    if updated.dtype in AUTOCAST.values():
        raise UserError(f"--newton-schulz fp32: the Muon of torch {torch.__version__} rounds anew.")
    return updated


def kernels_of(device: torch.device) -> dict[str, Any]:
    """Return the kernel settings of a CUDA device for the records; empty for other devices."""
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


def _float32_of(wanted: MatmulPrecision) -> tuple[str, bool]:
    """Return the precision within float32 products, and whether convolutions use TF32.

    This uses the older of PyTorch's two interfaces, which also sets the newer one: `torch.compile`
    reads the older one, which raises where only the newer one was set.
    """
    try:
        with _no_deprecation():
            return torch.get_float32_matmul_precision(), bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError as error:
        raise UserError(
            f"--matmul-precision {wanted}: the recipe, or what it imports, has set a part of "
            "torch.backends' fp32_precision already, and PyTorch does not let both be mixed. Leave "
            "one of them out."
        ) from error


def _set_float32(precision: str, tf32_convolutions: bool) -> None:
    with _no_deprecation():
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32_convolutions


@contextmanager
def _no_deprecation() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*TF32 behavior")
        yield


# Below this a matrix product is over before a second thread has woken up.
_SMALL_PARAMETERS = 1_000_000


def choose_threads(wanted: int | None, model: nn.Module, cores: int, neighbours: int) -> int:
    """Return a rank's number of threads: the wanted one, else OMP_NUM_THREADS, else a guess.

    One for a small model: that is as fast, and two that wait for each other slow down many times
    over next to a busy neighbour. Ranks of other models share the cores.
    """
    guess = 1 if is_small(model) else max(1, cores // neighbours)
    return wanted or threads_wished() or guess


def is_small(model: nn.Module) -> bool:
    """Whether a model's operations are so short that the overhead between them dominates."""
    parameters = list(model.parameters())
    convolves = any(parameter.dim() > 2 for parameter in parameters)
    return not convolves and sum(p.numel() for p in parameters) < _SMALL_PARAMETERS


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return this process's peak memory: on a GPU its tensors, else all. None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024  # Linux counts in KiB


_GATHERED_BYTES = 4 << 20
"""From here on a tensor gets pages of its own with FSDP on a CPU. 256 KiB would save 4% of a rank's
memory, and cost 40% of the throughput: activations would be mapped anew in each step."""


def choose_allocation(device: torch.device, *, sharded: bool) -> None:
    """Let glibc keep freed memory for the next step (CPU only), but for large tensors if `sharded`.

    By default glibc returns freed activations to the system, which maps every page again at the
    next step: 10% of a ResNet-18's step (docs/project/log.md). So tensors of up to 32 MiB stay on
    the heap, and the process never shrinks. With FSDP the heap would grow to three times what is in
    use: glibc cannot put an aligned tensor into the gap that one of the same size has left.
    """
    if (libc := _glibc(device)) is None:
        return
    trim_threshold, mmap_threshold = -1, -3  # of glibc's malloc.h
    # glibc takes no more than 32 MiB.
    libc.mallopt(mmap_threshold, _GATHERED_BYTES if sharded else 32 << 20)
    libc.mallopt(trim_threshold, 2**31 - 1)  # never


def return_freed_memory(device: torch.device) -> None:
    """Give the system what building a sharded model has left on glibc's heap (CPU only)."""
    if (libc := _glibc(device)) is not None:
        libc.malloc_trim(0)


def _glibc(device: torch.device) -> ctypes.CDLL | None:
    """Return glibc where a rank's tensors lie in its memory."""
    uses = device.type == "cpu" and platform.libc_ver()[0] == "glibc"
    return ctypes.CDLL(None) if uses else None


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What a sample costs to train, and what the ranks' devices could do."""

    flops_per_sample: int | None = None
    """Floating-point operations of a forward and a backward; None where they could not be counted,
    or none were."""
    peak_flops_per_s: float | None = None
    """Of all ranks together, in this training's precision; None for a device that is not known."""

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Return a record's entries for this speed: `flops_per_s`, and `mfu` if it is known."""
        if self.flops_per_sample is None:
            return {}
        rate = self.flops_per_sample * samples_per_s
        mfu = {} if self.peak_flops_per_s is None else {"mfu": rate / self.peak_flops_per_s}
        return {"flops_per_s": rate, **mfu}


def model_cost(forward_flops: int, settings: Settings, world: World) -> ModelCost:
    """Return the cost of a training whose forward takes this many operations per sample."""
    if not forward_flops:
        return ModelCost()
    peak = None
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        peak = peak_flops_per_s(name, settings.precision, tf32=tf32)
    return ModelCost(
        flops_per_sample=_OF_A_STEP * forward_flops,
        peak_flops_per_s=None if peak is None else peak * world.world_size,
    )


def count_flops(forward: Callable[[], T]) -> tuple[T, int]:
    """Return a function's result and the number of floating-point operations that it took.

    They are 0 where an operation has no formula, such as an LSTM's or a kernel of the user's: part
    of a count would be taken for all of it. Where the function fails under the counter, it is
    called again without.
    """
    counter, fast = _Counter(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer; not in steps
    try:
        with counter:
            outputs = forward()
    except Exception:  # some tensors and extensions know no such mode
        return forward(), 0
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return outputs, 0 if counter.is_partial else counter.total


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations below it. `FlopCounterMode` imports the compiler first: 1.6 s here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Not at the top: it is not needed where nothing is tried out.
        from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

        self._formulas = flop_registry
        self.total = 0
        self.is_partial = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(func._overloadpacket)  # noqa: SLF001 - as PyTorch's own does
        nested = any(kind.__name__ == "NestedTensor" for kind in types)  # comes back decomposed
        if formula is None and func is not torch.ops.prim.device.default and not nested:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        elif func.namespace not in ("aten", "prims", "prim") or func._schema.name in _UNCOUNTED:  # noqa: SLF001
            self.is_partial = True
        return result
