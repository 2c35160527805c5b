"""How the latest attempt of a run ended, or that it has not: one judgement for all readers."""

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from samestep.run.directory import is_written
from samestep.run.heartbeat import FILE as STEPPED

Ending = Literal["running", "completed", "stopped", "failed", "killed"]

_AFTER_TRAINING = ("evaluation", "baselines", "picture")
_FRESH_S = 120.0
"""A run of another machine that has written for less long ago is taken to be running."""


def how_it_ended(
    path: Path, last: Mapping[str, Any], result: Mapping[str, Any]
) -> tuple[Ending, str]:
    """Return how the latest attempt ended, and the reason that was recorded; "" if there is none.

    Args:
        path: the run's directory.
        last: its last record; empty if there is none.
        result: what is in result.json. An earlier attempt's does not speak for a later one.
    """
    was_opened = (path / "run.lock").is_file()  # to open what is no file may block
    if was_opened and is_written(path):
        return "running", ""
    reason = str(last.get("reason") or "")
    if last.get("event") == "stop":
        if result.get("steps", last.get("step")) == last.get("step"):
            match result.get("status"):
                case "completed" | "stopped" | "failed" as status:
                    return status, reason
        return _by_reason(reason), reason
    if last.get("event") in _AFTER_TRAINING and result.get("steps") == last.get("step"):
        status = result.get("status")  # written before pictures, and a kill came after it
        if status == "completed":
            return "completed", str(result.get("reason") or "")
    if result.get("status") == "failed":
        return "failed", str(result.get("reason") or "")
    return ("running" if was_opened and _lives_elsewhere(path) else "killed"), ""


def _by_reason(reason: str) -> Ending:
    """Return what the reason of a `stop` record says, where a kill came before result.json."""
    if reason.startswith("failed"):
        return "failed"
    return "stopped" if reason.startswith("SIG") else "completed"


def _lives_elsewhere(path: Path) -> bool:
    """Whether another machine opened the run and has written lately.

    Some file systems do not pass locks on to other machines.
    """
    try:
        owner = (path / "run.lock").read_text().rpartition(" on ")[2].strip()
    except (OSError, UnicodeDecodeError):
        return False
    if not owner or owner == socket.gethostname():
        return False
    return any(_age_s(path / name) < _FRESH_S for name in ("events.jsonl", STEPPED))


def _age_s(file: Path) -> float:
    """Return the seconds since a file was written; infinity if there is none."""
    try:
        return time.time() - file.stat().st_mtime
    except OSError:
        return float("inf")
