"""Several optimizers as one; what a checkpoint keeps of them, how it is loaded, a trial of both.

The groups of an optimizer hold settings, such as a weight decay, and with some optimizers what they
gather, such as a count of their steps. Settings are those of today's recipe and flags; what was
gathered is loaded.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, blame, error_text, listed
from samestep.base.run.checkpoints import own_memory
from samestep.base.trees import map_tensors
from samestep.base.words import count
from samestep.core.learner.model_state import Hollowing, difference, hollow
from samestep.launch.ranks.mesh import sharded_as

RATIO = "lr_ratio"
"""In each group of a recipe's own optimizer: its learning rate / --lr."""

GIVEN = "lr_given"
"""There, once it has taken a step: the newest rate that it was given."""

_SETTINGS = ("weight_decay", "momentum", "decoupled_weight_decay")
"""What the settings say of an optimizer's groups, and a checkpoint keeps with its state."""

_KERNELS = frozenset({"fused", "foreach", "capturable"})
"""What decides how an optimizer computes here, and where its step counts lie."""

_SET_HERE = _KERNELS | {"params", "lr", RATIO, GIVEN}
"""Entries of a group that are never loaded, whatever has changed them; see `_set_here`."""

_POLICY = "_process_value_according_to_param_policy"
"""What casts each tensor that torch's optimizers load."""

Group = Mapping[str, Any]
"""A group of an optimizer, or what a checkpoint says of one."""


