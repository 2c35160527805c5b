"""What the checkpoints of a user's own loop hold, with its means: checked, collected, restored."""

import math
from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, time
from enum import Enum
from numbers import Number
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from samestep.base.errors import UserError, blame
from samestep.base.run import checkpoints
from samestep.base.run.directory import names_secret
from samestep.base.run.records import TAKEN_NAMES
from samestep.base.trees import map_leaves
from samestep.core.learner.model_state import load_model
from samestep.core.learner.prepare import check_dense
from samestep.core.session.declared import plain_value
from samestep.launch.ranks.world import World

_STEPPING = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""What holds no weights."""
KNOWN = (nn.Module, *_STEPPING)
_AS_SAVED = (
    "Before run.epochs, give it the layers, parameters and groups that it had when it was saved."
)
_PER_EPOCH = ("num_samples", "data")
"""Parts of the order that each epoch may have of its own."""
_WEIGHTED = (
    " If the weights change from epoch to epoch, draw the samples yourself: "
    "run.batches(torch.multinomial(weights, n), …)."
)


@runtime_checkable
class Stateful(Protocol):
    """What a checkpoint can hold: a module, an optimizer, a schedule, anything with these two."""

    def state_dict(self) -> Any:
        """Return the state as tensors, numbers, strings, and lists and dicts of them."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Become what it was when it returned this."""


def check_state(state: Any) -> None:
    """Refuse a state that a checkpoint cannot hold and give back."""
    if not isinstance(state, Mapping) or not state:
        raise UserError(
            "run.epochs(…, state=…) takes a dict of everything that training changes: "
            'state={"model": model, "optimizer": optimizer}. Checkpoints hold it.'
        )
    if all(isinstance(part, _STEPPING) for part in state.values()):
        raise UserError(
            f"state has {', '.join(map(repr, state))} but no weights. Add the modules: "
            'state={"model": model, …}.'
        )
    for name, part in state.items():
        if not isinstance(part, Stateful):
            remedy = "Leave it out, or put it into an object that has both."
            if isinstance(part, list | tuple | Mapping):
                first, second = (f"{name}_{number}" for number in (1, 2))
                remedy = f"Name its parts one by one: {{…, {first!r}: …, {second!r}: …}}."
            raise UserError(
                f"state[{name!r}] is a {type(part).__name__}, which has no state_dict and "
                "load_state_dict.",
                remedy=remedy,
            )
        if isinstance(part, nn.Module):
            if any(map(is_lazy, part.parameters())):
                raise UserError(
                    f"state[{name!r}] has lazy parameters, which have no shape yet. Call it once "
                    "on a few samples before run.epochs."
                )
            check_dense(part, f"state[{name!r}] has")
            fsdp = any(type(m).__name__ == "FullyShardedDataParallel" for m in part.modules())
            if fsdp or any(hasattr(p, "placements") for p in part.parameters()):
                raise UserError(
                    f"state[{name!r}] is sharded over the ranks (FSDP, DTensor), but checkpoints "
                    "hold only what rank 0 has. Keep the whole model on each rank."
                )
        state_of(name, part)


def state_of(name: str, part: Stateful) -> Any:
    """Return an entry of the state as a checkpoint holds it; refuse what could not be read back."""
    try:
        state = part.state_dict()
    except Exception as error:
        blame(f"state[{name!r}].state_dict() failed", error)
    state = state if checkpoints.is_plain(state) else map_leaves(_of_python, state)
    if why := checkpoints.why_not_kept(state):
        raise UserError(
            f"state[{name!r}].state_dict() holds what a checkpoint could not restore: {why}. It "
            "may hold tensors (for an array: torch.from_numpy), numbers, texts, and lists and "
            "dicts of them."
        )
    return state


def check_same_program(
    saved: Mapping[str, Any], name: str, now: Mapping[str, Any], path: Path, free: Collection[str]
) -> None:
    """Refuse a checkpoint of another program or other settings; those in `free` may differ."""
    if "program" not in saved:
        raise UserError(
            f"{path} holds a run of samestep train.",
            remedy=f"Continue it with samestep train {path} --resume, or name another directory "
            "in open_run.",
        )
    if saved["program"] != name:
        raise UserError(
            f"{path} was written by {saved['program']!r}, not by {name!r}. Name another directory "
            "in open_run; or, if it is the same program under another name, "
            f"write open_run(…, name={saved['program']!r})."
        )
    before = saved["settings"]
    for key in sorted({*before, *now}.difference(free)):
        then, today = before.get(key), now.get(key)
        if then != today and repr(then) != repr(today):  # two NaNs differ, and are written alike
            raise UserError(
                f"{path} was started with {key} = {then}, and now it is {today}: "
                "that would be a different training. Restore the earlier value, name it in "
                f"open_run(…, may_change=[{key!r}]), or start a run in another directory."
            )


