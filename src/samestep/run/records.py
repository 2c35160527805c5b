"""The records of a run: one JSON object per line of events.jsonl."""

import json
from collections.abc import Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import Any

from samestep.errors import UserError

Record = dict[str, Any]
"""One line of events.jsonl: `event` first, then its numbers."""

RUN_FORMAT = 1
"""The format of a run directory, in its `start` records; a run whose records do not say has 1."""

NOT_METRICS = {
    *("event", "split", "epoch", "step", "samples", "seconds"),
    *("checkpoint", "problems", "per_class", "confusion"),
}
"""What an `evaluation` record has beside its metrics."""


def check_format(start: Record, path: Path) -> None:
    """Check that this samestep can read what a `start` record begins.

    Raises:
        UserError: a newer samestep has written the run.
    """
    found = start.get("format", RUN_FORMAT)
    if isinstance(found, int) and found > RUN_FORMAT:
        raise UserError(
            f"{path} has run format {found}, and this samestep reads formats up to {RUN_FORMAT}. "
            "Install the samestep that wrote it, or a newer one: its versions are in "
            "environment.json."
        )


def read_records(path: str | PathLike[str], *, superseded: bool = False) -> Iterator[Record]:
    """Yield the records of a run as one uninterrupted run would have written them.

    A resumed run starts again from a checkpoint, so the records that an earlier attempt wrote for
    later steps are superseded: they are left out, though they stay in the file, unless they are
    asked for.

    Raises:
        UserError: there is no run here, a line of it is damaged, or its format is newer than this
            samestep.
    """
    path = Path(path)
    file = path / "events.jsonl"
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} holds no run: {file} cannot be read.") from error
    # What follows the last newline was torn off by a kill.
    whole = enumerate(lines[:-1], start=1)
    records = (_record(line, number, file) for number, line in whole)
    yield from records if superseded else as_uninterrupted(records, path)


def _record(line: bytes, number: int, file: Path) -> Record:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or "event" not in record:
        raise UserError(
            f"{file} is damaged in line {number}: it holds no record. Put the file back from a "
            f"backup, or delete that line: sed -i {number}d {file}"
        )
    return record


def first_start(path: Path) -> Record:
    """Return the `start` record in the first line of a run's records; {} if there is none."""
    try:
        with (path / "events.jsonl").open("rb") as file:
            record = json.loads(file.readline())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and record.get("event") == "start" else {}


def as_uninterrupted(written: Iterable[Record], path: Path) -> list[Record]:
    """Leave out of a run's records those that a later attempt has superseded.

    Raises:
        UserError: their format is newer than this samestep.
    """
    records: list[Record] = []
    for record in written:
        if record["event"] == "start":
            check_format(record, path)
            if not record["resumed"]:
                records = []  # killed before its first checkpoint, and begun anew
        if record["event"] == "resume":
            records = _up_to_checkpoint(records, record)
        records.append(record)
    return records


def _up_to_checkpoint(records: list[Record], resume: Record) -> list[Record]:
    """Leave out what a resumed run does again: all that came after its checkpoint.

    The end of an epoch has the same step as a checkpoint that a signal caused right before it, so
    the step alone does not tell. Where a kill came between the checkpoint and its record, nothing
    came after it.
    """
    kept = [r for r in records if r.get("step", 0) <= resume["step"]]
    path = f"checkpoints/{resume['checkpoint']}"
    saved = [i for i, r in enumerate(kept) if r["event"] == "checkpoint" and r["path"] == path]
    after = saved[-1] + 1 if saved else len(kept)
    again = ("step", "epoch", "evaluation", "baselines", "picture", "checkpoint")
    return kept[:after] + [r for r in kept[after:] if r["event"] not in again]
