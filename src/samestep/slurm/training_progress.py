"""How far a run has come, read from its directory."""

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.run.directory import STEPPED
from samestep.run.files import read_object
from samestep.run.records import Record, read_records


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The training state of a run."""

    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    checkpoint_step: int | None = None
    eta_s: float | None = None
    """Seconds of training that are left at the latest speed."""
    starts: int = 0
    status: str = ""
    """From result.json: completed, stopped or failed; empty while it runs."""
    why: str = ""
    quiet_s: float | None = None
    """Seconds since the last step or record, of a job that runs; None for any other."""
    damage: str = ""
    """Why nothing can be told, where the records cannot be read."""


def read_progress(run: Path) -> Progress | None:
    """Return a run's progress, or None if it has not begun."""
    result = read_object(run / "result.json")
    ended = Progress(status=result.get("status", ""), why=result.get("reason", ""))
    events = run / "events.jsonl"
    if not events.is_file():
        return ended if result else None
    try:
        return _progress(run, list(read_records(run)), result)
    except UserError as error:
        return replace(ended, damage=f"unknown: {error}".split(". ")[0])
    except (AttributeError, LookupError, TypeError, ValueError):  # no record that a run writes
        return replace(ended, damage=f"unknown: a line inside {events} is damaged")


def seconds_since_sign(run: Path) -> float | None:
    """Return how long ago a run last took a step or wrote a record; None if it never did."""
    times = []
    for name in (STEPPED, "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None


def _progress(run: Path, records: list[Record], result: dict[str, Any]) -> Progress | None:
    starts, steps, saved = (
        [r for r in records if r["event"] == event] for event in ("start", "step", "checkpoint")
    )
    if not starts:
        return None
    plan = starts[-1]
    moved = [r for r in records if r["event"] in ("step", "epoch", "checkpoint", "stop")]
    step = max((r["step"] for r in moved), default=0)
    eta = None
    total = plan["total_steps"] or 0  # nobody knows when a stream ends
    if total and steps and steps[-1].get("samples_per_s"):
        left = total - step
        eta = left * plan["global_batch_size"] / steps[-1]["samples_per_s"]
    return Progress(
        step=step,
        total_steps=total,
        epoch=_epoch(plan, step, moved),
        epochs=plan["epochs"] or 0,
        loss=steps[-1]["loss"] if steps else None,
        checkpoint_step=saved[-1]["step"] if saved else None,
        eta_s=eta,
        starts=len(starts),
        # What an earlier start left does not speak for one that runs now.
        status=result.get("status", "") if _is_last(run, records, result) else "",
        why=str(result.get("reason", "")),
    )


def _epoch(plan: Record, step: int, moved: list[Record]) -> int:
    """Return the epoch that runs, counted from 1; of a stream the records tell it."""
    if plan["steps_per_epoch"] is not None:
        return int(min(step // plan["steps_per_epoch"] + 1, plan["epochs"]))
    return max((int(r["epoch"]) for r in moved if "epoch" in r), default=1)


def _is_last(run: Path, records: list[Record], result: dict[str, Any]) -> bool:
    """Whether the result speaks of the latest start: after a stop, or after a kill without one."""
    if records[-1]["event"] == "stop":
        return True
    written = (run / "result.json").stat().st_mtime if result.get("status") == "failed" else 0.0
    return written > (run / "events.jsonl").stat().st_mtime