def load_state(state: Mapping[str, Stateful], saved: Mapping[str, Any], path: Path) -> None:
    """Load what a checkpoint holds into the state.

    An optimizer keeps the tensors it is given: what is not a module's must not lie in the file.
    """
    if saved.keys() != state.keys():
        raise UserError(
            f"The checkpoints of {path} hold {', '.join(saved)}; state has {', '.join(state)}. "
            "Use the same names in state as when the run was started."
        )
    for name, part in state.items():
        load_one(name, part, saved[name])


def load_one(name: str, part: Stateful, saved: Any) -> None:
    """Load one entry of the state."""
    try:
        if isinstance(part, nn.Module):
            load_model(part, {"model": saved}, remedy=_AS_SAVED)
        else:
            part.load_state_dict(saved)
    except UserError as error:
        raise UserError(f"state[{name!r}]: {error}") from error
    except Exception as error:
        what = f"state[{name!r}].load_state_dict() failed with what the checkpoint holds"
        blame(what, error, remedy=_AS_SAVED)


def plain(value: Any, name: str = "", *, free: Collection[str] = ()) -> Any:
    """Return a script's settings as TOML has them; `name` is that of one among them.

    Those that are None, or that are named like a secret, are left out, and of those in `free` what
    TOML cannot hold. Functions, types and devices are kept by their names.

    Raises:
        UserError: a setting is of another kind: its text may differ from process to process.
    """
    value = _opened(value)
    if isinstance(value, Mapping):
        named = {str(k): part for k, part in value.items() if not names_secret(str(k))}
        kept = {k: _plain_or_none(k, part, f"{name}[{k!r}]", free) for k, part in named.items()}
        return {k: part for k, part in kept.items() if part is not None}
    if isinstance(value, list | tuple):
        parts = [plain(part, f"{name}[{place}]") for place, part in enumerate(value)]
        return [part for part in parts if part is not None]
    simple = _simple(value)
    if value is not None and simple is None:
        raise UserError(
            f"open_run(settings=…): settings{name} is a {type(value).__name__}, which settings."
            "toml cannot hold, so a resumed run could not be compared with it.",
            remedy="Give the numbers and texts that it consists of, leave it out, or name it in "
            "may_change=[…].",
        )
    # As a number, NaN differs from itself.
    return simple if not isinstance(simple, float) or math.isfinite(simple) else str(simple)


def _plain_or_none(key: str, value: Any, name: str, free: Collection[str]) -> Any:
    try:
        return plain(value, name)
    except UserError:
        if key not in free:
            raise
        return None


def _opened(value: Any) -> Any:
    """Return an object of the script's as what it is made of, or as its name, where that is known.

    Of a set the order differs from process to process.
    """
    if isinstance(value, torch.dtype | torch.device | Enum | date | time | Number | range):
        simple = _simple(plain_value(value))
        return str(value) if simple is None else simple
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    is_named = callable(value) and hasattr(value, "__qualname__")
    return f"{value.__module__}.{value.__qualname__}" if is_named else plain_value(value)


def _of_python(value: Any) -> Any:
    """Return a number of NumPy as Python's: an array of rates gives an optimizer such numbers."""
    is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
    return value.item() if is_number else value


def _simple(value: Any) -> str | int | float | None:
    """Return a number or a text without what a subclass adds, such as an enum's name; else None."""
    return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)


def still_parts(module: nn.Module) -> list[str]:
    """Name the weights that are not trained and the modules in evaluation mode.

    No `state_dict` holds either, and a script may change both in any epoch.
    """
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    return frozen + [name for name, part in module.named_modules() if not part.training]


def keep_still(module: nn.Module, begun: Collection[str], saved: Mapping[str, Any]) -> None:
    """Freeze weights and turn modules to evaluation as saved, but for what is `begun` otherwise."""
    edited, still = {*begun} ^ {*saved["begun"]}, {*saved["now"]}
    for name, parameter in module.named_parameters():
        if name not in edited:
            parameter.requires_grad_(name not in still)
    for name, part in module.named_modules():
        if name not in edited:
            part.training = name not in still


