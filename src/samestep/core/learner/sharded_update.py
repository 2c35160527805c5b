"""The step of an optimizer on weights that ranks hold in parts, for one that multiplies matrices.

An update by elements, as Adam's, is the same on parts as on the whole. Muon multiplies matrices,
and in bfloat16; others read the norm of a weight.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.base.errors import UserError
from samestep.base.patches import patched
from samestep.launch.ranks.mesh import (
    added_up,
    is_partial_sum,
    is_sharded,
    sharded_as,
    whole,
    whole_numbers,
)

_HALF = (torch.bfloat16, torch.float16)
_PRODUCTS = tuple(getattr(torch.ops.aten, n) for n in ("mm", "addmm", "bmm", "baddbmm"))


@contextlib.contextmanager
def sharded_update(what: str, *, looks: bool, may_draw: bool = False) -> Iterator[None]:
    """Within this, let torch's Muon orthogonalise whole matrices; all ranks step.

    One at a time is gathered, and each rank computes what a single process would. The momentum
    stays in parts. Numbers are of whole tensors, too. `what` names the optimizer.

    Raises:
        UserError: if this `looks`, an optimizer has multiplied sharded matrices in half precision,
            and the product is a sum over ranks of what is rounded: Newton-Schulz makes percents of
            that. Or it has drawn random numbers for sharded tensors or from a generator of its own,
            unless it `may_draw` them.
    """
    with patched((_muon, "_zeropower_via_newtonschulz", _of_whole)), whole_numbers():
        if not looks:
            yield
            return
        with _PartialProducts() as products:  # type: ignore[no-untyped-call]
            yield
    if products.rounded_to is not None:
        kind = str(products.rounded_to).removeprefix("torch.")
        raise UserError(
            f"{what}, multiplies matrices of which each rank has a part, and adds up what {kind} "
            "has rounded: with --strategy fsdp its updates would be other ones, by percents.",
            remedy="Use --strategy ddp, or torch.optim.Muon, for which matrices are gathered.",
            on_all_ranks=True,
        )
    if products.draws and not may_draw:
        raise UserError(
            f"{what}, draws random numbers for the parts of the weights that each rank has, or "
            "from a generator of its own: with --strategy fsdp they may differ from those for "
            "whole weights.",
            remedy="Use --strategy ddp; or, if other numbers serve as well, add --no-self-check.",
            on_all_ranks=True,
        )


def add_up(states: Iterable[dict[str, Any]]) -> bool:
    """Add up what a step has left in a state as a sum over ranks; return whether there was any.

    Such as the norm of a weight that an optimizer notes: no checkpoint could hold it.
    """
    found = [
        (state, name, value)
        for state in states
        for name, value in state.items()
        if isinstance(value, Tensor) and is_partial_sum(value)
    ]
    for state, name, value in found:
        state[name] = added_up(value)
    return bool(found)


def _of_whole(original: Callable[..., Tensor], update: Tensor, *args: Any, **more: Any) -> Tensor:
    return sharded_as(original(whole(update), *args, **more), update)


class _PartialProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note products that are sums over ranks of what half precision has rounded, and draws."""

    rounded_to: torch.dtype | None = None
    draws = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS and result.dtype in _HALF and is_partial_sum(result):
            self.rounded_to = result.dtype
        # A whole weight has the same numbers on all ranks, unless it is looked up for a seed.
        own = any(isinstance(given, torch.Generator) for given in (*args, *(kwargs or {}).values()))
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags and (own or is_sharded(result))
        return result
