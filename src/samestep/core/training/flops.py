"""How much a model computes, counted once, and how much of what its device can do that is.

The count is that of `torch.utils.flop_counter`: matrix products, convolutions and attention, a
multiplication and an addition as two operations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.base.machine import peak_flops_per_s
from samestep.base.settings import Settings
from samestep.launch.ranks.world import World

T = TypeVar("T")

_OF_A_STEP = 3
"""A backward computes twice what a forward does: a gradient by the inputs and one by the weights.
So count PaLM (arXiv 2204.02311, appendix B) and Megatron-LM; what is recomputed does not count."""

_UNCOUNTED = {
    *("aten::_cudnn_rnn", "aten::miopen_rnn", "aten::mkldnn_rnn_layer"),
    *("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"),
}
"""Operations of PyTorch that multiply matrices, and have no formula in `flop_counter`."""


@dataclass(frozen=True, kw_only=True)
class ModelCost:
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
    """Adds up the operations below it. `FlopCounterMode` imports the compiler first: 1.6 s here."""

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
