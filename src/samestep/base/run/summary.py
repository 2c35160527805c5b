"""A run in short: `summary.json`, which the process that writes the run keeps.

It is written when an attempt begins and ends, and in between when something has happened, within a
fixed share of the time. So it lags behind events.jsonl, usually by a few seconds, and `catch_up`
adds the newest records. `read_growing` makes the same from all records.
"""

import contextlib
import json
import math
import os
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from samestep.base.errors import UserError
from samestep.base.run.files import open_regular, read_object, write_text
from samestep.base.run.index import read_index
from samestep.base.run.records import RUN_FORMAT, Record, RecordFile, parse_lines, samples_per_step

SUMMARY = "summary.json"
State = Literal["running", "completed", "stopped", "failed", "killed", "damaged"]
Mode = Literal["min", "max"]

_MOST_LOSSES, _END_BYTES = 64, 1 << 16
_FEW_EPOCHS, _MANY_STEPS = 12, 2000
"""With fewer epochs and more recorded steps, the curve is drawn from steps."""
_AT_ONCE, _SOON = ("start", "resume", "regroup", "stop"), ("epoch", "evaluation", "checkpoint")
_EVERY_S = 5.0
"""Where only steps are recorded, the file is written this often."""
_SHARE = 5e-4
"""Between start and stop, writing takes at most this fraction of the time."""


class Summary(msgspec.Struct, kw_only=True):
    """What summary.json holds. Unknown fields are null or empty."""

    format: int = RUN_FORMAT
    """The format of the run directory."""
    state: State
    """In the file, `running` until an end is recorded: only the run's lock tells a killed one."""
    reason: str = ""
    recipe: str = ""
    started: float | None = None
    """When it began, in seconds since 1970."""
    starts: int = 0
    """Attempts so far."""
    world_size: int | None = None
    """Ranks of the latest attempt."""
    steps: int = 0
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    epochs: int = 0
    """Epochs that have ended."""
    total_epochs: int | None = None
    epoch: int = 1
    """The epoch of the newest step, from 1."""
    seconds: float | None = None
    """Training time, without evaluations and checkpoints."""
    samples_per_step: float = 0.0
    """On average; 0 if it is unknown."""
    step_s: float | None = None
    """Seconds per step at the latest speed."""
    loss: float | None = None
    """Of the newest recorded step."""
    checkpoint_step: int | None = None
    """The step of the newest checkpoint."""
    metric: str | None = None
    mode: Mode | None = None
    """Whether a lower or a higher value is better."""
    value: float | None = None
    """Its best."""
    losses: list[float | None] = []
    """At most 64 training losses, evenly spread, the newest last: of epochs, or of steps where no
    epoch has ended or few epochs have many steps; null for NaN and infinity."""

    def take_step(self, record: Record) -> None:
        """Take what the record of a step says, but for its number."""
        rate, self.epoch = record.get("samples_per_s"), record.get("epoch") or 1
        self.loss = finite_number(record.get("loss"))
        self.seconds = record.get("seconds", self.seconds)
        self.step_s = self.samples_per_step / rate if rate and self.samples_per_step else None


def check_ours(run: Path) -> None:
    """Refuse to overwrite a summary.json that something else has written."""
    content = read_object(run / SUMMARY)
    if content and not {"format", "state"} <= content.keys():
        raise UserError(
            f"{run / SUMMARY} was not written by samestep, which keeps the state of a run in a "
            "file of that name. Rename it, and start again."
        )


