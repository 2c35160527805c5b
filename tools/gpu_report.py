"""What the GPU tests showed: a pytest plugin that notes each test as it ends, and their table.

The notes are lines of JSON in the file that SAMESTEP_GPU_REPORT names. A run that is cut off at its
time limit leaves those that it has, and the test that was running is told as one that did not end.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REPORT = "SAMESTEP_GPU_REPORT"
NOT_ENDED = "did not end"
_LONGEST_TEXT = 6_000
_LONGEST_CELL = 160


class Notes:
    """Notes each phase of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file whose tests cannot be found, in the place of its tests."""
        if report.failed:
            text = report.longreprtext
            note = {"test": report.nodeid, "when": "collect", "outcome": "failed", "seconds": 0.0}
            self._write({**note, "message": _innermost(text), "text": text[-_LONGEST_TEXT:]})

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        self._write({"test": nodeid})

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a phase of a test ended."""
        text = report.longreprtext if report.failed else ""
        why = str(report.longrepr[2]) if report.skipped and report.longrepr else ""
        self._write(
            {
                "test": report.nodeid,
                "when": report.when,
                "outcome": report.outcome,
                "seconds": report.duration,
                "message": why.removeprefix("Skipped: ") or _innermost(text),
                "text": text[-_LONGEST_TEXT:],
            }
        )

    def _write(self, note: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def pytest_configure(config: Any) -> None:
    """Note the tests of this run; of several processes of pytest, the first notes for all."""
    if REPORT in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Notes(Path(os.environ[REPORT])))


def _innermost(text: str) -> str:
    """Return the line of a failure that says what was wrong: the first of its last error."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[0] if errors else text.strip().rpartition("\n")[2]


def read_notes(path: Path) -> list[dict[str, Any]]:
    """Return a row for each test in the notes, in the order in which they began."""
    rows: dict[str, dict[str, Any]] = {}
    for note in _notes(path):
        begun = {"outcome": NOT_ENDED, "seconds": 0.0, "message": "", "text": ""}
        row = rows.setdefault(note["test"], {"test": note["test"], **begun})
        if "when" not in note:
            continue
        row["seconds"] = round(row["seconds"] + note["seconds"], 2)
        if note["outcome"] != "passed":
            for key in ("outcome", "message", "text"):
                row[key] = note[key]
        elif note["when"] == "teardown" and row["outcome"] == NOT_ENDED:
            row["outcome"] = "passed"
    return list(rows.values())


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        yield json.loads(line)


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many tests had each outcome."""
    names = ("passed", "failed", "skipped", NOT_ENDED)
    return {name: sum(row["outcome"] == name for row in rows) for name in names}


def table(record: Mapping[str, Any]) -> str:
    """Return the record of a check as Markdown."""
    machine, rows = record["machine"], record["tests"]
    told = ", ".join(f"{number} {name}" for name, number in record["counts"].items())
    dry = ", dry: on the CPU, so it says nothing of a GPU" if record["dry"] else ""
    lines = [
        f"# GPU check{dry}",
        "",
        f"{where(machine)}; {record['when']}. {told}; {record['seconds']:.0f} s"
        + (f", cut off at {record['limit_s']} s" if record["cut_off"] else "")
        + ".",
        "",
        f"`{record['command']}`",
        "",
        "| test | outcome | seconds | message |",
        "|---|---|---:|---|",
    ]
    for row in rows:
        name = row["test"].removeprefix("tests/gpu/")
        message = _cell(row["message"])
        lines.append(f"| {name} | {row['outcome']} | {row['seconds']:.1f} | {message} |")
    return "\n".join(lines) + "\n"


def where(machine: Mapping[str, Any]) -> str:
    """Return what a machine is, in a line."""
    devices = ", ".join(f"{d['name']} ({d['memory_gib']:g} GiB)" for d in machine["devices"])
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    return (
        f"{devices or 'no GPU'}{driver}, {machine['cores']} cores, Python {machine['python']}, "
        f"torch {machine['torch']}"
    )


def _cell(text: str) -> str:
    one_line = " ".join(text.split()).replace("|", "\\|")
    return one_line if len(one_line) <= _LONGEST_CELL else one_line[: _LONGEST_CELL - 1] + "…"
