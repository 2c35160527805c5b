"""The table for people, the object for programs."""

import math
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samestep.reporting.words import count, ranks
from samestep.verification.evidence import LEFT_OUT, Check
from samestep.verification.rows.one_writer import ONE_WRITER
from samestep.verification.verify_recipe import Verification

_COLOURS = {
    "same": "green",
    "accepted": "green",
    "note": "yellow",
    "skipped": "dim",
    "different": "bold red",
}
_INDENT = 11
_HELD = {
    "batchnorm": "BatchNorm frozen",
    "dropout": "draws from torch constant",
    "state": "draws from Python and NumPy alike",
}


def show(found: Verification, console: Console) -> None:
    """Print what was run, the table, and one sentence."""
    facts, size = found.facts, found.facts.size
    virtual = facts.virtual_ranks
    shares = f"{count(virtual, 'virtual rank')} " if virtual else ""
    ran = (
        f"{size.steps} steps of {count(size.global_batch, 'sample')} (the last of an epoch: "
        f"{size.rest}), {size.num_samples} of {count(facts.num_samples, 'training sample')}, "
        f"{shares}on {ranks(found.sizes)}, {' and '.join(found.precisions)}"
    )
    console.print(Text(f"verified   {found.recipe}", style="bold"))
    console.print(_block("ran", ran))
    notes = list(found.notes)
    if facts.inexact:
        notes.append(
            f"float64 is not possible here ({facts.inexact}), so only losses are compared; the "
            "tolerance comes from what one rounding of the weights does to them."
        )
    for note in notes:
        console.print(_block("note", note, "yellow"))
    if facts.present:
        held = ", ".join(words for kind, words in _HELD.items() if kind in facts.present)
        console.print(_block("held still", f"{held}, except in the rows of their names"))
    if virtual:
        console.print(_block("held still", "nothing: draws and BatchNorm are as they are"))
    console.print()
    console.print(_table(found.checks, allowed=not virtual))
    # Rows that say the same are explained together.
    explained: dict[tuple[object, ...], list[Check]] = {}
    for check in found.checks:
        if check.cause.why:
            explained.setdefault((check.cause, check.status), []).append(check)
    for checks in explained.values():
        console.print()
        _explain(checks, console)
    console.print()
    console.print(_sentence(found))


def as_table(found: Verification) -> dict[str, Any]:
    """Return everything as JSON has it."""
    facts, size = found.facts, found.facts.size
    return {
        "recipe": found.recipe,
        "same": found.same,
        "world_sizes": list(found.sizes),
        "virtual_ranks": facts.virtual_ranks,
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


def _object(check: Check) -> dict[str, Any]:
    fields = ("name", "passed", "status", "compared", "tolerance", "difference", "first_step")
    table = {name: getattr(check, name) for name in (*fields, "first_parameter")}
    if check.status == "skipped":
        table["passed"] = None
    # JSON has no infinity: a difference that cannot be measured is null.
    if not math.isfinite(check.difference or 0.0):
        table["difference"] = None
    return {
        **table,
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


def _table(checks: list[Check], *, allowed: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True, style="bold")
    table.add_column("differs", no_wrap=True, justify="right")
    if allowed:
        table.add_column("allowed", no_wrap=True, justify="right")
    table.add_column("compared", overflow="fold")
    for check in checks:
        status = Text(check.status, style=_COLOURS[check.status])
        numbers = [_number(check.difference)]
        if allowed:
            numbers.append(_number(check.tolerance))
        table.add_row(status, check.name, *numbers, Text(check.compared))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}" if math.isfinite(value) else "∞"


def _explain(checks: list[Check], console: Console) -> None:
    check, style = checks[0], _COLOURS[checks[0].status]
    where = [f"from step {check.first_step}"] if check.first_step else []
    where += [f"first in {check.first_parameter}"] if check.first_parameter else []
    rows = f"  {', '.join(c.name for c in checks)}{': ' if where else ''}{', '.join(where)}"
    head = Text(check.cause.name or "failure", style=style)
    console.print(head.append(rows, style="not bold default"))
    console.print(Padding(Text(check.cause.why), (0, 0, 0, 2)))
    if check.cause.advice:
        advice = Table.grid(padding=(0, 1, 0, 0))
        advice.add_row(Text("→", style=style), Text(check.cause.advice))
        console.print(Padding(advice, (0, 0, 0, 2)))


def _sentence(found: Verification) -> Text:
    accepted = " and ".join(check.name for check in found.checks if check.status == "accepted")
    different = [check for check in found.checks if not check.passed]
    causes = "; ".join(dict.fromkeys(check.cause.name or check.name for check in different))
    if found.same:
        but = f", but for {accepted}: known and accepted" if accepted else ""
        quick = any(check.compared == LEFT_OUT for check in found.checks)
        bits = ", to the last bit" if found.facts.virtual_ranks else ""
        text = f"The same training{bits}{', as far as --quick looks' if quick else ''}{but}."
    elif {check.name for check in different} == {ONE_WRITER.name}:
        text = f"The same training, but {causes}."
    else:
        text = f"Not the same training: {causes}."
    return Text(f"{text} ({found.seconds:.0f} s)", style="green" if found.same else "bold red")
