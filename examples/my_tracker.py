"""A tracker of your own, in three functions: the numbers of a run as rows of a CSV file.

    samestep train spiral --track examples/my_tracker.py

It runs in a process of its own beside the training, which it can neither stop nor slow down.
"""

import csv
from collections.abc import Sequence
from typing import TextIO

from samestep.tracking import Started, TrackedRecord, TrackedResult, TrackedRun


def start(run: TrackedRun) -> Started:
    """Open the file; a resumed run continues in it."""
    path = run.folder / "numbers.csv"
    file = path.open("a", newline="")
    if run.known is None:
        csv.writer(file).writerow(["name", "step or epoch", "value"])
    return Started(client=file, link=str(path))


def record(client: TextIO, entries: Sequence[TrackedRecord]) -> None:
    """Write what is new, in its order."""
    for entry in entries:
        csv.writer(client).writerows([name, entry.at, v] for name, v in entry.values.items())
    client.flush()


def finish(client: TextIO, result: TrackedResult) -> None:
    """Write how the run ended, and close the file."""
    csv.writer(client).writerow(["status", "", result.status])
    client.close()
