"""A finding is one row of the table; a check is a function of facts that returns one.

A new check is a function, and its name in the list at the end of its module:

    def open_files(machine: Machine) -> Finding:
        '''Each loader worker and each connection takes several file descriptors.'''
        found = f"{machine.open_files:,} at most"
        return graded(found, "Raise it: ulimit -n 65536.", yellow_if=machine.open_files < 1024)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

Status = Literal["green", "yellow", "red"]
F = TypeVar("F")
Check = Callable[[F], "Finding | None"]
"""Looks at facts of one kind; None says that there is nothing to look at here."""

_BADNESS = {"green": 0, "yellow": 1, "red": 2}


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    status: Status
    found: str
    """What is so, with its unit."""
    advice: str = ""
    """What to do about it; green findings need none."""
    name: str = ""
    """The check's own, filled in by `run_checks`."""

    def __post_init__(self) -> None:
        """Refuse a problem without advice: it helps nobody."""
        assert self.advice or self.status == "green", f"{self.name}: no advice for {self.found}"


def green(found: str) -> Finding:
    """Return the finding that all is well."""
    return Finding("green", found)


def yellow(found: str, advice: str) -> Finding:
    """Return the finding that training will work, but not as well as it could."""
    return Finding("yellow", found, advice)


def red(found: str, advice: str) -> Finding:
    """Return the finding that training will fail, or go wrong unseen."""
    return Finding("red", found, advice)


def graded(found: str, advice: str, *, red_if: bool = False, yellow_if: bool = False) -> Finding:
    """Return the finding that the conditions make; the advice is dropped where all is well."""
    return red(found, advice) if red_if else yellow(found, advice) if yellow_if else green(found)


def named(name: str, finding: Finding) -> Finding:
    """Return a finding under a name."""
    return replace(finding, name=name)


def run_checks(checks: Sequence[Check[F]], facts: F) -> list[Finding]:
    """Call each check and name its finding; a check that breaks is a finding itself."""
    findings = []
    for check in checks:
        try:
            finding = check(facts)
        except Exception as error:
            finding = yellow(
                f"this check broke: {type(error).__name__}: {error}",
                "The fault is in samestep, not here: please report it with this line.",
            )
        if finding is not None:
            findings.append(named(getattr(check, "__name__", "check").replace("_", " "), finding))
    return findings


def worst(findings: Sequence[Finding]) -> Status:
    """Return the worst status; green if there is none."""
    return max((f.status for f in findings), key=_BADNESS.__getitem__, default="green")


def merge(tables: Sequence[tuple[str, Sequence[Finding]]]) -> list[Finding]:
    """Make one table of each rank's (who, findings): of each check the worst, with who has it.

    Where all is well the first rank's words are shown.
    """
    rows: dict[str, list[tuple[str, Finding]]] = {}
    for who, findings in tables:
        for finding in findings:
            rows.setdefault(finding.name, []).append((who, finding))
    merged = []
    for found in rows.values():
        status = worst([finding for _, finding in found])
        concerned = [(who, finding) for who, finding in found if finding.status == status]
        who, finding = concerned[0]
        if status != "green" and len(concerned) < len(found):
            more = f" and {len(concerned) - 1} more" if len(concerned) > 1 else ""
            finding = replace(finding, found=f"{who}{more}: {finding.found}")
        merged.append(finding)
    return merged


def size_name(num_bytes: int) -> str:
    """Return a number of bytes with its unit: 32 B, 1 KiB, 256 MiB, 23.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
