"""The table for people, the object for programs."""

import json
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from samestep.doctor.diagnosis import Diagnosis
from samestep.doctor.facts import RankFacts
from samestep.doctor.findings import Finding, size_name, worst

_COLOURS = {"green": "green", "yellow": "bold yellow", "red": "bold red"}


def print_table(diagnosis: Diagnosis, console: Console) -> None:
    """Print the table of findings, the all-reduce's sizes, and one sentence."""
    console.print(_findings(diagnosis.findings))
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


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        colour = _COLOURS[finding.status]
        advice = Table.grid(padding=(0, 1, 0, 0))  # every line of it is indented below its arrow
        if finding.advice:
            advice.add_row(Text("→", style=colour), Text(finding.advice, overflow="fold"))
        found = Group(Text(finding.found), advice) if finding.advice else Text(finding.found)
        table.add_row(Text(finding.status, style=colour), finding.name, found)
    return table


def _rank(rank: RankFacts) -> dict[str, Any]:
    names = (
        *("launch.rank", "launch.local_rank", "launch.node", "machine.host", "device"),
        *("device_uuid", "machine.cores", "machine.python", "machine.torch", "machine.samestep"),
        *("machine.code", "address.interface"),
    )
    facts = {name.rpartition(".")[2]: attrgetter(name)(rank) for name in names}
    return facts | {"address": rank.address.local}
