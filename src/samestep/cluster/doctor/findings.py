"""A finding is one row of the table; a check is a function of facts that returns one.

A new check is a function, and its name in the list at the end of its module:

    def open_files(machine: Machine) -> Finding:
        '''Each loader worker and each connection takes several file descriptors.'''
        found = f"{machine.open_files:,} at most"
        return graded(found, "Raise it: ulimit -n 65536.", yellow_if=machine.open_files < 1024)
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

Status = Literal["green", "yellow", "red"]
F = TypeVar("F")
Check = Callable[[F], "Finding | None"]
"""Checks facts of one kind; returns None if the check does not apply."""

_BADNESS: tuple[Status, ...] = ("green", "yellow", "red")


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Status
    """green: good. yellow: training works, but could be better. red: it fails, or silently errs."""
    found: str
    advice: str = ""  # what to do about it; empty for green findings
    name: str = ""  # the check's name
    hosts: tuple[str, ...] = ()  # those at fault, where it is some of several

    def __post_init__(self) -> None:
        assert self.advice or self.status == "green", f"{self.name}: no advice for {self.found}"


green, yellow, red = (partial(Finding, status) for status in _BADNESS)


def graded(found: str, advice: str, *, red_if: bool = False, yellow_if: bool = False) -> Finding:
    """Return a finding as bad as its worst condition; a green one drops the advice."""
    return red(found, advice) if red_if else yellow(found, advice) if yellow_if else green(found)


def run_checks(checks: Sequence[Check[F]], facts: F) -> list[Finding]:
    """Run each check and name its finding; a check that raises becomes a yellow finding."""
    findings = []
    for check in checks:
        try:
            finding = check(facts)
        except Exception as error:
            finding = yellow(
                f"this check failed itself: {type(error).__name__}: {error}",
                "This is a bug in samestep: please report it with this line.",
            )
        if finding is not None:
            findings.append(replace(finding, name=check.__name__.replace("_", " ")))
    return findings


def worst(findings: Sequence[Finding]) -> Status:
    """Return the worst status; green if there are no findings."""
    return max((f.status for f in findings), key=_BADNESS.index, default="green")


def merge(tables: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Merge each rank's (label, findings): of each check the worst, the first of equals."""
    rows: dict[str, list[tuple[str, Finding]]] = defaultdict(list)
    for label, findings in tables:
        for finding in findings:
            rows[finding.name].append((label, finding))
    merged = []
    for of_ranks in rows.values():
        status = worst([finding for _, finding in of_ranks])
        concerned = [(label, finding) for label, finding in of_ranks if finding.status == status]
        label, finding = concerned[0]
        if status != "green" and len(concerned) < len(of_ranks):
            more = f" and {len(concerned) - 1} more" if len(concerned) > 1 else ""
            hosts = {label.partition(" on ")[2]: None for label, _ in concerned}
            found_by = f"{label}{more}: {finding.found}"
            finding = replace(finding, found=found_by, hosts=tuple(filter(None, hosts)))
        merged.append(finding)
    return merged


def size_name(num_bytes: int) -> str:
    """Return a number of bytes with its unit: 32 B, 1 KiB, 256 MiB, 23.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
