"""The records of a run as a tracker takes them, read from events.jsonl as it grows.

A resumed run repeats the steps after its checkpoint, bit for bit. Trackers only go forward, so of
every series each step counts once: as it was first written. `metrics`, whose names are the user's
own, are as many series as there are sets of names.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from samestep.base.run.pictures import read_png
from samestep.base.run.records import SYSTEM, Record, RecordFile, check_format
from samestep.base.words import flatten
from samestep.show.reporting.plot import confusion_png, has_confusion
from samestep.show.tracking import Picture, Scalar, TrackedRecord

_EVENTS = ("step", "epoch", "validation", "test", "train", "checkpoint", "metrics", "picture")
_NAME = re.compile(r"[\w-]{1,60}")
_NO_VALUES = {"event", "split", "step", "epoch", "time"}


def scalars(table: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return settings or facts for a tracker: flat, with lists as text."""
    flat = flatten(table, by=".")
    return {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in flat.items()
        if value is not None
    }


def _plain(table: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in table.items() if type(v) in (int, float)}


def _numbers(record: Record, prefix: str) -> dict[str, float]:
    return _plain(flatten({k: v for k, v in record.items() if k not in _NO_VALUES}, prefix))


class RecordStream:
    """The records of a run for a tracker, from the beginning, as they are written."""

    def __init__(self, run: Path, *, with_checkpoints: bool = False) -> None:
        self._run, self._with_checkpoints = run, with_checkpoints
        self.events, self.system = RecordFile(run / "events.jsonl"), RecordFile(run / SYSTEM)
        self._reached: dict[tuple[str, ...], int] = {}
        self._clock = _Clock()
        self.last: Record = {}
        """The newest record."""

    @property
    def step(self) -> int:
        """The latest step."""
        return max(self._reached.values(), default=0)

    def read(self, after: int = 0, system_after: int = 0) -> Iterator[list[TrackedRecord]]:
        """Yield the new records in chunks, without the lines that a tracker has."""
        for chunk in self.events.read():
            entries = [entry for line, record in chunk for entry in self._read(line, record)]
            yield [entry for entry in entries if entry.line >= after]
        for chunk in self.system.read():
            yield [
                TrackedRecord(
                    event="system",
                    axis="step",
                    step=record.get("step", 0),
                    epoch=None,
                    time=record.get("time", 0.0),
                    values=_numbers(record, "system/"),
                    line=-1,
                )
                for line, record in chunk
                if line >= system_after
            ]

    def _read(self, line: int, record: Record) -> list[TrackedRecord]:
        with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
            entry = self._entry(line, record)
            if entry is None or entry.event != "test" or not has_confusion(record):
                return [entry] if entry else []
            draw = partial(confusion_png, list(record["per_class"]), record["confusion"])
            shown = Picture(name="confusion", title="Confusion matrix", png=draw)
            return [entry, replace(entry, event="picture", values={}, picture=shown)]
        self.events.damaged.append(line + 1)  # JSON, but no record of ours
        return []

    def _entry(self, line: int, record: Record) -> TrackedRecord | None:
        check_format(record, self._run)
        self.last = record
        now = self._clock.at(record)
        event: Any = record["event"] if record["event"] != "evaluation" else record["split"]
        names = sorted(record["values"]) if event == "metrics" else ()
        picture = self._picture(record) if event == "picture" else None
        if event == "picture" and picture is None:
            return None
        names = [picture.name] if picture is not None else names
        if event not in _EVENTS or record["step"] <= self._reached.get((event, *names), -1):
            return None
        self._reached[event, *names] = record["step"]
        if event == "checkpoint" and not self._with_checkpoints:
            return None
        prefix = "train/" if event == "step" else f"{event}/"
        if picture is not None:
            record = {name: record.get(name) for name in ("event", "step", "epoch")}
        if event == "epoch":
            record = {**record, "metrics": None, **record.get("metrics", {})}
        return TrackedRecord(
            event=event,
            axis="epoch" if event == "epoch" else "step",
            step=record["step"],
            epoch=record.get("epoch"),
            time=now,
            values=_plain(record["values"]) if event == "metrics" else _numbers(record, prefix),
            line=line,
            file=self._run / record["path"] if event == "checkpoint" else None,
            picture=picture,
        )

    def _picture(self, record: Record) -> Picture | None:
        """Return the picture of a record; None without an image."""
        path = record.get("path")
        if path is None:
            return None
        name, png = record["name"], partial(read_png, self._run, path)
        file = Path(os.path.realpath(self._run / path))
        if not file.is_relative_to(os.path.realpath(self._run)) or not _NAME.fullmatch(name):
            raise ValueError(path)
        return Picture(name=name, title=str(record.get("title", name)), png=png)


class _Clock:
    """Estimate when a record was written: `seconds` counts only training steps."""

    def __init__(self) -> None:
        self._started = self._origin = self._now = 0.0
        self._marks: list[tuple[int, float]] = []

    def at(self, record: Record) -> float:
        event = record.get("event")
        if event == "start":
            self._started = self._origin = record.get("time", 0.0)
            if not record.get("resumed"):
                self._marks = []
        if event == "resume":
            while self._marks and self._marks[-1][0] > record["step"]:
                self._marks.pop()
            self._origin = self._started - (self._marks[-1][1] if self._marks else 0.0)
        seconds = record.get("seconds")
        if event == "step" and seconds is not None:
            self._marks.append((record["step"], seconds))
            self._now = max(self._now, self._origin + seconds)
        if event == "metrics":
            self._now = max(self._now, record["time"])
        self._now = max(self._now, self._started)
        return self._now
