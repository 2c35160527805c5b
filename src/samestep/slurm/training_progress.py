"""How far a run has come, read from its directory."""

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError
from samestep.run.directory import STEPPED
from samestep.run.files import read_object
from samestep.run.records import RecordFile, as_uninterrupted


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The training state of a run."""

    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    checkpoint_step: int | None = None
    eta_s: float | None = None  # seconds of training that are left at the latest speed
    starts: int = 0
    status: str = ""  # from result.json: completed, stopped or failed; empty while it runs
    why: str = ""
    quiet_s: float | None = None
    """Seconds since the last step or record, of a job that runs; None for any other."""
    damage: str = ""  # why nothing can be told, where the records cannot be read


def read_progress(run: Path) -> Progress | None:
    """Return a run's progress, or None if it has not begun."""
    result = read_object(run / "result.json")
    status, why = result.get("status", ""), str(result.get("reason", ""))
    events = RecordFile(run / "events.jsonl", checked=True)
    try:
        records = as_uninterrupted(events.read_all(), run)
    except (OSError, UserError) as error:
        return Progress(status=status, why=why, damage=f"unknown: {error}".split(". ")[0])
    if events.damaged:
        damage = f"unknown: line {events.damaged[0]} of {run / 'events.jsonl'} is damaged"
        return Progress(status=status, why=why, damage=damage)
    starts, steps, saved = (
        [r for r in records if r["event"] == event] for event in ("start", "step", "checkpoint")
    )
    if not starts:
        return Progress(status=status, why=why) if result and not events.num_read else None
    plan, eta_s = starts[-1], None
    moved = [r for r in records if r["event"] in ("step", "epoch", "checkpoint", "stop")]
    step = max((r["step"] for r in moved if isinstance(r.get("step"), int)), default=0)
    total = plan.get("total_steps") or 0  # nobody knows when a stream ends
    epochs = plan.get("epochs") or 0
    epoch = max((r.get("epoch") or 1 for r in moved), default=1)  # for a stream
    if plan["steps_per_epoch"] is not None:
        epoch = min(step // plan["steps_per_epoch"] + 1, epochs or sys.maxsize)
    if total and steps and steps[-1].get("samples_per_s"):
        eta_s = (total - step) * plan["global_batch_size"] / steps[-1]["samples_per_s"]
    # The result may be of an earlier start: it is the latest's after a stop, or a kill without one.
    is_latest = records[-1]["event"] == "stop" or (
        status == "failed"
        and (run / "result.json").stat().st_mtime > (run / "events.jsonl").stat().st_mtime
    )
    return Progress(
        step=step,
        total_steps=total,
        epoch=epoch,
        epochs=epochs,
        loss=steps[-1]["loss"] if steps else None,
        checkpoint_step=saved[-1]["step"] if saved else None,
        eta_s=eta_s,
        starts=len(starts),
        status=status if is_latest else "",
        why=why,
    )


def seconds_since_sign(run: Path) -> float | None:
    """Return how long ago a run last took a step or wrote a record; None if it never did."""
    times = []
    for name in (STEPPED, "events.jsonl"):
        with contextlib.suppress(OSError):
            times.append((run / name).stat().st_mtime)
    return max(0.0, time.time() - max(times)) if times else None
