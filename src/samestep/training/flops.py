"""How much a model computes, counted once, and how much of what its device can do that is.

The count is that of `torch.utils.flop_counter`: matrix products, convolutions and attention, a
multiplication and an addition as two operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.ranks.world import World
from samestep.settings import Settings

T = TypeVar("T")

_OF_A_STEP = 3
"""A backward computes twice what a forward does: a gradient by the inputs and one by the weights.
So count PaLM (arXiv 2204.02311, appendix B) and Megatron-LM; what is recomputed does not count."""

_TERA = 10**12
# Dense rates in 10¹² operations per second: of bf16 and fp16, of TF32, of fp32, and of fp64, the
# faster of the two units where a device has tensor cores for it. By the makers' data sheets: NVIDIA
# B200 (HGX), H200, H100, A100, A40, A10, L40S, L4, V100 and T4, and AMD Instinct MI300X. A data
# sheet's "with sparsity" is halved.
_RATES: dict[str, tuple[float, float, float, float]] = {
    "B200": (2250.0, 1125.0, 75.0, 37.0),
    "H200": (989.4, 494.7, 66.9, 66.9),
    "H100 80GB HBM3": (989.4, 494.7, 66.9, 66.9),
    "H100 PCIe": (756.0, 378.0, 51.0, 51.0),
    "H100 NVL": (835.0, 417.5, 60.0, 60.0),
    "GH200 480GB": (989.4, 494.7, 66.9, 66.9),
    "A100-SXM4-80GB": (312.0, 156.0, 19.5, 19.5),
    "A100-SXM4-40GB": (312.0, 156.0, 19.5, 19.5),
    "A100 80GB PCIe": (312.0, 156.0, 19.5, 19.5),
    "A100-PCIE-40GB": (312.0, 156.0, 19.5, 19.5),
    "A40": (149.7, 74.8, 37.4, 0.58),
    "A10": (125.0, 62.5, 31.2, 0.49),
    "L40S": (362.0, 183.0, 91.6, 1.4),
    "L4": (121.0, 60.0, 30.3, 0.47),
    "V100-SXM2-16GB": (125.0, 15.7, 15.7, 7.8),
    "V100-SXM2-32GB": (125.0, 15.7, 15.7, 7.8),
    "T4": (65.0, 8.1, 8.1, 0.25),
    "Instinct MI300X": (1307.4, 653.7, 163.4, 163.4),
}
_UNCOUNTED = {
    *("aten::_cudnn_rnn", "aten::miopen_rnn", "aten::mkldnn_rnn_layer"),
    *("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"),
}
"""Operations of PyTorch that multiply matrices, and have no formula in `flop_counter`."""
_MAKERS = ("NVIDIA ", "Tesla ", "AMD ")


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a sample costs to train, and what the ranks' devices could do."""

    flops_per_sample: int | None = None
    """Floating-point operations of a forward and a backward; None where they could not be counted,
    or none were."""
    peak_flops_per_s: float | None = None
    """Of all ranks together, in this training's precision; None for a device that is not known."""

    def rates(self, samples_per_s: float) -> dict[str, float]:
        """Return what a record says of this speed: `flops_per_s`, and `mfu` if it is known."""
        if self.flops_per_sample is None:
            return {}
        rate = self.flops_per_sample * samples_per_s
        known = {} if self.peak_flops_per_s is None else {"mfu": rate / self.peak_flops_per_s}
        return {"flops_per_s": rate, **known}


def workload(forward_flops: int, settings: Settings, world: World) -> Workload:
    """Return the workload of a training whose forward takes so many operations per sample."""
    if not forward_flops:
        return Workload()
    peak = None
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        peak = peak_flops_per_s(name, settings.precision, tf32=tf32)
    return Workload(
        flops_per_sample=_OF_A_STEP * forward_flops,
        peak_flops_per_s=None if peak is None else peak * world.world_size,
    )


def peak_flops_per_s(device_name: str, precision: str, *, tf32: bool) -> float | None:
    """Return what a device can do at most per second, by the name that PyTorch gives it, or None.

    `tf32`: whether float32 products are computed in TF32.
    """
    for maker in _MAKERS:
        device_name = device_name.removeprefix(maker)
    rates = _RATES.get(device_name)
    if rates is None:
        return None
    place = {"bf16": 0, "fp16": 0, "fp32": 1 if tf32 else 2, "fp64": 3}[precision]
    return rates[place] * _TERA


def count_flops(forward: Callable[[], T]) -> tuple[T, int]:
    """Return what a function returns, and the floating-point operations that it took.

    They are 0 where an operation has no formula, such as an LSTM's or a kernel of the user's: part
    of a count would be taken for all of it. Where the function fails under the counter, it is
    called again without.
    """
    counter, fast = _Counter(), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer; not in steps
    try:
        with counter:
            made = forward()
    except Exception:  # some tensors and extensions know no such mode
        return forward(), 0
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return made, 0 if counter.is_partial else counter.total


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the operations below it. `FlopCounterMode` imports the compiler to tell modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Not at the top: it is not needed where nothing is tried out.
        from torch.utils.flop_counter import flop_registry  # noqa: PLC0415

        self._formulas, self.total = flop_registry, 0
        self.is_partial = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(func._overloadpacket)  # noqa: SLF001 - as PyTorch's own does
        if formula is None and func is not torch.ops.prim.device.default:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        if formula is not None:
            self.total += formula(*args, **kwargs, out_val=made)
        elif func.namespace not in ("aten", "prims", "prim") or func._schema.name in _UNCOUNTED:  # noqa: SLF001
            self.is_partial = True
        return made
