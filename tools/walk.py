"""Print the files of samestep on a way: python tools/walk.py WAY [FLAGS].

`record`: from where the meter counts a step until its record is in events.jsonl, on the screen and
passed on to trackers. `batch`: from the order of the second epoch to the loss of its first batch.
`checkpoint`: from where the loop saves at the end of the second epoch until the checkpoint's record
is emitted, in its thread, too. `setting`: before the first step, the functions that are given
`--batch-size 16` as a value or a word, then those that ask `Settings` for it; and how often
settings are merged and made. FLAGS are those of `samestep train spiral`; a terminal shows the
progress bar, too. All say how many modules of samestep were executed before the first step.
"""

import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import samestep
from samestep.base.phases import Phases
from samestep.base.run.records import Record
from samestep.base.settings import Settings, merge_layers
from samestep.core.session.saver import Saver
from samestep.core.session.session import Session
from samestep.core.training import loop
from samestep.core.training.meter import Meter
from samestep.core.training.work import State, StepsTaken, Work
from samestep.shell.cli import main

SOURCE = f"{Path(samestep.__file__).parent}/"
TRACED = 20
"""The record of so many that is followed; those before have done what is done once."""
walk: list[str] = []
recorded: list[int] = []
modules: list[str] = []
calls: Counter[str] = Counter()
SETTING = "batch_size", "16"
count_one, emit_one, take_steps = Meter.count, Session.emit, loop.epoch_steps
lap_one, save, settle_one = Phases.lap, loop.save_now, Saver.settle


def note(frame: FrameType | None, event: str, _: Any) -> None:
    """Note in which file of samestep a call or a return arrives."""
    if event in ("call", "return"):
        frame = frame if event == "call" or frame is None else frame.f_back
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
            frame = frame.f_back
        if frame is not None:
            walk.append(frame.f_code.co_filename.removeprefix(SOURCE))


def note_setting(frame: FrameType, event: str, _: Any) -> None:
    """Note a file of samestep in which a function is given the setting, and count what makes it."""
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(SOURCE):
        calls[code.co_qualname] += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(map(has_setting, map(frame.f_locals.get, names))):
            note(frame, event, None)


def has_setting(value: object) -> bool:
    """Whether an argument is the setting, or has it by its name or among other words."""
    name, text = SETTING
    if isinstance(value, Mapping):
        return str(value.get(name)) == text
    return value == text or (isinstance(value, list | tuple) and text in value)


def read_setting(self: Settings, name: str) -> Any:
    """Return a field of the settings; note who asks for the one that is followed."""
    if name == SETTING[0] and asked == "setting":
        note(sys._getframe(), "return", None)  # noqa: SLF001
    return object.__getattribute__(self, name)


def count(self: Meter, taken: StepsTaken) -> list[Record]:
    """Count a step; follow it if it is the one."""
    recorded.extend(taken.logged)
    sys.setprofile(note if taken.logged and len(recorded) == TRACED else None)
    return count_one(self, taken)


def emit(self: Session, record: Record) -> None:
    """Emit a record: a checkpoint's walk ends where this begins, a step's where it ends."""
    if record["event"] == "checkpoint":
        sys.setprofile(None)
    emit_one(self, record)
    if record["event"] == "step":
        sys.setprofile(None)


def epoch_steps(work: Work, state: State) -> Iterator[StepsTaken]:
    """Take the steps of an epoch; follow the first batch of the second."""
    if asked == "setting":
        sys.setprofile(None)
    if not modules:
        modules.extend(name for name in sys.modules if name.partition(".")[0] == "samestep")
    if asked == "batch" and state.position.epoch == 1:
        sys.setprofile(note)
    yield from take_steps(work, state)


def lap(self: Phases, phase: str) -> None:
    """Count the time of a phase; that of the forward ends the walk of a batch."""
    if phase == "forward" and asked == "batch":
        sys.setprofile(None)
    lap_one(self, phase)


def save_now(work: Work, state: State, *how: Any) -> None:
    """Save a checkpoint; follow the second, and its thread."""
    if state.position.epoch == 2:
        threading.setprofile(note)
        sys.setprofile(note)
    save(work, state, *how)
    threading.setprofile(None)
    sys.setprofile(None)


def settle(self: Saver) -> None:
    """Wait for a checkpoint, whose record is then emitted; follow that of the second."""
    if walk and self.writing is not None:
        sys.setprofile(note)
    settle_one(self)


if __name__ == "__main__":
    ways = ("record", "batch", "checkpoint", "setting")
    asked = sys.argv[1] if sys.argv[1:] and sys.argv[1] in ways else "record"
    flags = [word for word in sys.argv[1:] if word != asked]
    loop.epoch_steps, Phases.lap = epoch_steps, lap  # type: ignore[method-assign]
    if asked in ("record", "checkpoint"):
        Session.emit = emit  # type: ignore[method-assign]
    if asked == "record":
        Meter.count = count  # type: ignore[method-assign]
    if asked == "checkpoint":
        loop.save_now, Saver.settle = save_now, settle  # type: ignore[assignment,method-assign]
    if asked == "setting":
        flags += ["--batch-size", SETTING[1]]
        Settings.__getattribute__ = read_setting  # type: ignore[assignment, method-assign]
        sys.setprofile(note_setting)
    code = main(["train", "spiral", "--epochs", "2", "--log-every", "5", *flags])
    steps = [here for before, here in zip(["", *walk], walk, strict=False) if here != before]
    print(f"{len({*steps})} files, {len(steps) - 1} hops:", *steps, sep="\n  ")
    if asked == "setting":
        made, merged = calls["Settings.__post_init__"], calls[merge_layers.__qualname__]
        print(f"Settings are made {made} time(s), their layers merged {merged} time(s)")
    print(f"{len(modules)} modules of samestep before the first step")
    raise SystemExit(code)
