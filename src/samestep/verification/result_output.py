"""The table for people, the object for programs."""

import json
import math
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samestep.screen.words import count, ranks
from samestep.verification.evidence import Check
from samestep.verification.in_parent import Verification
from samestep.verification.rows import one_writer

_COLOURS = {
    "same": "green",
    "accepted": "green",
    "note": "yellow",
    "skipped": "dim",
    "different": "bold red",
}
_INDENT = 11


def show(found: Verification, console: Console) -> None:
    """Print what was run, the table, and one sentence."""
    facts, size = found.facts, found.facts.size
    ran = (
        f"{size.steps} steps of {count(size.global_batch, 'sample')} (the last of an epoch: "
        f"{size.rest}), {size.num_samples} of {count(facts.num_samples, 'training sample')}, "
        f"on {ranks(found.sizes)}, {' and '.join(found.precisions)}"
    )
    console.print(Text(f"verified   {found.recipe}", style="bold"))
    console.print(_block("ran", ran))
    notes = list(found.notes)
    if facts.inexact:
        notes.append(
            f"float64 is not possible here ({facts.inexact}), so losses alone "
            "decide, and rounding hides more."
        )
    for note in notes:
        console.print(_block("note", note, "yellow"))
    if facts.present:
        console.print(_block("held still", held_words(facts.present)))
    console.print()
    console.print(_table(found.checks))
    for checks in _by_cause(found.checks):
        console.print()
        _explain(checks, console)
    console.print()
    console.print(_sentence(found))


def held_words(present: frozenset[str]) -> str:
    """Say what is held still where ranks are compared."""
    words = {
        "batchnorm": "BatchNorm frozen",
        "dropout": "draws from torch constant",
        "state": "draws from Python and NumPy alike",
    }
    named = ", ".join(words[kind] for kind in words if kind in present)
    return f"{named}, except in the rows of their names"


def as_json(found: Verification) -> str:
    """Return everything as one JSON object."""
    facts, size = found.facts, found.facts.size
    table = {
        "recipe": found.recipe,
        "same": found.same,
        "world_sizes": list(found.sizes),
        "precisions": list(found.precisions),
        "steps": size.steps,
        "global_batch_size": size.global_batch,
        "last_batch_size": None if size.drop_last else size.rest,
        "training_samples": size.num_samples,
        "held_still": sorted(facts.present),
        "notes": list(found.notes),
        "seconds": found.seconds,
        "checks": [_object(check) for check in found.checks],
    }
    return json.dumps(table, indent=2)


def _object(check: Check) -> dict[str, Any]:
    largest = check.difference
    return {
        "name": check.name,
        "passed": check.passed,
        "status": check.status,
        "compared": check.compared,
        "tolerance": check.tolerance,
        # JSON has no infinity: a difference that cannot be measured is null.
        "difference": largest if largest is None or math.isfinite(largest) else None,
        "first_step": check.first_step,
        "first_parameter": check.first_parameter,
        "cause": check.cause.name,
        "why": check.cause.why,
        "advice": check.cause.advice,
    }


def _block(name: str, text: str, style: str = "bold") -> Table:
    table = Table.grid(padding=0)
    table.add_column(width=_INDENT, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text(name, style=style), Text(text))
    return table


def _table(checks: list[Check]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True, style="bold")
    table.add_column("differs", no_wrap=True, justify="right")
    table.add_column("allowed", no_wrap=True, justify="right")
    table.add_column("compared", overflow="fold")
    for check in checks:
        status = Text(check.status, style=_COLOURS[check.status])
        table.add_row(
            status,
            check.name,
            _number(check.difference),
            _number(check.tolerance),
            Text(check.compared),
        )
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}" if math.isfinite(value) else "∞"


def _by_cause(checks: list[Check]) -> list[list[Check]]:
    """Return the rows that have something to say, those that say the same together."""
    groups: dict[tuple[object, ...], list[Check]] = {}
    for check in checks:
        if check.cause.why:
            groups.setdefault((check.cause, check.status), []).append(check)
    return list(groups.values())


def _explain(checks: list[Check], console: Console) -> None:
    """Print the cause of some rows below the table."""
    check = checks[0]
    where = [f"from step {check.first_step}"] if check.first_step else []
    where += [f"first in {check.first_parameter}"] if check.first_parameter else []
    head = Text(check.cause.name or "failure", style=_COLOURS[check.status])
    head.append(f"  {', '.join(c.name for c in checks)}", style="not bold default")
    if where:
        head.append(f": {', '.join(where)}", style="not bold default")
    console.print(head)
    console.print(Padding(Text(check.cause.why), (0, 0, 0, 2)))
    if check.cause.advice:
        advice = Table.grid(padding=(0, 1, 0, 0))
        advice.add_row(Text("→", style=_COLOURS[check.status]), Text(check.cause.advice))
        console.print(Padding(advice, (0, 0, 0, 2)))


def _sentence(found: Verification) -> Text:
    seconds = f"{found.seconds:.0f} s"
    accepted = [check.name for check in found.checks if check.status == "accepted"]
    if found.same and accepted:
        return Text(
            f"The same training, but for {' and '.join(accepted)}: known and accepted. ({seconds})",
            style="green",
        )
    if found.same:
        return Text(f"The same training. ({seconds})", style="green")
    different = [check for check in found.checks if not check.passed]
    causes = dict.fromkeys(check.cause.name or check.name for check in different)
    if {check.name for check in different} == {one_writer.NAME}:
        return Text(f"The same training, but {'; '.join(causes)}. ({seconds})", style="bold red")
    return Text(f"Not the same training: {'; '.join(causes)}. ({seconds})", style="bold red")
