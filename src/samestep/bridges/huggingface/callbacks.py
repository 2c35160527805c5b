"""Callbacks of a Trainer: early stopping is a setting, and those that only log are called."""

import dis
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

import torch
from torch import nn
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.run.records import read_records
from samestep.base.settings import Settings
from samestep.core.recipe import Recipe

_AROUND_STEPS = ("on_epoch_begin", "on_step_begin", "on_step_end")
_CALLED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("on_train_begin", *_AROUND_STEPS, "on_epoch_end", "on_train_end"), ()),
    "on_log": ("logs",),
    "on_evaluate": ("metrics",),
}
"""What is called, and what each is given besides args, state and control."""
_OF_TRAINER = ("model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""What a Trainer also gives, and is not at hand where records are."""
_OF_RECORDS = ("event", "split", "epoch", "step", "samples", "seconds")
_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
_BY_SETTINGS = "Use --patience to stop early, --eval-every-steps to evaluate, --log-every to log."
_CONTROL = vars(TrainerControl()).keys()
_NOT_FOLLOWED = "changes the Trainer's control, which samestep does not follow."
_WITH_MODEL = "If it needs the model, write a Recipe with after_epoch."
_AFTER = f"Leave it out: samestep.load(run) returns the trained model. {_WITH_MODEL}"
_UNCALLED = ("on_init_end", "on_save", "on_predict", "on_prediction_step", "on_push_begin")
"""What changes no training; the Trainer has called the first as it was made."""


def settings_of_callbacks(
    callbacks: Sequence[Any],
) -> tuple[dict[str, Any], list[TrainerCallback], list[str]]:
    """Return the settings that callbacks stand for, the callbacks to call, and notes.

    Those of transformers only show and save.

    Raises:
        UserError: one does more than to log.
    """
    settings: dict[str, Any] = {}
    called: list[TrainerCallback] = []
    notes: list[str] = []
    for given in callbacks:
        callback = given() if isinstance(given, type) else given
        if isinstance(callback, EarlyStoppingCallback):
            settings["patience"] = callback.early_stopping_patience
            settings["min_delta"] = callback.early_stopping_threshold or 0.0
        if own := _own_methods(callback):
            _check(callback, own)
            called.append(callback)
            if uncalled := [name for name in _UNCALLED[1:] if name in own]:
                kind = type(callback)
                what = f"{kind.__name__}{defined_at(kind)} has its own {listed(uncalled)}"
                notes.append(f"The callback {what}: not called.")
    return settings, called, notes


def _own_methods(callback: Any) -> dict[str, Callable[..., Any]]:
    """Return the events that a callback answers by methods which are not of transformers."""
    events = {n: getattr(callback, n) for n in dir(TrainerCallback) if n.startswith("on_")}
    of = {name: getattr(inspect.unwrap(f), "__module__", "") for name, f in events.items()}
    theirs = ("transformers.", "sentence_transformers.")  # the latter's writes a model card
    return {n: f for n, f in events.items() if not (of[n] or "").startswith(theirs)}


def _check(callback: Any, own: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse a callback that would miss a call, what it asks for in one, or the trained model."""
    kind = type(callback)
    named = f"The callback {kind.__name__}{defined_at(kind)}"
    if others := [name for name in own if name not in (*_CALLED, *_UNCALLED)]:
        raise UserError(
            f"{named} has its own {listed(others)}, which samestep would not call.",
            remedy=f"Leave it out: only {listed([*_CALLED], 8)} are called. {_BY_SETTINGS} "
            f"{_WITH_MODEL}",
        )
    check_held(named, own.values(), {f"self.{n}": value for n, value in vars(callback).items()})
    for name in sorted(_CALLED.keys() & own.keys()):
        if asked := _asked(own[name]):
            raise UserError(
                f"{named}: {name} uses {asked!r}, which it does not get.", remedy=_AFTER
            )
        if _CONTROL & {i.argval for i in _names(own[name]) if i.opname == "STORE_ATTR"}:
            raise UserError(f"{named}: {name} {_NOT_FOLLOWED}", remedy=_BY_SETTINGS)
        try:
            inspect.signature(own[name]).bind(None, None, None, **dict.fromkeys(_CALLED[name]))
        except TypeError as error:
            given = listed(["args", "state", "control", *_CALLED[name]], 4)
            raise UserError(
                f"{named}: samestep calls {name} with {given}, which it does not accept ({error}).",
                remedy="Let it accept these, and **kwargs.",
            ) from error


def check_held(named: str, functions: Iterable[Any], held: Mapping[str, Any]) -> None:
    """Refuse functions that use a model or a Trainer of the script: a copy is what is trained.

    `held` is what else they may use, by name. A model's `config` may be read.
    """
    found = dict(held)
    for function in map(inspect.unwrap, functions):
        does = [(one.argval, then.argval) for one, then in itertools.pairwise(_names(function))]
        used = {name for name, then in does if then != "config"}
        outside = getattr(function, "__globals__", {})
        cells = inspect.getclosurevars(function).nonlocals if outside else {}
        found |= {n: value for n, value in {**outside, **cells}.items() if n in used}
    for name, value in found.items():
        has_weights = isinstance(value, nn.Module) and any(True for _ in value.parameters())
        if has_weights or isinstance(value, Trainer):
            raise UserError(
                f"{named} uses {name}, a {type(value).__name__}; samestep trains a copy of the "
                "model, so these weights would never change.",
                remedy=_WITH_MODEL,
            )


def _asked(function: Any) -> str:
    """Return what an event's function uses of its arguments, and is not given here.

    It may ask whether that is there, or hand it on.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    steps, used, guarded = [*dis.get_instructions(code)], set[Any](), set[Any]()
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
    for one, then, after in zip(steps, steps[1:], steps[2:], strict=False):
        if not one.opname.startswith("LOAD_FAST") or one.argval not in arguments:
            continue
        if then.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            used.add(one.argval)
        elif then.opname == "LOAD_CONST" and after.opname in ("BINARY_SUBSCR", "BINARY_OP"):
            used.add(then.argval)
        elif "JUMP" in then.opname or after.opname == "IS_OP":
            guarded.add(one.argval)
    return next((name for name in _OF_TRAINER if name in used - guarded), "")


def _names(function: Any) -> list[dis.Instruction]:
    """Return a Python function's instructions that load or set names, and where it returns."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    kinds = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "STORE_ATTR", "RETURN_VALUE")
    return [] if code is None else [i for i in dis.get_instructions(code) if i.opname in kinds]


class _NotHere:
    """What a Trainer gives its callbacks and is not here: who only passes it on may have it."""

    def __init__(self, name: str, where: str) -> None:
        self.__dict__.update(name=name, where=where)

    def __getattr__(self, _name: str) -> NoReturn:
        self()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            f"{self.where} uses {self.__dict__['name']!r}, which samestep does not have where "
            "callbacks are called.",
            remedy=_WITH_MODEL,
        )

    __len__ = __iter__ = __getitem__ = __setattr__ = __call__


@dataclass
class LoggingCallbacks:
    """Callbacks that only log, called on rank 0 with what the records of a run say."""

    callbacks: Sequence[TrainerCallback]
    args: TrainingArguments
    processing_class: Any = None
    state: TrainerState = field(default_factory=TrainerState)
    steps_per_epoch: int = 1
    run_dir: str = ""
    _at: tuple[bool, bool] = (False, False)
    """Whether a training has begun in this process, and a step of it."""

    def begin_step(self, step: int) -> None:
        """Take the first forward of a step, counted from 0."""
        if step > self.state.global_step:  # fp16 may leave the optimizer's step out
            self.end_step()
        if self._at == (True, False):
            self._at, self.state.global_step = (True, True), step
            self.state.epoch = step / self.steps_per_epoch
            if step % self.steps_per_epoch == 0:
                self._call("on_epoch_begin")
            self._call("on_step_begin")

    def end_step(self) -> None:
        """Take the end of a step, in which the optimizer has changed the weights."""
        if self._at == (True, True):
            self._at, self.state.global_step = (True, False), self.state.global_step + 1
            self.state.epoch = self.state.global_step / self.steps_per_epoch
            self._call("on_step_end")

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Take a record."""
        state, event = self.state, record["event"]
        self.run_dir = record.get("run_dir", self.run_dir)
        if (event == "start" and not record["resumed"]) or event == "resume":
            state.log_history.clear()
            for before in read_records(self.run_dir):  # with `--elastic`, of another rank 0
                for _ in self._logs(before):
                    pass
            self._at = (True, False)
            self._call("on_train_begin")
        for values in () if event == "start" else self._logs(record):
            self._call("on_log", logs=values)
            if event == "evaluation":
                self._call("on_evaluate", metrics=values)
        step = record.get("step") or 0
        over = step >= state.max_steps or record.get("reason") == "early stopping"
        if event == "epoch" and (over or step % self.steps_per_epoch == 0):
            self._call("on_epoch_end")
        elif event == "stop" and over:
            self._call("on_train_end")

    def _logs(self, record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the values that the Trainer logs of a record, with the state up to date."""
        state = self.state
        if record["event"] == "start":
            total = record["total_steps"]
            self.steps_per_epoch = record["steps_per_epoch"] or total  # of a stream, all steps
            state.max_steps, state.num_train_epochs = total, record["epochs"]
            state.train_batch_size = self.args.train_batch_size
            state.compute_steps(self.args, total)
        if record["event"] == "step":
            values = {new: record[old] for old, new in _LOGGED.items() if old in record}
        elif record["event"] == "evaluation" and record["split"] == "validation":
            flat = {**record, **record.get("metrics", {})}
            names = {n: f"eval_{n.replace('/', '_')}" for n in flat if n not in _OF_RECORDS}
            values = {new: flat[n] for n, new in names.items() if isinstance(flat[n], float | int)}
        else:
            return
        state.global_step = record["step"]
        state.epoch = values["epoch"] = record["step"] / self.steps_per_epoch
        state.log_history.append({**values, "step": state.global_step})
        yield values

    def _call(self, name: str, **given: Any) -> None:
        for callback in self.callbacks:
            if (function := _own_methods(callback).get(name)) is None:
                continue
            where = f"{type(callback).__name__}.{name}"
            control, taken = TrainerControl(), inspect.signature(function).parameters
            every = any(one.kind is one.VAR_KEYWORD for one in taken.values())
            more: dict[str, Any] = {n: _NotHere(n, where) for n in _OF_TRAINER}
            more["processing_class"] = self.processing_class
            more = {n: value for n, value in more.items() if every or n in taken}
            changed = function(self.args, self.state, control, **given, **more)
            if (changed or control) != TrainerControl():
                raise UserError(f"{where} {_NOT_FOLLOWED}", remedy=_BY_SETTINGS)


def called_around_steps(recipe: Recipe) -> Recipe:
    """Return a recipe whose callbacks are called at the begin and the end of each step, if any."""
    calls = recipe.on_record
    forward, make = cast("Any", recipe.forward), cast("Any", recipe.optimizer)
    own = calls.callbacks if isinstance(calls, LoggingCallbacks) else ()
    if not any(name in _own_methods(one) for one in own for name in _AROUND_STEPS):
        return recipe
    told = cast("LoggingCallbacks", calls)
    asks = {"step"} & {*inspect.signature(forward).parameters}

    def forward_in_step(model: nn.Module, batch: Any, *, step: int) -> Any:
        if model.training:
            told.begin_step(step)
        return forward(model, batch, **dict.fromkeys(asks, step))

    def told_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(model, settings)
        optimizer.register_step_post_hook(lambda *_: told.end_step())
        return optimizer

    return replace(recipe, forward=forward_in_step, optimizer=told_optimizer)
