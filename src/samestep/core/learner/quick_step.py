"""Take the steps of PyTorch's own optimizers with less of Python, to the same bits.

Where a model is small, most of the time of `optimizer.step()` is the look-up of its state, and the
calls of single operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import Adam, AdamW
from torch.optim import optimizer as of_torch
from torch.optim.adam import adam

from samestep.core.learner.optimizer_state import members_of, parameters_in

_SMALL = 1 << 20
"""Weights whose optimizer is faster by lists: of more, its temporary copies leave the cache."""

_STATE = {
    **{f"{name}s": name for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")},
    "state_steps": "step",
}
"""What Adam's function calls the lists of what the state has."""
_SETTINGS = (
    *("lr", "weight_decay", "eps", "amsgrad", "maximize", "foreach", "capturable"),
    *("differentiable", "fused", "decoupled_weight_decay"),
)


def step_by_lists(optimizer: torch.optim.Optimizer, *, in_own_loop: bool = False) -> None:
    """Let a small Adam of PyTorch on a CPU call each operation once for all weights.

    As it does by itself on a GPU. On a CPU the same kernels run one after the other, to the same
    bits. Its `state_dict` does not show it.
    """

    def as_given(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["foreach"] = None

    for member in members_of(optimizer):
        weights, groups = parameters_in(member), member.param_groups
        small = all(map(_is_plain, weights)) and sum(p.numel() for p in weights) <= _SMALL
        if type(member) not in (Adam, AdamW) or not small:
            continue
        if not any(g["foreach"] is not None or g["fused"] or g["differentiable"] for g in groups):
            member.register_state_dict_post_hook(as_given)
            if in_own_loop:
                member.register_step_pre_hook(by_weight_if_asked)
            for group in groups:
                group["foreach"] = True


def by_weight_if_asked(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Leave out the lists of `step_by_lists` where a loop has put a tensor in place of the rate."""
    for group in optimizer.param_groups:
        if group.get("foreach") and isinstance(group.get("lr"), Tensor):
            group["foreach"] = None


def _is_plain(weight: Tensor) -> bool:
    exact = weight.dtype in (torch.float32, torch.float64)
    return exact and type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu"


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what takes an optimizer's step; of Adam and AdamW by the function that they call.

    The state is looked up once, and again where it or the weights are others. A step with hooks, in
    a profile, or of fewer gradients is `optimizer.step()`.
    """
    if type(optimizer) not in (Adam, AdamW):

        def ordinary_step() -> None:
            optimizer.step()  # looked up each time: a scheduler may replace it

        return ordinary_step
    known: list[int] = []
    states: list[dict[str, Any]] = []

    def take_step() -> None:
        nonlocal known, states
        groups, weights = optimizer.param_groups, parameters_in(optimizer)
        by_weight_if_asked(optimizer)
        whole = all(weight.grad is not None for weight in weights)
        if not whole or known != _ids(optimizer, weights) or _is_observed(optimizer):
            optimizer.step()
            if whole:
                known = _ids(optimizer, weights)
                states = [_states_of(optimizer, group) for group in groups]
            return
        with torch.no_grad():
            for group, held in zip(groups, states, strict=True):
                (beta1, beta2), given = group["betas"], [p.grad for p in group["params"]]
                settings = {name: group[name] for name in _SETTINGS}
                adam(group["params"], given, **held, **settings, beta1=beta1, beta2=beta2)

    return take_step


def _ids(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> list[int]:
    """Return what identifies the state, the weights of each group, and a step of each weight."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    # Not by weight: a tensor's hash takes as long as all the rest.
    steps = [id(kept.get("step")) for kept in optimizer.state.values() if type(kept) is dict]
    return [id(optimizer.state), *sizes, *map(id, weights), *steps]


def _states_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    states = [optimizer.state[p] for p in group["params"]]
    lists = {n: [state[name] for state in states if name in state] for n, name in _STATE.items()}
    return lists | {"has_complex": any(map(torch.is_complex, group["params"]))}


def _is_observed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something wants to see `optimizer.step()`: a hook, a profile, or another method."""
    own = vars(optimizer).get("step")
    return bool(
        optimizer._optimizer_step_pre_hooks  # noqa: SLF001
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or of_torch._global_optimizer_pre_hooks  # noqa: SLF001
        or of_torch._global_optimizer_post_hooks  # noqa: SLF001
        or profiler._is_profiler_enabled  # noqa: SLF001
        or (own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step)
    )
