"""Take the steps of PyTorch's own optimizers with less of Python, to the same bits.

Where a model is small, most of the time of `optimizer.step()` is the look-up of its state, and the
calls of single operations.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler
from torch.optim import SGD, Adam, AdamW
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


def step_by_lists(optimizer: torch.optim.Optimizer) -> None:
    """Let a small optimizer of PyTorch on a CPU call each operation once for all weights.

    As it does by itself on a GPU. On a CPU the same kernels run one after the other, to the same
    bits. Its `state_dict` does not show it.
    """

    def as_given(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:
            group["foreach"] = None

    for member in members_of(optimizer):
        weights, groups = parameters_in(member), member.param_groups
        plain = all(type(p) in (Tensor, nn.Parameter) and p.device.type == "cpu" for p in weights)
        small = plain and sum(p.numel() for p in weights) <= _SMALL
        if type(member) not in (SGD, Adam, AdamW) or not small:
            continue
        chosen = any(g["foreach"] is not None or g["fused"] or g["differentiable"] for g in groups)
        if not chosen and not any(isinstance(group["lr"], Tensor) for group in groups):
            member.register_state_dict_post_hook(as_given)
            for group in groups:
                group["foreach"] = True


def quick_step(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what takes an optimizer's step; of Adam and AdamW by the function that they call.

    The state is looked up once, and again when it was loaded. A step with hooks, in a profile, or
    of fewer gradients is `optimizer.step()`.
    """
    is_adam = type(optimizer) in (Adam, AdamW)
    known: object = None
    states: list[dict[str, Any]] = []

    def take_step() -> None:
        nonlocal known, states
        groups = optimizer.param_groups if is_adam else ()
        gradients = [[p.grad for p in group["params"]] for group in groups]
        whole = is_adam and all(g is not None for of_group in gradients for g in of_group)
        if not whole or known is not optimizer.state or _is_observed(optimizer):
            optimizer.step()
            if whole:
                known, states = optimizer.state, [_states_of(optimizer, group) for group in groups]
            return
        with torch.no_grad():
            for group, of_group, held in zip(groups, gradients, states, strict=True):
                beta1, beta2 = group["betas"]
                settings = {name: group[name] for name in _SETTINGS}
                adam(group["params"], of_group, **held, **settings, beta1=beta1, beta2=beta2)

    return take_step


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
        or (own is not None and not hasattr(own, "_wrapped_by_lr_sched"))
    )
