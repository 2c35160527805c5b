"""A learning-rate scheduler of PyTorch, made by a recipe's schedule, and when it is stepped."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.run.checkpoints import why_not_kept
from samestep.base.trees import map_tensors, tree_leaves
from samestep.base.words import count
from samestep.core.learner.optimizer_state import RATIO, Joint, members_of
from samestep.core.plan import GroupRates, Plan

Interval = Literal["step", "epoch", "validation"]

_EXPECTED = "Detected call of `lr_scheduler.step|The epoch parameter in `scheduler.step"
"""Warnings of PyTorch that do not concern the user: a gradient scaler may skip the first step of
the optimizer, and SequentialLR passes on an epoch in some versions."""


class Scheduler:
    """Sets the rates, and whatever else it cycles, in the groups of the optimizer.

    Each rank has one, and steps it at the same places, so their rates are the same.
    """

    def __init__(self, plan: Plan, optimizer: torch.optim.Optimizer) -> None:
        """Make it as the recipe's schedule says, which sets the rates of the first step."""
        assert plan.schedule is not None
        self._plan, self._optimizer, self._place = plan, optimizer, defined_at(plan.schedule)
        available = {"optimizer": optimizer, "plan": plan}
        asked = {name: available[name] for name in plan.schedule_asks}
        schedule, before = plan.schedule, self._as_they_are()
        returned = self._call_user_code("The recipe's schedule failed", lambda: schedule(**asked))
        several = returned if isinstance(returned, list | tuple) else [returned]
        self.parts = [self._checked(part) for part in several]
        """The schedulers, each with what it is stepped after."""
        self.follows = {
            id(part["scheduler"]): part["monitor"]
            for part in several
            if isinstance(part, dict) and part.get("monitor")
        }
        """The metrics of those that do not follow --monitor."""
        self._check_optimizers()
        # A rate that is a tensor changes in place.
        self._built = map_tensors(torch.clone, self._as_they_are())
        pairs = list(zip(before, self._built, strict=True))
        self.sets = {"lr"} | {
            n for old, new in pairs for n in new if n not in old or old[n] != new[n]
        }
        """The entries of the groups that it sets."""
        if why := why_not_kept(self.state()):
            raise UserError(
                f"The recipe's {self.name}{self._place} holds what a checkpoint cannot: {why}. Its "
                "attributes may be numbers, texts, and lists and dicts of them."
            )
        self.lr = self.next_lr
        """The rate of the newest step."""

    @property
    def name(self) -> str:
        """The class of the scheduler."""
        return " + ".join(type(scheduler).__name__ for scheduler, _ in self.parts)

    @property
    def plateaus(self) -> list[tuple[ReduceLROnPlateau, str | None]]:
        """Those that follow a metric; with its name, if it is not the monitored one."""
        parts = [part for part, _ in self.parts if isinstance(part, ReduceLROnPlateau)]
        return [(part, self.follows.get(id(part))) for part in parts]

    @property
    def next_lr(self) -> float:
        """The rate of the next step, in the optimizer's first group; of several, of all groups."""
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return GroupRates(rates) if isinstance(self._optimizer, Joint) else rates[0]

    def begin_step(self) -> float:
        """Return the rate of the step that begins."""
        self.lr = self.next_lr
        return self.lr

    def after(
        self,
        what: Interval,
        step: int,
        values: Mapping[str, float] | None = None,
        monitored: str = "",
    ) -> None:
        """Step it if it is stepped after this; a validation gives what it has measured.

        A profile may take more steps than the training has: these are not asked for.
        """
        for scheduler, interval in self.parts if step <= self._plan.total_steps else ():
            if interval == what:
                what_failed = f"The recipe's {type(scheduler).__name__} failed after step {step}"
                name = self.follows.get(id(scheduler), monitored)
                given = () if values is None else (values[name],)
                self._call_user_code(what_failed, partial(scheduler.step, *given))

    def state(self) -> dict[str, Any]:
        """Return the schedulers' state for a checkpoint, and the values that they set in groups."""
        moved = [
            {name: value for name, value in group.items() if built.get(name) != value}
            for group, built in zip(self._as_they_are(), self._built, strict=True)
        ]
        states = [_plain(state.state_dict()) for state, _ in self.parts]
        state = states if len(states) > 1 else states[0]
        return {"lr": self._plan.lr, "made": state, "groups": moved}

    def load(self, saved: dict[str, Any] | None) -> None:
        """Continue from a checkpoint; without a state, begin with the rates of the first step."""
        for group, built in zip(self._optimizer.param_groups, self._built, strict=True):
            # A recipe's own optimizer may have gathered the others.
            _set(group, {n: v for n, v in built.items() if n in self.sets or RATIO not in group})
        if saved is None:
            return
        if saved["lr"] != self._plan.lr:
            raise UserError(
                f"The checkpoint's scheduler was made with a learning rate of {saved['lr']:g}, now "
                f"it is {self._plan.lr:g}: the scheduler would not follow. Write the old value "
                "back, or start a new run."
            )
        states = copy.deepcopy(saved["made"])  # loading takes parts out of it
        states = states if isinstance(states, list) else [states]
        if len(states) != len(self.parts):
            raise UserError(
                f"The checkpoint has the state of {count(len(states), 'scheduler')}, the recipe's "
                f"schedule{self._place} makes {len(self.parts)}. Use those of the run that wrote "
                "it, or start a new run."
            )
        for (scheduler, _), state in zip(self.parts, states, strict=True):
            message = f"The recipe's {type(scheduler).__name__} failed"
            self._call_user_code(message, partial(scheduler.load_state_dict, state))
        for group, moved in zip(self._optimizer.param_groups, saved["groups"], strict=True):
            _set(group, moved)

    def _as_they_are(self) -> list[dict[str, Any]]:
        """Turn the groups' values into types that a checkpoint can hold, and return them."""
        groups = self._optimizer.param_groups
        plain_groups = [
            {n: _plain(v) for n, v in group.items() if n == "lr" or not _holds_tensors(n, v)}
            for group in groups
        ]
        for group, plain in zip(groups, plain_groups, strict=True):
            group.update(plain)
        return plain_groups

    def _check_optimizers(self) -> None:
        """Check that no other optimizer has a scheduler, and that each is stepped once."""
        members = {id(s) for s in members_of(self._optimizer)}
        taken = set[int]()
        for scheduler, _ in self.parts:
            each, name = _all_of(scheduler), type(scheduler).__name__
            its = {id(one.optimizer) for one in each}
            its = members if its == {id(self._optimizer)} else its
            if not its <= members or not taken.isdisjoint(map(id, each)):
                raise UserError(
                    f"The recipe's schedule{self._place} made a {name} for another optimizer, or "
                    "returned it twice. Give it that which the function is called with; to let one "
                    "follow another use SequentialLR."
                )
            taken |= {*map(id, each)}
        if not self.parts:
            raise UserError(f"The recipe's schedule{self._place} returned an empty list.")

    def _checked(self, returned: Any) -> tuple[Any, Interval]:
        """Return a scheduler, and after what it is stepped."""
        parts: dict[str, Any] = returned if isinstance(returned, dict) else {"scheduler": returned}
        scheduler, interval = parts.get("scheduler"), parts.get("interval", "step")
        if not isinstance(scheduler, LRScheduler):
            raise UserError(
                f"The recipe's schedule{self._place} returned {scheduler!r:.80}; with a parameter "
                "`optimizer` it must return a scheduler of torch.optim.lr_scheduler."
            )
        allowed = "monitor" if isinstance(scheduler, ReduceLROnPlateau) else "interval"
        if others := parts.keys() - {"scheduler", "interval", allowed}:
            raise UserError(
                f"The recipe's schedule{self._place} returned a dict with {min(others)!r}; it may "
                "have 'scheduler', 'interval', and for ReduceLROnPlateau 'monitor', if that is not "
                "--monitor."
            )
        if interval not in ("step", "epoch"):
            raise UserError(
                f"The recipe's schedule{self._place} returned the interval {interval!r}; it is "
                "'step' or 'epoch'."
            )
        if not isinstance(scheduler, ReduceLROnPlateau):
            return scheduler, interval
        if "interval" in parts:
            raise UserError(
                f"The recipe's schedule{self._place} returned an interval for ReduceLROnPlateau, "
                "which is stepped after each validation: --eval-every says when. Leave it out."
            )
        return scheduler, "validation"

    def _call_user_code(self, what: str, function: Callable[[], Any]) -> Any:
        """Call the user's code, which must not step the optimizer."""
        watching = self._optimizer.register_step_pre_hook(self._refuse)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", _EXPECTED, UserWarning)
                return function()
        except Exception as error:
            blame(what, error, self._plan.schedule)
        finally:
            watching.remove()

    def _refuse(self, *_: Any) -> None:
        raise UserError(
            f"The recipe's schedule{self._place} steps the optimizer. samestep does that: take "
            "optimizer.step() out of it."
        )


def _set(group: dict[str, Any], values: dict[str, Any]) -> None:
    """Set entries of a group; a tensor stays the one that the optimizer has."""
    for name, value in values.items():
        held = group.get(name)
        group[name] = held.copy_(torch.as_tensor(value)) if isinstance(held, Tensor) else value


def _holds_tensors(name: str, value: Any) -> bool:
    """Whether an entry of a group is none of a scheduler's: tensors, which only `step` changes."""
    return name == "params" or any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _all_of(whole: Any) -> list[Any]:
    return [whole, *(inner for s in getattr(whole, "_schedulers", ()) for inner in _all_of(s))]


def _plain(value: Any) -> Any:
    """Return a state with NumPy's numbers as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return value
