"""The table for people, the object for programs."""

import math
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from samestep.base.table import Cell, Styled, Table, coloured, text_lines
from samestep.base.words import count, duration, ranks, wrapped
from samestep.prove.verification.evidence import LEFT_OUT, Check
from samestep.prove.verification.harness import Verification
from samestep.prove.verification.rows.one_writer import ONE_WRITER
from samestep.prove.verification.short_trainings import OPTIMIZER_ROW

_MUCH = 0.01
"""A mistake may well be smaller than this, relative to what it changes."""

_STYLES = {
    "same": "green",
    "accepted": "green",
    "note": "yellow",
    "skipped": "dim",
    "different": "red",
}
_HELD = {
    "batchnorm": "BatchNorm statistics",
    "dropout": "torch's random draws",
    "state": "random draws of Python and NumPy",
}


def show(verification: Verification, console: Console) -> None:
    """Print what was run, the table, and one sentence."""
    colour = console.is_terminal and not console.no_color
    console.file.write("\n".join((*_lines(verification, console.width, colour=colour), "")))


def _lines(verification: Verification, width: int, *, colour: bool) -> Iterator[str]:
    yield from text_lines(_summary(verification), width, colour=colour)
    yield ""
    yield from text_lines(_table(verification), width, colour=colour)
    # Rows that say the same are explained together.
    explained: dict[tuple[object, ...], list[Check]] = {}
    for check in verification.checks:
        if check.cause.why:
            explained.setdefault((check.cause, check.status), []).append(check)
    for checks in explained.values():
        check = checks[0]
        where = [f"from step {check.first_step}"] if check.first_step else []
        where += [f"first in {check.first_parameter!r}"] if check.first_parameter else []
        heading = ", ".join(check.name for check in checks)
        if where:
            heading += f": {', '.join(where)}"
        name = check.cause.name or "failure"
        first, *more = wrapped(f"{name}  {heading}", "", width)
        if colour:
            first = first.replace(name, coloured(Styled(name, _STYLES[check.status])), 1)
        yield from ("", first, *more)
        for line in check.cause.why.splitlines():
            yield from wrapped(f"  {line}", "  ", width)
        if check.cause.advice:
            yield from wrapped(f"  → {check.cause.advice}", "    ", width)
    yield ""
    for line in wrapped(_sentence(verification), "", width):
        yield coloured(Styled(line, "green" if verification.same else "red")) if colour else line


def _summary(verification: Verification) -> Table:
    facts, size = verification.facts, verification.facts.size
    shares = f"{count(facts.virtual_ranks, 'virtual rank')} " if facts.virtual_ranks else ""
    ran = (
        f"{size.steps} steps of {count(size.global_batch, 'sample')} (the last of an epoch: "
        f"{size.rest}), {size.num_samples} of {count(facts.num_samples, 'training sample')}, "
        f"{shares}on {ranks(verification.sizes)}, {' and '.join(verification.precisions)}"
    )
    notes = list(verification.notes)
    if facts.inexact:
        notes.append(
            f"float64 is not possible here ({facts.inexact}), so only losses are compared; the "
            "tolerance is how far rounding the weights once moves them."
        )
    rows: list[tuple[Cell, str]] = [(Styled("ran", "bold"), ran)]
    rows += [(Styled("note", "yellow"), note) for note in notes]
    if held := ", ".join(words for kind, words in _HELD.items() if kind in facts.present):
        rows.append((Styled("fixed", "bold"), f"{held}, except in the rows that test them"))
    if facts.virtual_ranks:
        text = "nothing: random draws and BatchNorm are unchanged"
        rows.append((Styled("fixed", "bold"), text))
    return Table(columns=("verified  ", verification.recipe), rows=rows, gap=1, fold=True)


def _table(verification: Verification) -> Table:
    names = ("", "check", "differs", "allowed", "compared")
    # Virtual ranks allow no difference.
    shown = [0, 1, 2, 4] if verification.facts.virtual_ranks else range(5)
    rows: list[tuple[Cell, ...]] = [
        (
            Styled(check.status, _STYLES[check.status]),
            Styled(check.name, "bold"),
            _number(check.difference),
            _number(check.tolerance),
            check.compared,
        )
        for check in verification.checks
    ]
    cut = [[row[n] for n in shown] for row in rows]
    columns = [names[n] for n in shown]
    return Table(columns=columns, rows=cut, gap=1, left=frozenset({"check"}), fold=True)


def as_table(verification: Verification) -> dict[str, Any]:
    """Return everything as JSON has it."""
    facts, size = verification.facts, verification.facts.size
    return {
        "recipe": verification.recipe,
        "same": verification.same,
        "world_sizes": list(verification.sizes),
        "virtual_ranks": facts.virtual_ranks,
        "precisions": list(verification.precisions),
        "steps": size.steps,
        "global_batch_size": size.global_batch,
        "last_batch_size": None if size.drop_last else size.rest,
        "training_samples": size.num_samples,
        "held_still": sorted(facts.present),
        "notes": list(verification.notes),
        "seconds": verification.seconds,
        "checks": [_object(check) for check in verification.checks],
    }


def _object(check: Check) -> dict[str, Any]:
    fields = ("name", "passed", "status", "compared", "tolerance", "difference", "first_step")
    table = {name: getattr(check, name) for name in (*fields, "first_parameter")}
    if check.status == "skipped":
        table["passed"] = None
    # JSON has no infinity: a difference that cannot be measured is null.
    if not math.isfinite(check.difference or 0.0):
        table["difference"] = None
    return table | {"cause": check.cause.name, "why": check.cause.why, "advice": check.cause.advice}


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}" if math.isfinite(value) else "∞"


def _sentence(verification: Verification) -> str:
    checks = verification.checks
    accepted = " and ".join(check.name for check in checks if check.status == "accepted")
    different = [check for check in checks if not check.passed]
    causes = "; ".join(dict.fromkeys(check.cause.name or check.name for check in different))
    if verification.same:
        but = f", but for {accepted}: known and accepted" if accepted else ""
        quick = any(check.compared == LEFT_OUT for check in checks)
        bits = ", to the last bit" if verification.facts.virtual_ranks else ""
        text = f"The same training{bits}{', as far as --quick checks' if quick else ''}{but}."
        allowed = max((c.tolerance or 0.0 for c in checks if c.name == OPTIMIZER_ROW), default=0.0)
        if allowed > _MUCH:
            hides = f"hides differences below {allowed:.1g} after the first update"
            text += f" The optimizer's own rounding {hides}."
    elif {check.name for check in different} == {ONE_WRITER.name}:
        text = f"The same training, but {causes}."
    else:
        text = f"Not the same training: {causes}."
    return f"{text} ({duration(verification.seconds)})"