def checked_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `run.state` for a checkpoint."""
    simple = {str(name): _simple(_of_python(value)) for name, value in values.items()}
    for name, value in values.items():
        if value is not None and simple[str(name)] is None:
            raise UserError(
                f"run.state[{name!r}] is a {type(value).__name__}; it may hold numbers and texts. "
                "Use .item() of a tensor; put objects with a state_dict into run.epochs(…, "
                "state=…)."
            )
    return simple


def check_order(
    before: Mapping[str, Any], now: dict[str, Any], path: Path, *, may_be_new: bool, within: bool
) -> None:
    """Refuse an order of samples other than that of the epoch before, or in the checkpoint.

    Each epoch may have data of its own, such as games played in it: `now` gets "changes" then. It
    `may_be_new` if this process trained the epoch before, or there was only one. `within`: whether
    the run continues within the epoch.
    """
    if not before:
        return
    differs = any(before[name] != now[name] for name in _PER_EPOCH)
    if before.get("changes") or (may_be_new and differs):
        now["changes"] = True
    free = not within and (may_be_new or before.get("changes"))
    for name in {**before, **now}:
        per_epoch, was, value = name in _PER_EPOCH, before.get(name), now.get(name)
        if name == "changes" or (free and per_epoch) or was == value:
            continue
        hashed = {"data": "other data", "weights": "other weights of the samples"}
        what = hashed.get(name, f"{name} = {was}, and now it is {value}")
        more = (
            " If each epoch makes its data with the model, a run cannot continue within an "
            "epoch: delete the newest checkpoint to continue from the one before, or make the data "
            "in the loop over run.batches(torch.arange(…), …)."
        )
        raise UserError(
            f"{path} was started with {what}: the order of the samples would change within the "
            "run. Restore it, or start a run in another directory."
            + (more if within and per_epoch else _WEIGHTED if name == "weights" else "")
        )


Sums = dict[str, tuple[float, float]]
"""Name → the sum of its values times their weights, and the sum of the weights."""
_MOST_WAITING = 1024


class Means:
    """Weighted means by name. Values stay on the device until somebody reads them.

    Ranks read together. What only some ranks have logged is the mean over those.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: list[tuple[int, str, float | Tensor, float | Tensor]] = []
        self._now = 0
        self._step: Sums = {}
        self.sums: Sums = {}
        """Of this rank, since the last `clear`."""

    def add(self, values: dict[str, Any], weight: float | Tensor) -> None:
        """Take the values of the running step, each a mean over `weight` samples or terms."""
        terms = _number("terms", weight)
        if isinstance(terms, float) and not 0 <= terms < math.inf:
            raise UserError(f"run.log(terms={terms}): it must be a number, 0 or more.")
        for name, value in values.items():
            pair = _number(name, value), terms
            self._waiting.append((self._now, name, *pair))
        if len(self._waiting) >= _MOST_WAITING:
            self._settle()

    def next_step(self) -> None:
        """Begin a new step: what is added from here on belongs to it."""
        self._now += 1
        self._step = {}

    def _settle(self) -> None:
        """Add up what waits, in its order; the one place where the host waits for the device."""
        flat = [number for _, _, *pair in self._waiting for number in pair]
        there = [number for number in flat if isinstance(number, Tensor)]
        read = iter(torch.stack(there).cpu().to(torch.float64).tolist() if there else ())
        numbers = iter([next(read) if isinstance(number, Tensor) else number for number in flat])
        for step, name, *_ in self._waiting:
            value, weight = next(numbers), next(numbers)
            for sums in (self.sums, self._step) if step == self._now else (self.sums,):
                # A mean over nothing is NaN, and counts for nothing.
                _add(sums, name, value * weight if weight else 0.0, weight)
        self._waiting = []

    def of_step(self) -> dict[str, float]:
        """Return the means of the running step over all ranks; all ranks call it."""
        self._settle()
        return _means(self._world.gather(self._step))

    def read(self) -> dict[str, float]:
        """Return the means since the last `clear` over all ranks; all ranks call it."""
        self._settle()
        return _means(self._world.gather(self.sums))

    def clear(self) -> None:
        """Forget everything."""
        self._waiting, self._step, self.sums = [], {}, {}


def _add(sums: Sums, name: str, total: float, weight: float) -> None:
    before = sums.get(name, (0.0, 0.0))
    sums[name] = before[0] + total, before[1] + weight


def added_up(ranks: list[Sums]) -> Sums:
    """Return the sums of all ranks; names in the order of the first rank."""
    total_of: Sums = {}
    for sums in ranks:
        for name, (total, weight) in sums.items():
            _add(total_of, name, total, weight)
    return total_of


def _means(ranks: list[Sums]) -> dict[str, float]:
    sums = added_up(ranks).items()
    return {name: total / weight if weight else math.nan for name, (total, weight) in sums}


def check_names(values: dict[str, Any]) -> None:
    """Refuse a value that is named like another field of the records."""
    for name in values:
        if name != "loss" and name in TAKEN_NAMES:
            raise UserError(
                f"run.log({name}=…): records already have a field {name!r}. Choose another name, "
                f"such as 'own_{name}'."
            )


def _number(name: str, value: Any) -> float | Tensor:
    """Return a value that later changes in place cannot reach."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise UserError(
                f"run.log({name}=…) was given a tensor of shape {tuple(value.shape)}; log single "
                "numbers: means over the samples of the batch."
            )
        if value.device.type != "cpu":
            return value.detach().reshape(()).to(torch.float32, copy=True)
        value = value.item()
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"run.log({name}=…) was given a {type(value).__name__}; log single numbers."
        ) from error


def precision_of(kinds: set[torch.dtype]) -> str:
    """Return the least precise type of the weights, by which `compare` knows their rounding."""
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        if dtype in kinds:
            return name
    return "fp64" if kinds == {torch.float64} else "fp32"
