"""Build the optimizer, fused where the device has a fused kernel."""

import ast
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, getsource, signature
from itertools import repeat
from textwrap import dedent
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, listed
from samestep.base.settings import Settings
from samestep.core.learner.optimizer_state import (
    GIVEN,
    RATIO,
    Joint,
    joined,
    kind_of,
    members_of,
    parameters_in,
)
from samestep.core.learner.unkept import OptimizerTrial
from samestep.core.plan import GroupRates
from samestep.core.recipe import Recipe
from samestep.launch.ranks.mesh import is_sharded, parts_of_rank, total_norm
from samestep.launch.ranks.world import World

_FUSED = ("cpu", "cuda", "mps")

_HALF = (torch.bfloat16, torch.float16)

_OF_ADAM = ("exp_avg", "exp_avg_sq", "", "step"), ("weight_decay", "eps", "amsgrad", "maximize")
_OF_SGD = ("momentum_buffer",), ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
_KERNELS: dict[type, tuple[Callable[..., Any], tuple[str, ...], tuple[str, ...]]] = {
    torch.optim.Adam: (torch._fused_adam_, *_OF_ADAM),
    torch.optim.AdamW: (torch._fused_adamw_, *_OF_ADAM),
    torch.optim.SGD: (torch._fused_sgd_, *_OF_SGD),
}
"""Optimizer → its fused kernel, and what this takes of the state and of the group."""

_ALONE = contextlib.nullcontext()


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    settings: Settings,
    lr: float,
    device: torch.device,
    *,
    fuse: bool = True,
    frozen: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizer of these settings; fused if wanted and possible.

    With `frozen` it also has the parameters that are not trained yet.
    """
    parameters = [p for p in parameters if p.requires_grad or (frozen and p.is_floating_point())]
    fused = fuse and device.type in _FUSED and not any(p.is_complex() for p in parameters)
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        # On the CPU the fused kernel leaves most of such weights as they are: pytorch/191763.
        if device.type == "cpu" and any(p.dtype in _HALF for p in parameters):
            fused = False
        if any(is_sharded(p) for p in parameters):
            fused = False  # DTensor does not know the fused kernel
        momentum = settings.momentum
        built = torch.optim.SGD(
            parameters, lr=lr, momentum=momentum, weight_decay=decay, fused=fused
        )
        if fused and momentum and settings.precision == "fp16":
            # The fused kernel fills new memory in the first step. If the gradient scaler skips that
            # step, as it often does, uninitialised memory would become the momentum.
            for parameter in parameters:
                built.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        return built
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=lr, weight_decay=decay, fused=fused)


def optimizer_of(
    recipe: Recipe,
    model: nn.Module,
    settings: Settings,
    lr: float,
    device: torch.device,
    *,
    fuse: bool = True,
) -> torch.optim.Optimizer:
    """Return the recipe's own optimizer, or else that of the settings; of several a `Joint`."""
    if recipe.optimizer is None:
        tables = [n for n, m in model.named_modules() if getattr(m, "sparse", False) is True]
        if tables and settings.optimizer != "sgd":
            raise UserError(
                f"--optimizer {settings.optimizer}: the gradient of the model's "
                f"{tables[0] or 'own class'}{defined_at(recipe.model)} is sparse, which only sgd "
                "takes.",
                remedy="Build the layer with sparse=False, use --optimizer sgd, or let "
                "Recipe(optimizer=…) give it torch.optim.SparseAdam.",
                flags=["optimizer"],
            )
        fuse = fuse and not tables
        frozen = recipe.after_epoch is not None
        return make_optimizer(model.parameters(), settings, lr, device, fuse=fuse, frozen=frozen)
    place = defined_at(recipe.optimizer)
    try:
        returned: Any = recipe.optimizer(model, settings)
    except Exception as error:
        blame("The recipe's optimizer failed", error, recipe.optimizer)
    several = returned if isinstance(returned, list | tuple) else [returned]
    for member in several:
        _check_kind(member, place)
    optimizer = joined(several, model, place, may_unfreeze=recipe.after_epoch is not None)
    _check_covers(optimizer, model, place)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), Tensor):  # one for all, a scheduler would set it for each
            group["lr"] = group["lr"].clone()
        # One that finds its rate itself has none, or None, such as Adafactor.
        group[RATIO] = None if group.get("lr") is None else float(group["lr"]) / settings.lr
    if lr != settings.lr:  # else they are exact as they are
        set_lr(optimizer, lr)
    if has_modes(optimizer):
        switch(optimizer, "train")
    return optimizer