class GrowingSummary:
    """The summary of a run, by its records so far."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.summary = Summary(state="running")
        self._of_epochs, self._of_steps = array("d"), array("d")
        """Losses; NaN where one is not finite."""
        self._plan: Record = {}
        """The latest `start` record."""
        self._validations: list[Record] = []

    def add(self, record: Record) -> None:
        """Take the next record of the run."""
        summary, event = self.summary, record["event"]
        if event == "start":
            self._begin(record)
        elif event in ("step", "epoch"):
            summary.state, summary.reason, summary.epoch = "running", "", record.get("epoch") or 1
            if event == "step":
                summary.take_step(record)
                self._of_steps.append(math.nan if summary.loss is None else summary.loss)
            else:
                self._end_epoch(record)
        elif event == "evaluation" and record.get("split") == "validation":
            self._validations.append(record)
        elif event == "checkpoint":
            summary.checkpoint_step = record["step"]
        elif event == "regroup":
            summary.world_size = record["world_size"]
        elif event == "stop" and summary.state == "running":
            summary.reason = str(record.get("reason") or "")
            summary.state = "stopped" if summary.reason.startswith("SIG") else "completed"
            summary.state = "failed" if summary.reason.startswith("failed") else summary.state
        if isinstance(step := record.get("step"), int):
            summary.steps = max(summary.steps, step)

    def _begin(self, plan: Record) -> None:
        summary = self.summary
        summary.state, summary.reason = "running", ""
        summary.format, summary.recipe = plan.get("format", RUN_FORMAT), plan.get("recipe", "")
        summary.started = summary.started if summary.starts else finite_number(plan.get("time"))
        summary.starts += 1
        summary.world_size, summary.total_steps = plan.get("world_size"), plan.get("total_steps")
        summary.total_epochs = plan.get("epochs")
        summary.steps_per_epoch = plan.get("steps_per_epoch")
        self._plan = plan
        summary.samples_per_step = 0.0
        if "global_batch_size" in plan:  # Lightning's logger does not know it
            summary.samples_per_step = samples_per_step(plan)

    def _end_epoch(self, record: Record) -> None:
        summary, loss = self.summary, finite_number(record["loss"])
        summary.epochs = record["epoch"]
        self._of_epochs.append(math.nan if loss is None else loss)
        if not self._of_steps:
            summary.seconds = (summary.seconds or 0.0) + record["train_seconds"]

    def complete(self) -> Summary:
        """Return the summary with losses and best; UserError if the index is damaged."""
        summary, epochs, steps = self.summary, self._of_epochs, self._of_steps
        curve = epochs if len(epochs) >= _FEW_EPOCHS or len(steps) <= _MANY_STEPS else steps
        curve = curve or steps  # no epoch has ended
        summary.losses = [
            finite_number(loss) for loss in curve[:: -(-len(curve) // _MOST_LOSSES) or 1]
        ]
        if curve:
            summary.losses[-1] = finite_number(curve[-1])
        index = read_index(self._run / "checkpoints")
        metric = self._plan.get("monitor") or (index.monitor if index.best else None)
        if metric is None:  # a loop of one's own that monitors nothing
            metric = next((m for m in ("accuracy", "loss") if self._validated(m)), None)
        if metric is None:
            return summary
        falls = metric == "loss" or metric in (self._plan.get("lower_is_better") or ())
        is_of_index = index.monitor == metric and index.checkpoints
        falls = index.mode == "min" if is_of_index else falls
        summary.metric, summary.mode = metric, "min" if falls else "max"
        summary.value = (min if falls else max)(self._validated(metric), default=None)
        if is_of_index and index.best:
            summary.value = index.best.metric
        return summary

    def _validated(self, metric: str) -> list[float]:
        values = (finite_number(record.get(metric)) for record in self._validations)
        return [value for value in values if value is not None]


def first_start(path: Path) -> Record:
    """Return the `start` record in the first line of a run's records; {} if there is none."""
    try:
        with open_regular(path / "events.jsonl") as file:
            record = next(iter(parse_lines(file.readline())), None)
    except OSError:
        return {}
    return record if record is not None and record["event"] == "start" else {}


def read_growing(run: Path) -> tuple[GrowingSummary, RecordFile]:
    """Return the summary of a run by its records, and their file, which says what is damaged.

    Without a file there are no records; another OSError is raised, and UserError if the run is of
    a newer version.
    """
    from samestep.base.run.step_rows import CompactRecords  # noqa: PLC0415 - of a resumed run

    growing, file = GrowingSummary(run), RecordFile(run / "events.jsonl", checked=True)
    for record in CompactRecords(file, run):
        growing.add(record)
    return growing, file


def catch_up(summary: Summary, run: Path) -> None:
    """Take the newest records of a run, in the last 64 KiB, into a summary that lags behind."""
    text = b""
    with contextlib.suppress(OSError), open_regular(run / "events.jsonl") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        text = file.read()
    newest: list[Record] = []
    for record in filter(None, parse_lines(text, checked=True)):
        if record["event"] in ("start", "resume"):  # the summary was written then
            newest.clear()
        newest.append(record)
    for record in newest:
        event = record["event"]
        if event in ("step", "epoch"):
            summary.steps = record["step"]
        if event == "step":
            summary.take_step(record)
        elif event == "epoch":
            summary.epochs = summary.epoch = record["epoch"]
        elif event == "checkpoint":
            summary.checkpoint_step = record["step"]


class SummaryFile:
    """The summary.json of a run that this process writes."""

    def __init__(self, run: Path) -> None:
        self._run, self._began_at = run, time.perf_counter()
        self._growing: GrowingSummary | None = None
        self._is_due = self._has_result = False
        self._written_at = self._spent_s = 0.0

    def add(self, record: Record) -> None:
        """Take a record that events.jsonl has now, and write the file if that is due."""
        event, now = record["event"], time.perf_counter()
        if event == "start" and record["resumed"]:
            return  # `resume` follows, and says what of the attempt before is superseded
        if self._growing is None and event != "start":  # a resumed run
            self._growing, _ = read_growing(self._run)
        else:
            self._growing = self._growing or GrowingSummary(self._run)
            self._growing.add(record)
        self._is_due |= event in _SOON or now - self._written_at >= _EVERY_S
        if event in _AT_ONCE:
            if not self._has_result:
                self._write(self._growing)
        elif self._is_due and self._spent_s <= _SHARE * (now - self._began_at):
            self._write(self._growing)
            self._spent_s += time.perf_counter() - now

    def end(self, result: Mapping[str, Any]) -> None:
        """Take what result.json says of how the run ended, and write the file."""
        growing = self._growing = self._growing or read_growing(self._run)[0]
        summary = growing.summary
        self._has_result = True
        summary.state, summary.reason = result["status"], str(result.get("reason", ""))
        summary.steps, summary.epochs = (
            result.get(n, getattr(summary, n)) for n in ("steps", "epochs")
        )
        summary.seconds = result.get("training_seconds", summary.seconds)
        self._write(growing, sync=True)

    def _write(self, growing: GrowingSummary, *, sync: bool = False) -> None:
        self._is_due = False
        self._written_at = time.perf_counter()
        with contextlib.suppress(UserError):  # the records have it all
            # Not by msgspec: a path's bytes need not be UTF-8.
            text = json.dumps(msgspec.structs.asdict(growing.complete())) + "\n"
            write_text(self._run / SUMMARY, text, sync=sync)


def finite_number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e300 else None  # type: ignore[arg-type]
