"""The doctor's report in the terminal."""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.doctor.diagnosis import Diagnosis
from samestep.doctor.findings import Finding, size_name, worst
from samestep.reporting.words import wrapped

_COLOURS = {"green": "green", "yellow": "bold yellow", "red": "bold red"}
_STATUS = 8


def print_report(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings, the all-reduce's sizes, and one sentence."""
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


def _findings(findings: tuple[Finding, ...], width: int) -> Iterator[str]:
    """Yield the lines of the table; paths and addresses are never cut, so they can be copied."""
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
        if finding.advice:
            first, *more = wrapped(finding.advice, "", room - 2)
            yield f"{indent}[{colour}]→[/] {escape(first)}"
            yield from (f"{indent}  {escape(line)}" for line in more)