class Joint(torch.optim.Optimizer):
    """Optimizers that take each step together.

    What takes one optimizer (a scheduler, a gradient scaler, Lightning) sees the groups of all.
    It is also the sequence of them, for a schedule that makes a scheduler for each.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Without `super().__init__`, which keeps the groups: a member makes new ones as it loads.
        self.optimizers = list(optimizers)
        self.__setstate__({"defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, the first optimizer's first."""
        return [group for member in self.optimizers for group in member.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """What they keep of each parameter."""
        return {key: value for member in self.optimizers for key, value in member.state.items()}

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def __getitem__(self, place: int) -> torch.optim.Optimizer:
        return self.optimizers[place]

    def __len__(self) -> int:
        return len(self.optimizers)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the step of each; a closure, as Lightning gives one, is called once before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for member in self.optimizers:
            member.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, by its own `state_dict`."""
        return {"optimizers": [member.state_dict() for member in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for member, saved in zip(self.optimizers, state_dict["optimizers"], strict=True):
            member.load_state_dict(saved)


def parameters_in(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that step together; a single one is its only member."""
    return optimizer.optimizers if isinstance(optimizer, Joint) else [optimizer]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the class of an optimizer, for a reader; of several "Muon + AdamW"."""
    return " + ".join(type(member).__name__ for member in members_of(optimizer))


def joined(
    optimizers: Sequence[torch.optim.Optimizer],
    model: nn.Module,
    place: str,
    *,
    may_unfreeze: bool = False,
) -> torch.optim.Optimizer:
    """Return the optimizers of a recipe as one; `place` is the function that returned them.

    `may_unfreeze`: whether what is frozen now may be trained later.

    Raises:
        UserError: two of them step the same parameter, one trains nothing, or there is none.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    owners: dict[int, str] = {}
    for number, optimizer in enumerate(optimizers, 1):
        this = f"number {number}, {type(optimizer).__name__},"
        held = parameters_in(optimizer)
        if not (may_unfreeze or any(p.requires_grad for p in held)):
            raise UserError(
                f"Of the recipe's optimizers{place}, {this} is given nothing to train. Give it "
                "parameters that require a gradient, or leave it out."
            )
        if both := [id(p) for p in held if id(p) in owners]:
            shared = listed([names.get(key, "a parameter") for key in both])
            raise UserError(
                f"The recipe's optimizers{place} overlap: {owners[both[0]]} and {this} are both "
                f"given {shared}. Give each parameter to one of them."
            )
        owners |= dict.fromkeys(map(id, held), this)
    if not optimizers:
        raise UserError(f"The recipe's optimizer{place} returned an empty list.")
    alone = len(optimizers) == 1 and isinstance(optimizers[0], torch.optim.Optimizer)
    return optimizers[0] if alone else Joint(optimizers)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return a copy of what an optimizer's groups hold besides their parameters."""

    def copied(value: Any) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception:  # what cannot be copied is compared as it is
            return value

    return [
        {name: copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def what_groups_keep(
    optimizer: torch.optim.Optimizer, initial: Sequence[Group], scheduled: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return for a checkpoint which entries of each group were gathered since it was made.

    Args:
        optimizer: after some steps.
        initial: what `groups_of` returned when it was new.
        scheduled: entries that a scheduler sets.
    """
    return [
        {
            "made": sorted(new),
            "gathered": sorted(
                name
                for name, value in group.items()
                if name not in _set_here(group)
                and name not in scheduled
                and not (name in new and equal_values(value, new[name]))
            ),
            "dtypes": _dtypes(group),
        }
        for group, new in zip(optimizer.param_groups, initial, strict=True)
    ]


def _set_here(group: Group) -> frozenset[str]:
    """Return the names in a group that are never loaded: `lr` unless the optimizer changes it."""
    finds = group.get(RATIO, 1.0) is None or (GIVEN in group and group["lr"] != group[GIVEN])
    return _SET_HERE - {"lr", GIVEN} if finds else _SET_HERE


def _dtypes(group: Group) -> list[str]:
    return sorted({str(p.dtype) for p in group["params"]})


def equal_values(first: Any, other: Any) -> bool:
    """Whether two values of a state are equal, NaN with NaN, too."""
    return not difference(first, other) and not difference(other, first)


def load_state(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    initial: Sequence[Group] = (),
    kept: Sequence[Group] | None = None,
) -> None:
    """Load an optimizer's state; its settings and kernel stay those that it was built with.

    State of another kind of built-in optimizer is not loaded: this one begins anew.

    Args:
        optimizer: a new one.
        saved: what `packed` returned.
        initial: what `groups_of` returned when it was new.
        kept: of a recipe's own, what `what_groups_keep` returned; None of a built-in one.

    Raises:
        UserError: the state is that of another optimizer, or its own `load_state_dict` fails.
    """
    several = saved.get("optimizers") if isinstance(saved, dict) else None
    if isinstance(optimizer, Joint) or (several is not None and not _has_its_own(optimizer)):
        _load_each(members_of(optimizer), several or [saved], initial, kept)
        return
    own = [dict(group) for group in optimizer.param_groups]
    its: Sequence[Group] = saved.get("param_groups", ()) if isinstance(saved, dict) else ()
    if len(own) != len(its) and not _has_its_own(optimizer):
        raise UserError(
            f"The checkpoint's optimizer has {len(its)} groups of parameters, "
            f"this one has {len(own)}. Use the optimizer of the run that wrote it."
        )
    from samestep.base.patches import patched  # noqa: PLC0415 - to resume only

    if RATIO in own[0] or kept is not None or any(RATIO in group for group in its):
        gathered = _gathered(initial or own, kept)
        same_types = kept is not None and [_dtypes(g) for g in own] == [g["dtypes"] for g in kept]
        try:
            with patched((torch.optim.Optimizer, _POLICY, partial(_placed, same_types))):
                _load(optimizer, saved, own, its)
        except Exception as error:
            kind = type(optimizer).__name__
            message = f"The recipe's optimizer, {kind}, failed to load what the checkpoint holds"
            blame(message, error, type(optimizer).load_state_dict)
        take_settings(optimizer, own, gathered)
        return
    if any(("momentum" in mine) != ("momentum" in old) for mine, old in zip(own, its, strict=True)):
        return
    _load(optimizer, saved, own, its)
    for group, mine in zip(optimizer.param_groups, own, strict=True):
        group.update({name: mine[name] for name in _SETTINGS if name in mine})


def _load_each(
    members: Sequence[torch.optim.Optimizer],
    saved: Sequence[dict[str, Any]],
    initial: Sequence[Group],
    kept: Sequence[Group] | None,
) -> None:
    if len(members) != len(saved):
        raise UserError(
            f"The checkpoint has the state of {count(len(saved), 'optimizer')}, the recipe "
            f"{len(members)}. Use those of the run that wrote it, or start a new run."
        )
    start = 0
    for member, state in zip(members, saved, strict=True):
        here = slice(start, start := start + len(member.param_groups))
        load_state(member, state, initial[here], None if kept is None else kept[here])


def _has_its_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's class makes its own state_dict."""
    return type(optimizer).state_dict is not torch.optim.Optimizer.state_dict


def _gathered(initial: Sequence[Group], kept: Sequence[Group] | None) -> list[set[str]]:
    """Return the names accumulated in a checkpoint's groups; refuse another kind of optimizer's."""
    ours = _KERNELS | {"params", GIVEN}
    names = [{*group} - ours for group in initial]
    if kept is None or [{*group["made"]} - ours for group in kept] != names:
        raise UserError(
            "The checkpoint was written by another kind of optimizer, and what it has gathered "
            "does not fit this one. Use the optimizer of the run that wrote it, or start a new "
            "run."
        )
    return [set(group["gathered"]) for group in kept]


def take_settings(
    optimizer: torch.optim.Optimizer, own: Sequence[Group], gathered: Sequence[Collection[str]]
) -> None:
    """Give each group its own entries, but for what it has gathered."""
    for group, mine, names in zip(optimizer.param_groups, own, gathered, strict=True):
        for name in group.keys() - mine.keys() - {*names}:
            del group[name]  # a scheduler's that is no longer there
        group.update({n: v for n, v in mine.items() if n != "params" and n not in names})


def _load(
    optimizer: torch.optim.Optimizer,
    saved: dict[str, Any],
    own: Sequence[Group],
    its: Sequence[Group],
) -> None:
    """Load a state: torch's ordinary one, or one of the optimizer's own form as it is."""
    from samestep.core.learner.kept_objects import unpacked  # noqa: PLC0415 - to resume only

    if len(own) != len(its) or "state" not in saved:
        optimizer.load_state_dict(unpacked(own_memory(saved), optimizer))
        return
    groups = [
        group | {name: mine[name] for name in _KERNELS if name in mine}
        for mine, group in zip(own, map(dict, its), strict=True)
    ]
    saved = unpacked({**saved, "state": _sharded_state(optimizer, saved)}, optimizer)
    optimizer.load_state_dict({**saved, "param_groups": groups})
    # Torch casts all but the step count to the type of the weight; single numbers, such as NAdam's
    # product of momenta, have one of their own.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_in(optimizer), strict=True):
        state = optimizer.state[parameter] if number in saved["state"] else {}
        for name, value in saved["state"].get(number, {}).items():
            if name != "step" and isinstance(value, Tensor) and value.dim() == 0 < parameter.dim():
                state[name] = value.to(state[name].device, copy=True)


def _sharded_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[Any, Any]:
    """Return saved state, in which each tensor of a sharded weight's shape is sharded like it."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    like = dict(zip(numbers, parameters_in(optimizer), strict=False))

    def share(number: Any, value: Any) -> Any:
        of_weight = isinstance(value, Tensor) and number in like
        return sharded_as(value, like[number]) if of_weight else value

    return {
        number: {name: share(number, value) for name, value in state.items()}
        if isinstance(state, dict)
        else state
        for number, state in saved["state"].items()
    }


def _placed(
    same_types: bool, original: Callable[..., Tensor], weight: Tensor, value: Tensor, *more: Any
) -> Tensor:
    """Return a state's tensor as torch loads it, sharded like its weight.

    Torch casts all but the step count to the type of the weight, so float32 next to bfloat16
    weights would lose bits: with `same_types` it is not cast.
    """
    value = sharded_as(value, weight)
    loaded = original(weight, value, *more)
    cast = same_types and loaded.dtype != value.dtype and more[-1:] != ("step",)
    return value.to(loaded.device) if cast else loaded


class Trial:
    """Whether a checkpoint leads back to what an optimizer has gathered.

    A copy of the new optimizer loads its state after the first step. Tensors of the copy have a
    shape and a type, and no memory.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._made, self._twin = groups_of(optimizer), _twin(optimizer)

    def why_lost(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> str:
        """Return the first part of a state that loading would lose; "" if none, or if unknown."""
        if self._twin is None:
            return ""
        from samestep.core.learner.kept_objects import packed  # noqa: PLC0415 - of one's own

        twin, saved = self._twin, map_tensors(hollow, state)
        in_groups = what_groups_keep(optimizer, self._made)
        try:
            with torch.random.fork_rng(devices=[]):
                load_state(twin, saved, self._made, in_groups)
                take_settings(twin, optimizer.param_groups, [g["gathered"] for g in in_groups])
                back = map_tensors(hollow, packed(twin))
        except Exception as error:
            cause = error.__cause__ or error
            # Its code may read numbers in tensors, which these have not.
            message = str(error) if isinstance(error, UserError) else error_text(cause)
            return "" if "meta" in f"{error} {error_text(cause)}".lower() else message
        return difference(saved, back)

    def lost_counts(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the numbers that an optimizer changes and that `why_lost` has not led back to.

        Names that begin with an underscore are bookkeeping, such as torch's own.
        """
        if self._twin is None:
            return []
        lost = list[str]()
        for member, twin in zip(members_of(optimizer), members_of(self._twin), strict=True):
            back = vars(twin)
            numbers = {n: v for n, v in vars(member).items() if isinstance(v, int | float)}
            lost += [n for n, v in numbers.items() if n[0] != "_" and repr(back.get(n)) != repr(v)]
        return lost


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return a copy of an optimizer without memory; None if it holds what cannot be copied."""
    twins = {id(member): (member, object.__new__(type(member))) for member in with_inner(optimizer)}
    memo: dict[int, Any] = {key: twin for key, (_, twin) in twins.items()}
    try:
        for member, _ in twins.values():
            for parameter in parameters_in(member):
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            for name, value in vars(member).items():
                if name.startswith("_optimizer_step_"):  # hooks, which may hold anything
                    memo[id(value)] = OrderedDict()
        with Hollowing():
            for member, twin in twins.values():
                vars(twin).update({n: copy.deepcopy(v, memo) for n, v in vars(member).items()})
    except Exception:  # it may hold locks, streams or groups of ranks
        return None
    return twins[id(optimizer)][1]


def with_inner(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield an optimizer and those that it is made of."""
    yield optimizer
    if isinstance(optimizer, Joint):
        for member in optimizer:
            yield from with_inner(member)
        return
    for value in vars(optimizer).values():
        inside = value.values() if isinstance(value, dict) else value
        for inner in inside if isinstance(inside, list | tuple) else [inside]:
            if isinstance(inner, torch.optim.Optimizer):
                yield inner