def _check_kind(optimizer: Any, place: str) -> None:
    has = ("param_groups", "state", "step", "state_dict", "load_state_dict")  # so do wrappers
    if not all(hasattr(optimizer, name) for name in has):
        raise UserError(
            f"The recipe's optimizer{place} returned a {type(optimizer).__name__}; it must return "
            "a torch.optim.Optimizer, or a list of several."
        )
    of_torch = isinstance(optimizer, torch.optim.Optimizer)
    if of_torch and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        # Many a Lookahead calls no super().__init__(): PyTorch adds what is missing.
        optimizer.__setstate__({"defaults": getattr(optimizer, "defaults", {})})
    if _needs_closure(optimizer.step):
        raise UserError(
            f"The recipe's optimizer{place} is {type(optimizer).__name__}, which calls the model "
            "itself. Use it in a training loop of your own."
        )


def _needs_closure(step: Callable[..., Any]) -> bool:
    """Whether a step refuses to go without a closure: by its signature or by a check in it."""
    closure = signature(step).parameters.get("closure")
    if closure is None or closure.default is Parameter.empty:
        return closure is not None
    try:
        tree = ast.parse(dedent(getsource(step)))
    except (OSError, TypeError, SyntaxError):  # it has no source of its own
        return False
    for node in ast.walk(tree):
        match node:
            case ast.Assert(test=test):
                asserted = ast.unparse(test).replace("is not ", "is ")
                refused = asserted in ("closure", "closure is None")
            case ast.If(test=test, body=[ast.Raise(), *_]):
                refused = ast.unparse(test) in ("closure is None", "not closure")
            case _:
                continue
        if refused:
            return True
    return False


def has_modes(optimizer: Any) -> bool:
    """Whether an optimizer evaluates other weights than it trains, as schedule-free ones do."""
    modes = ("train", "eval")
    return any(all(callable(getattr(o, m, None)) for m in modes) for o in members_of(optimizer))


def switch(optimizer: torch.optim.Optimizer, mode: Literal["train", "eval"]) -> None:
    """Let those that have modes evaluate or train, as schedule-free ones do."""
    for member in filter(has_modes, members_of(optimizer)):
        try:
            getattr(member, mode)()
        except Exception as error:
            kind = type(member)
            blame(f"The recipe's optimizer, {kind.__name__}, failed in {mode}()", error, kind)


def _check_covers(optimizer: torch.optim.Optimizer, model: nn.Module, place: str) -> None:
    in_optimizer = {*map(id, parameters_in(optimizer))}
    named = dict(model.named_parameters())
    missing = [name for name, p in named.items() if p.requires_grad and id(p) not in in_optimizer]
    if missing:
        raise UserError(
            f"The recipe's optimizer{place} is not given {listed(missing)}: they "
            "would never change. Give them to it, or freeze them with requires_grad_(False)."
        )
    if not in_optimizer <= {id(p) for p in named.values()}:
        raise UserError(
            f"The recipe's optimizer{place} is given parameters that are not the model's. Take "
            "them from the model that the function is called with."
        )


