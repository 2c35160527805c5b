"""The table for people, the object for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.doctor.diagnosis import Diagnosis
from samestep.doctor.facts import RankFacts
from samestep.doctor.findings import Finding, size_name, worst
from samestep.screen.words import wrapped

_COLOURS = {"green": "green", "yellow": "bold yellow", "red": "bold red"}
_STATUS = 8


def print_table(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table of findings, the all-reduce's sizes, and one sentence."""
    for line in _findings(diagnosis.findings, console.width):
        console.print(line, soft_wrap=True)
    if diagnosis.all_reduce:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        for heading in ("all-reduce", "time, µs", "bus bandwidth, GB/s"):
            table.add_column(heading, justify="right")
        for size in diagnosis.all_reduce:
            bandwidth = f"{size.bus_gb_s:.4f}"
            table.add_row(size_name(size.bytes), f"{size.latency_us:,.0f}", bandwidth)
        console.print("", table, sep="\n")
    status = worst(diagnosis.findings)
    names = [finding.name for finding in diagnosis.findings if finding.status == status]
    sentence = f"[{_COLOURS[status]}]{len(names)} {status}:[/] {escape(', '.join(names))}"
    if status == "green":
        sentence = f"[green]All {len(names)} checks are green.[/]"
    console.print("", sentence, sep="\n")


def to_json(diagnosis: Diagnosis) -> str:
    """Return everything as one JSON object."""
    findings = [asdict(finding) for finding in diagnosis.findings]
    table = {
        "status": worst(diagnosis.findings),
        "checks": [{"name": finding.pop("name"), **finding} for finding in findings],
        "all_reduce": [asdict(size) for size in diagnosis.all_reduce],
        "ranks": [_rank(rank) for rank in diagnosis.ranks],
    }
    return json.dumps(table, indent=2)


def _findings(findings: tuple[Finding, ...], width: int) -> Iterator[str]:
    """Yield the lines of the table; a path or an address is never cut, so that it can be copied."""
    label = max(len(finding.name) for finding in findings)
    indent = " " * (_STATUS + label + 2)
    room = max(20, width - len(indent))
    for finding in findings:
        colour = _COLOURS[finding.status]
        first, *more = wrapped(finding.found, "", room)
        name = f"{finding.name:<{label}}  "
        status = f"[{colour}]{finding.status:<{_STATUS}}[/]"
        yield f"{status}[bold]{escape(name)}[/]{escape(first)}"
        yield from (indent + escape(line) for line in more)
        if finding.advice:  # every line of it is indented below its arrow
            first, *more = wrapped(finding.advice, "", room - 2)
            yield f"{indent}[{colour}]→[/] {escape(first)}"
            yield from (f"{indent}  {escape(line)}" for line in more)


def _rank(rank: RankFacts) -> dict[str, Any]:
    names = (
        *("launch.rank", "launch.local_rank", "launch.node", "machine.host", "device"),
        *("device_uuid", "machine.cores", "machine.python", "machine.torch", "machine.samestep"),
        *("machine.code", "address.interface"),
    )
    facts = {name.rpartition(".")[2]: attrgetter(name)(rank) for name in names}
    return facts | {"address": rank.address.local}
