"""A finished profile: as plain data, as profile.json, and as text that fits 80 columns."""

import dataclasses
import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from samestep.base.errors import escape
from samestep.base.table import Cell, Styled, Table, text_lines
from samestep.base.words import count, size
from samestep.scripts.measuring.bottleneck import Bottleneck, milliseconds
from samestep.scripts.measuring.measured import MeasuredRank, MeasuredSteps
from samestep.scripts.measuring.tracing import write_whole

_ALL = 0.999
_MOST_COLUMNS = 4
"""Up to this many ranks have a column each; of more, the typical and the slowest are shown."""
PHASE_NAMES = {
    "data": "waiting for data",
    "to_device": "to the device",
    "forward": "forward",
    "backward": "backward",
    "all_reduce": "all-reduce, not hidden",
    "optimizer": "optimizer",
    "step": "step (one graph)",
    "other": "other",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
}


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One value that was tried."""

    value: int
    seconds: float  # per step, in the fastest round: whatever else runs only adds to it
    samples_per_s: float
    ratio: float  # samples per second, relative to the first value
    low: float  # the smallest of the rounds' ratios to the best value before it
    high: float  # the largest
    data: float  # seconds per step of waiting for data
    helps: bool  # whether it was faster than the best value before it, beyond noise


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Values of one setting that were tried in turns."""

    setting: str
    rows: tuple[SweepRow, ...]
    best: int  # the value to use
    skipped: tuple[int, ...] = ()
    """Values that were not tried, since larger ones had stopped to help."""
    why: str = ""  # why the sweep ended
    sure: bool = True  # whether the rounds agree well enough to rely on it


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All that a profile found."""

    name: str
    path: Path
    measured: MeasuredSteps
    verdict: Bottleneck
    sweeps: tuple[Sweep, ...] = ()
    traces: tuple[str, ...] = ()
    precision: str = ""

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        table = dataclasses.asdict(self)
        table["path"] = str(self.path)
        table["verdict"]["share"] = self.verdict.share
        table["measured"]["gpu_idle"] = self.measured.gpu_idle
        return json.dumps(table, indent=2) + "\n"

    def save(self) -> None:
        """Write profile.json next to the traces."""
        write_whole(self.path / "profile.json", self.as_json().encode())


def show(profile: Profile, console: Console) -> None:
    """Print a profile."""
    measured = profile.measured
    parts = [count(len(measured.ranks), "rank"), measured.device]
    if measured.device == "cpu":
        parts.append(f"{count(measured.threads, 'thread')} each")
    if not measured.in_memory:
        parts.append(f"{count(measured.workers, 'worker')} each")
    where = ", ".join(filter(None, [*parts, profile.precision, count(measured.cores, "core")]))
    console.print(f"[bold]{escape(profile.name)}[/]")
    for name, text in _answer(profile):
        _line(console, name, text)
    _line(console, "where", f"{where}; {measured.steps:,} steps measured")
    _print_table(console, _phases(measured, profile.verdict))
    for name, text in _further_rows(profile):
        _line(console, name, text)
    for sweep in profile.sweeps:
        _print_table(console, sweep_table(sweep), after=False)
        if sweep.why:
            _line(console, "", sweep.why)
        console.print(f"[bold]use[/]      --{sweep.setting.replace('_', '-')} {sweep.best}")
    console.print()
    for trace in profile.traces:
        console.print(f"[bold]trace[/]    {escape(str(profile.path))}/{trace}", soft_wrap=True)
    if profile.traces:
        _line(console, "", "Open it at https://ui.perfetto.dev: it stays on your machine.")


def _line(console: Console, name: str, text: str) -> None:
    indent = " " * 9
    lines = textwrap.wrap(text, max(20, console.width - len(indent)), break_on_hyphens=False)
    console.print(f"[bold]{name:<9}[/]" + escape(f"\n{indent}".join(lines)), soft_wrap=True)


def _print_table(console: Console, table: Table, *, after: bool = True) -> None:
    lines = text_lines(table, console.width, colour=console.is_terminal)
    console.file.write("\n".join(["", *lines, ""]) + "\n" * after)


def _phases(measured: MeasuredSteps, verdict: Bottleneck) -> Table:
    columns = _columns(measured)
    shared = {"evaluation": measured.evaluation, "checkpoint": measured.checkpoint}
    rows: list[tuple[Cell, ...]] = []
    for phase, name in PHASE_NAMES.items():
        values = [rank.phases.get(phase, 0.0) + shared.get(phase, 0.0) for rank in columns.values()]
        if phase in shared and not any(values):
            # It may happen more rarely, and still have a cost.
            if measured.script or measured.stopped:
                unseen = f"not seen in {measured.steps:,} steps"
                rows.append((name, unseen, *[""] * len(values)))
        elif any(values) or any(phase in rank.phases for rank in columns.values()):
            typical = measured.typical.phases.get(phase, 0.0) + shared.get(phase, 0.0)
            rows.append((name, *map(_number, values), f"{typical / verdict.step:.0%}"))
    totals = [_number(rank.step + sum(shared.values())) for rank in columns.values()]
    rows.append(tuple(Styled(text, "bold") for text in ("step", *totals, "100%")))
    return Table(columns=("ms per step", *columns, "share"), rows=rows)


def _columns(measured: MeasuredSteps) -> dict[str, MeasuredRank]:
    ranks, slowest = measured.ranks, measured.slowest
    if len(ranks) == 1:
        return {"": ranks[0]}
    if len(ranks) <= _MOST_COLUMNS:
        return {f"rank {number}": rank for number, rank in enumerate(ranks)}
    typical = measured.typical
    return {f"rank {ranks.index(typical)}": typical, f"rank {slowest} (slowest)": ranks[slowest]}


def _number(seconds: float) -> str:
    return milliseconds(seconds).removesuffix(" ms")


def _answer(profile: Profile) -> list[tuple[str, str]]:
    verdict = profile.verdict
    ceiling = (
        f"{verdict.ceiling:.2f} times as fast without any of it; then "
        f"{verdict.next_kind}: {milliseconds(verdict.next_seconds)} per step."
    )
    if verdict.share > _ALL:
        ceiling = "It takes the whole step."
    elif verdict.kind == "untraced":
        ceiling = "Only a trace shows how much of it can be saved."
    return [
        ("verdict", f"{verdict.kind} ({verdict.share:.0%} of the step). {verdict.why}"),
        ("change", verdict.change),
        ("ceiling", ceiling),
    ]


def _further_rows(profile: Profile) -> list[tuple[str, str]]:
    verdict = profile.verdict
    measured = profile.measured
    lines = list[tuple[str, str]]()
    if measured.samples:
        # At least four digits: 40.41, 218.9, 115,360.
        steps, samples = (
            f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}"
            for speed in (1 / verdict.step, measured.samples / verdict.step)
        )
        parts = {part.kind for part in verdict.parts if part.seconds}
        between = [f"{name}s" for name in ("evaluation", "checkpoint") if f"{name}-bound" in parts]
        end = f", with {' and '.join(between)}." if between else "."
        text = f"{steps} steps per second, {samples} samples per second{end}"
        lines.append(("speed", text))
    if measured.gpu_idle is not None:
        busy = measured.traced.gpu_busy or 0.0
        times = f"its kernels run {milliseconds(busy)} of {milliseconds(measured.wall)}"
        lines.append(("gpu", f"idle {measured.gpu_idle:.0%} of a step: {times}"))
    if measured.typical.memory is not None:
        most, phase = measured.typical.memory
        lines.append(("memory", f"{size(most * 2**20)} above the level between steps, in {phase}"))
    return [*lines, *(("note", note) for note in verdict.notes)]


def sweep_table(sweep: Sweep) -> Table:
    """Return the values that were tried as a table."""
    rows = []
    for row in sweep.rows:
        spread = "" if row is sweep.rows[0] else f"{row.low:.2f}–{row.high:.2f}"
        value = f"{row.value}{' *' if row.value == sweep.best else ''}"
        speed = (_number(row.seconds), _number(row.data), f"{row.samples_per_s:,.0f}")
        rows.append((value, *speed, f"{row.ratio:.2f}", spread))
    flag = f"--{sweep.setting.replace('_', '-')}"
    headings = ("ms per step", "of it waiting", "samples/s", "ratio", "to best before")
    return Table(columns=(flag, *headings), rows=rows)