def own_rate(optimizer: torch.optim.Optimizer, lr: float) -> float | None:
    """Return the largest rate of a recipe's own optimizer if none of them is that of --lr."""
    rates = [group.get("initial_lr", group.get("lr")) for group in optimizer.param_groups]
    known = [float(rate) for rate in rates if rate is not None]
    return max(known, default=None) if lr not in known else None


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step; groups of a recipe's own keep their ratios."""
    if isinstance(lr, GroupRates):
        check_groups(optimizer, lr)
    rates = lr.each if isinstance(lr, GroupRates) else repeat(lr, len(optimizer.param_groups))
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if (ratio := group.get(RATIO, 1.0)) is None or group.get(GIVEN) == rate * ratio:
            continue  # what an optimizer makes of it by itself stays, as it would in a plain loop
        held = group["lr"]  # some that hold a tensor refuse a number in its place
        group["lr"] = held.fill_(rate * ratio) if isinstance(held, Tensor) else rate * ratio
        if RATIO in group:
            group[GIVEN] = rate * ratio


def rates_of(
    optimizer: torch.optim.Optimizer, lr: float, *, scheduled: bool = False
) -> dict[str, float]:
    """Return the rate of each of several optimizers, that of its first group, for a record.

    `lr` is a step's rate, or those of all groups; `scheduled` if a scheduler has set them.
    """
    if not isinstance(optimizer, Joint):
        return {}
    rates, counts, place = dict[str, float](), Counter[str](), 0
    for member in members_of(optimizer):
        counts[kind := type(member).__name__] += 1
        rate = lr.each[place] if isinstance(lr, GroupRates) else lr
        ratio = 1.0 if scheduled else member.param_groups[0][RATIO]
        if ratio is not None:
            rates[f"lr_{kind}" + (f"_{counts[kind]}" if counts[kind] > 1 else "")] = rate * ratio
        place += len(member.param_groups)
    return rates


def check_groups(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Check that a schedule of each group has as many rates as the optimizer has groups."""
    groups = len(optimizer.param_groups)
    if isinstance(lr, GroupRates) and len(lr.each) != groups:
        raise UserError(
            f"The recipe's schedule returned {len(lr.each)} factors, and the optimizer has "
            f"{groups} groups of parameters. Return a number, or one for each group."
        )


def clip_gradients(
    parameters: Sequence[nn.Parameter], most: float | None, sharded_over: World | None
) -> Tensor:
    """Scale all gradients down to a norm of at most `most`, if given; return the norm before.

    `sharded_over` is the ranks that hold the gradients in parts, if they do.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if sharded_over is not None:
        norm = total_norm(gradients, sharded_over)
        if most is not None:
            factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ has it
            torch._foreach_mul_(parts_of_rank(gradients), factor)
        return norm
    try:
        if most is None:
            return _norm(gradients)
        return nn.utils.clip_grad_norm_(parameters, most, foreach=len(parameters) > 1)
    except NotImplementedError:  # sparse gradients have no norm, but their values have
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        norm = nn.utils.get_total_norm(dense)
        if most is not None:
            nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=False)
        return norm


def _norm(gradients: list[Tensor]) -> Tensor:
    if len({(g.device, g.dtype) for g in gradients}) != 1:
        return nn.utils.get_total_norm(gradients)
    with torch.no_grad():  # as it does, which takes as long again to look for groups
        norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # noqa: SLF001
    return norm


