"""A profile as text: the table of phases, the verdict, what was tried. It fits 80 columns."""

import textwrap

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from samestep.profiling.advice import milliseconds
from samestep.profiling.bottleneck import Bottleneck
from samestep.profiling.measured import MeasuredRank, MeasuredSteps
from samestep.profiling.profile_result import Profile, Sweep
from samestep.reporting.words import count

_ALL = 0.999
_NARROW = 76
_MOST_COLUMNS = 4
"""Ranks that have a column of their own; of more the least, the typical and the most are shown."""
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


def show(profile: Profile, console: Console) -> None:
    """Print a profile."""
    measured = profile.measured
    console.print(f"[bold]{escape(profile.name)}[/]")
    _line(console, "where", _where(measured, profile.precision))
    console.print()
    console.print(_phases(measured, profile.verdict))
    console.print()
    for name, text in _verdict(profile):
        _line(console, name, text)
    for one in profile.sweeps:
        console.print()
        console.print(_sweep(one, narrow=console.width < _NARROW))
        if one.why:
            _line(console, "", one.why)
        console.print(f"[bold]use[/]      --{one.setting.replace('_', '-')} {one.best}")
    console.print()
    for trace in profile.traces:
        console.print(f"[bold]trace[/]    {escape(str(profile.path))}/{trace}", soft_wrap=True)
    if profile.traces:
        _line(console, "", "Open it at https://ui.perfetto.dev: it stays on your machine.")


def _line(console: Console, name: str, text: str) -> None:
    indent = " " * 9
    lines = textwrap.wrap(text, max(20, console.width - len(indent)), break_on_hyphens=False)
    console.print(f"[bold]{name:<9}[/]" + escape(f"\n{indent}".join(lines)), soft_wrap=True)


def _where(measured: MeasuredSteps, precision: str) -> str:
    parts = [count(len(measured.ranks), "rank"), measured.device]
    if measured.device == "cpu":
        parts.append(f"{count(measured.threads, 'thread')} each")
    if not measured.in_memory:
        parts.append(f"{count(measured.workers, 'worker')} each")
    parts += [precision] * bool(precision)
    parts.append(count(measured.cores, "core"))
    return f"{', '.join(parts)}; {measured.steps:,} steps measured"


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _phases(measured: MeasuredSteps, verdict: Bottleneck) -> Table:
    columns = _columns(measured)
    table = _table("ms per step", *columns, "share")
    table.columns[0].justify = "left"
    shared = {"evaluation": measured.evaluation, "checkpoint": measured.checkpoint}
    for phase, name in PHASE_NAMES.items():
        values = [rank.phases.get(phase, 0.0) + shared.get(phase, 0.0) for rank in columns.values()]
        if phase in shared and not any(values):
            # What falls due more rarely than that has its costs all the same.
            if measured.script or measured.stopped:
                table.add_row(name, f"not seen in {measured.steps:,} steps")
        elif any(values) or any(phase in rank.phases for rank in columns.values()):
            typical = measured.typical.phases.get(phase, 0.0) + shared.get(phase, 0.0)
            table.add_row(name, *map(_number, values), f"{typical / verdict.step:.0%}")
    totals = [_number(rank.step + sum(shared.values())) for rank in columns.values()]
    table.add_row("step", *totals, "100%", style="bold")
    return table


def _columns(measured: MeasuredSteps) -> dict[str, MeasuredRank]:
    ranks = measured.ranks
    if len(ranks) <= _MOST_COLUMNS:
        names = [f"rank {number}" for number in range(len(ranks))] if len(ranks) > 1 else [""]
        return dict(zip(names, ranks, strict=True))
    slowest = measured.slowest
    return {
        f"rank {ranks.index(measured.typical)}": measured.typical,
        f"rank {slowest} (slowest)": ranks[slowest],
    }


def _number(seconds: float) -> str:
    return milliseconds(seconds).removesuffix(" ms")


def _verdict(profile: Profile) -> list[tuple[str, str]]:
    verdict, measured = profile.verdict, profile.measured
    lines = [
        ("verdict", f"{verdict.kind} ({verdict.share:.0%} of the step). {verdict.why}"),
        ("ceiling", _ceiling(verdict)),
        ("change", verdict.change),
    ]
    if measured.samples:
        samples = _speed(measured.samples / verdict.step)
        said = f"{_speed(1 / verdict.step)} steps per second, {samples} samples per second"
        parts = {part.kind for part in verdict.parts if part.seconds}
        between = [f"{name}s" for name in ("evaluation", "checkpoint") if f"{name}-bound" in parts]
        end = f", with {' and '.join(between)}." if between else "."
        lines.append(("speed", f"{said}{end}"))
    if measured.gpu_idle is not None:
        busy = measured.traced.gpu_busy or 0.0
        times = f"its kernels run {milliseconds(busy)} of {milliseconds(measured.wall)}"
        lines.append(("gpu", f"idle {measured.gpu_idle:.0%} of a step: {times}"))
    if measured.typical.memory is not None:
        most, phase = measured.typical.memory
        size = f"{most:,.1f} MiB" if most >= 1 else f"{most * 1024:,.1f} KiB"
        lines.append(("memory", f"at most {size} more than between the steps, in {phase}"))
    return [*lines, *(("note", note) for note in verdict.notes)]


def _speed(value: float) -> str:
    """Return a number of at least four digits: 40.41, 218.9, 115,360."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _ceiling(verdict: Bottleneck) -> str:
    if verdict.share > _ALL:
        return "There is nothing else: all of the step is that."
    if verdict.kind == "untraced":
        return "How much of that could be gone only a trace tells."
    return (
        f"{verdict.ceiling:.2f} times as fast if that were gone altogether; then "
        f"{verdict.next_kind}: {milliseconds(verdict.next_seconds)} per step."
    )


def _sweep(one: Sweep, *, narrow: bool) -> Table:
    flag = f"--{one.setting.replace('_', '-')}"
    headings = ("ms per step", "of it waiting", "samples/s", "ratio", "to best before")
    # Left to itself, a narrow table would cut numbers rather than take lines for its headings.
    shown = (" \n".join(heading.rsplit(" ", 1)) for heading in headings) if narrow else headings
    table = _table(flag, *shown)
    for row in one.rows:
        spread = "" if row is one.rows[0] else f"{row.low:.2f}–{row.high:.2f}"
        value = f"{row.value}{' *' if row.value == one.best else '  '}"
        times = (_number(row.seconds), _number(row.data))
        table.add_row(value, *times, f"{row.samples_per_s:,.0f}", f"{row.ratio:.2f}", spread)
    return table
