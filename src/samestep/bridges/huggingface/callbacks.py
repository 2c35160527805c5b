"""Callbacks of a Trainer: early stopping is a setting, and those that only log are called."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from samestep.base.errors import UserError, defined_at, listed

_CALLED = ("on_log", "on_evaluate")
_BEFORE = ("on_init_end",)
"""The Trainer has called it as it was made."""
_OF_RECORDS = ("event", "split", "epoch", "step", "samples", "seconds")


def settings_of_callbacks(callbacks: Sequence[Any]) -> tuple[dict[str, Any], list[TrainerCallback]]:
    """Return what callbacks stand for, early stopping, and those to call.

    Those of transformers only show and save.

    Raises:
        UserError: one does more than to log.
    """
    settings: dict[str, Any] = {}
    called: list[TrainerCallback] = []
    for given in callbacks:
        callback = given() if isinstance(given, type) else given
        if isinstance(callback, EarlyStoppingCallback):
            settings["patience"] = callback.early_stopping_patience
            settings["min_delta"] = callback.early_stopping_threshold or 0.0
        elif not type(callback).__module__.startswith("transformers."):
            _check(callback)
            called.append(callback)
    return settings, called


def _check(callback: Any) -> None:
    """Refuse a callback that would miss a call, or what it asks for in one."""
    kind = type(callback)
    named = f"The callback {kind.__name__}{defined_at(kind)}"
    others = [n for n in dir(TrainerCallback) if n.startswith("on_") and n not in _CALLED + _BEFORE]
    if own := [n for n in others if getattr(kind, n, None) is not getattr(TrainerCallback, n)]:
        raise UserError(
            f"{named} has its own {listed(own)}, which would not be called.",
            remedy=f"{' and '.join(_CALLED)} are. --patience stops early; for what needs the "
            "model, write a Recipe with after_epoch.",
        )
    for name, given in zip(_CALLED, ("logs", "metrics"), strict=True):
        try:
            inspect.signature(getattr(callback, name)).bind(None, None, None, **{given: None})
        except TypeError as error:
            raise UserError(
                f"{named}: {name} is called with args, state, control and {given} ({error}).",
                remedy="Take nothing else but **kwargs.",
            ) from error


@dataclass
class LoggingCallbacks:
    """Callbacks that only log, called on rank 0 with what the records of a run say."""

    callbacks: Sequence[TrainerCallback]
    args: TrainingArguments
    state: TrainerState = field(default_factory=TrainerState)
    steps_per_epoch: int = 1

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record."""
        state, event = self.state, record["event"]
        if event == "start":
            self.steps_per_epoch = record["steps_per_epoch"]
            state.max_steps, state.num_train_epochs = record["total_steps"], record["epochs"]
        elif event == "step":
            names = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
            self._log(record, {new: record[old] for old, new in names.items() if old in record})
        elif event == "evaluation" and record["split"] == "validation":
            flat = {**record, **record.get("metrics", {})}
            names = {n: f"eval_{n.replace('/', '_')}" for n in flat if n not in _OF_RECORDS}
            values = {new: flat[n] for n, new in names.items() if isinstance(flat[n], float | int)}
            self._log(record, values)
            self._call("on_evaluate", metrics=values)

    def _log(self, record: Mapping[str, Any], values: dict[str, Any]) -> None:
        state = self.state
        state.global_step = record["step"]
        state.epoch = values["epoch"] = record["step"] / self.steps_per_epoch
        state.log_history.append({**values, "step": state.global_step})
        self._call("on_log", logs=values)

    def _call(self, name: str, **given: Any) -> None:
        for callback in self.callbacks:
            control = TrainerControl()
            changed = getattr(callback, name)(self.args, self.state, control, **given)
            if (changed or control) != TrainerControl():
                raise UserError(
                    f"{type(callback).__name__}.{name} changes the Trainer's control, and samestep "
                    "goes by its settings: --patience stops early, --eval-every-steps evaluates."
                )
