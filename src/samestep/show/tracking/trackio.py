"""Trackio: `--track trackio`. Its files are in the run, or in the folder that TRACKIO_DIR names."""

import os
from collections.abc import Sequence
from typing import Any

from samestep.show.tracking import Started, TrackedRecord, TrackedResult, TrackedRun

COUNTS_AT_END = True
"""Its client writes in a thread; only the end says that all is on disk."""


def start(run: TrackedRun) -> Started:
    """Open the run by its name, which has a part of our id: Trackio knows a run by it."""
    os.environ.setdefault("TRACKIO_DIR", str(run.folder))
    import trackio  # noqa: PLC0415 - it reads the variable as it is imported
    from trackio.sqlite_storage import SQLiteStorage  # noqa: PLC0415

    name = f"{run.name}-{run.id[:6]}"
    facts = {f"facts.{key}": value for key, value in run.facts.items()}
    about = {**run.settings, **facts, "tags": ", ".join(run.tags)}
    quiet: Any = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    client = trackio.init(run.project, name, config=about, resume="allow", **quiet)
    there = SQLiteStorage.get_logs(run.project, name) if run.known else []
    lines = 1 + max((int(row.get("line", -1)) for row in there), default=-1)
    return Started(client=client, run=name, lines=lines)


def record(client: Any, entries: Sequence[TrackedRecord]) -> None:
    """Log a row an entry, with the number of its line in events.jsonl."""
    for entry in entries:
        place = {"line": entry.line} if entry.line >= 0 else {}
        if entry.epoch is not None:
            place["epoch"] = entry.epoch
        if entry.picture is not None:
            if (image := entry.picture.image()) is not None:
                import trackio  # noqa: PLC0415 - as above

                shown = trackio.Image(image, caption=entry.picture.title)
                client.log({f"pictures/{entry.picture.name}": shown, **place}, step=entry.step)
        elif entry.values:
            client.log({**entry.values, **place}, step=entry.step)


def finish(client: Any, result: TrackedResult) -> None:
    """Log the result as a last row, and wait until all is on disk."""
    values = {f"result/{key}": v for key, v in result.values.items() if not isinstance(v, str)}
    client.log({**values, "result/status": result.status})
    client.finish()