class Update:
    """Take an optimizer's step by its fused kernel, with the same numbers and state.

    `optimizer.step()` looks up and groups all state at each call: 30 of its 48 µs for a model of
    four small parameters. Here that is done once, after the first step. A recipe's own optimizer
    takes its ordinary step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        maker: object = None,
        *,
        scheduled: bool = False,
        checks: bool = True,
    ) -> None:
        """Take what a step needs; `scheduled` if a scheduler sets what the groups hold.

        `checks`: whether what an optimizer counts in its attributes is looked at.
        """
        self._optimizer, self._scaler, self._maker = optimizer, scaler, maker
        self._scheduled, self._checks = scheduled, checks
        self._parameters: list[nn.Parameter] = optimizer.param_groups[0]["params"]
        self._sharded = any(is_sharded(p) for p in self._parameters)
        self._own, self._adds_up = RATIO in optimizer.param_groups[0], True
        self._quick: list[Callable[[], None]] = []
        if self._own and scaler is None and not self._sharded:
            from samestep.core.learner.quick_step import quick_step, step_by_lists  # noqa: PLC0415

            step_by_lists(optimizer)
            self._quick = [quick_step(member) for member in members_of(optimizer)]
        self._trial = OptimizerTrial(optimizer, maker, counts=checks) if self._own else None
        self._kernel: Callable[[list[Tensor], float], None] | None = None
        """(gradients, lr) → the fused update of all parameters."""

    def __call__(self, lr: float) -> None:
        """Take one step at a learning rate, or at those that a scheduler has set."""
        if self._kernel is not None:
            gradients = [p.grad for p in self._parameters if p.grad is not None]
            gradients = parts_of_rank(gradients) if self._sharded else gradients
            if len(gradients) == len(self._parameters):
                with torch.no_grad():
                    self._kernel(gradients, lr)
                return
        if not self._scheduled:
            set_lr(self._optimizer, lr)
        if self._own:
            self._own_step()
            return
        self._ordinary_step()
        plain = self._scaler is None and not self._scheduled
        if plain and self._optimizer.param_groups[0]["fused"]:
            self._kernel = self._look_up()

    def _ordinary_step(self) -> None:
        if self._quick:
            for take_step in self._quick:
                take_step()
        elif self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()

    def _own_step(self) -> None:
        """Take a step of the recipe's own optimizer, and see once that a checkpoint can hold it."""
        what = f"The recipe's optimizer, {kind_of(self._optimizer)}"
        update: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._sharded:
            from samestep.core.learner.sharded_update import add_up, sharded_update  # noqa: PLC0415

            looks = self._trial is not None and self._trial.is_new
            update = sharded_update(what, looks=looks, may_draw=not self._checks)
        try:
            with update:
                self._ordinary_step()
            if self._sharded and self._adds_up:  # what the first step leaves, later ones leave, too
                self._adds_up = add_up(self._optimizer.state.values())
            if self._trial is not None and self._trial.after_step():
                self._trial = None
        except Exception as error:
            if "does not have a grad_fn" in str(error):
                raise UserError(
                    f"{what}, takes the gradient of a gradient, for which backward would have to "
                    "keep its graph (create_graph=True). Choose one that needs gradients only."
                ) from error
            if not self._sharded:
                blame(f"{what}, failed in a step", error, self._maker)
            if re.search("DTensor|placement|sharding", str(error)):  # of many lines
                error.args = (re.split(r"[.,]\s", str(error))[0],)
            blame(
                f"{what}, cannot step the parts of the weights that a rank has",
                error,
                self._maker,
                remedy="Use --strategy ddp, torch.optim.Muon, or an optimizer that changes each "
                "number by itself, such as AdamW.",
            )

    def _look_up(self) -> Callable[[list[Tensor], float], None] | None:
        states = [self._optimizer.state[p] for p in self._parameters]
        # This rank's parts: each operation on a sharded tensor costs ten times that on a plain one.
        parameters = parts_of_rank(self._parameters)
        if not all(states) or len({(p.device, p.dtype) for p in parameters}) > 1:
            return None
        kernel, names, entries = _KERNELS[type(self._optimizer)]
        held = [[s[name] for s in states if s.get(name) is not None] for name in names]
        lists, group = [parts_of_rank(of) for of in held], self._optimizer.param_groups[0]
        fixed = {name: group[name] for name in entries} | {"grad_scale": None, "found_inf": None}
        if "betas" in group:
            fixed |= zip(("beta1", "beta2"), group["betas"], strict=True)
        else:
            fixed["is_first_step"] = False
        steps = lists[-1] if "step" in names else []

        def update(gradients: list[Tensor], lr: float) -> None:
            if steps:
                torch._foreach_add_(steps, 1)
            kernel(parameters, gradients, *lists, lr=lr, **fixed)

        return update
