"""The table for people, the object for programs."""

import json
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from samestep.doctor.diagnosis import Diagnosis
from samestep.doctor.facts import AllReduce, RankFacts
from samestep.doctor.findings import Finding, size_name, worst

_COLOURS = {"green": "green", "yellow": "bold yellow", "red": "bold red"}


def print_table(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table of findings, the all-reduce's sizes, and one sentence."""
    console.print(_findings(diagnosis.findings))
    if diagnosis.all_reduce:
        console.print()
        console.print(_sizes(diagnosis.all_reduce))
    console.print()
    console.print(_sentence(diagnosis.findings))


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


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        found: Text | Group = Text(finding.found)
        if finding.advice:
            found = Group(found, _advice(finding))
        status = Text(finding.status, style=_COLOURS[finding.status])
        table.add_row(status, finding.name, found)
    return table


def _advice(finding: Finding) -> Table:
    """Indent every line of the advice below its arrow."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(Text("→", style=_COLOURS[finding.status]), Text(finding.advice, overflow="fold"))
    return table


def _sizes(sizes: tuple[AllReduce, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("all-reduce", justify="right")
    table.add_column("time, µs", justify="right")
    table.add_column("bus bandwidth, GB/s", justify="right")
    for size in sizes:
        table.add_row(size_name(size.bytes), f"{size.latency_us:,.0f}", f"{size.bus_gb_s:.4f}")
    return table


def _sentence(findings: tuple[Finding, ...]) -> str:
    status = worst(findings)
    count = sum(finding.status == status for finding in findings)
    if status == "green":
        return f"[green]All {count} checks are green.[/]"
    names = escape(", ".join(f.name for f in findings if f.status == status))
    return f"[{_COLOURS[status]}]{count} {status}:[/] {names}"


def _rank(rank: RankFacts) -> dict[str, Any]:
    launch, here, address = rank.launch, rank.machine, rank.address
    return {
        "rank": launch.rank,
        "local_rank": launch.local_rank,
        "node": launch.node,
        "host": here.host,
        "device": rank.device,
        "device_uuid": rank.device_uuid,
        "cores": list(here.cores),
        "python": here.python,
        "torch": here.torch,
        "samestep": here.samestep,
        "code": here.code,
        "interface": address.interface,
        "address": address.local,
    }
