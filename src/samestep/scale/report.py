"""The tables for people, the object for programs."""

import json
from collections.abc import Iterator

from samestep.scale.analysis import Interval, Report, Result, reasons
from samestep.scale.study import Mode
from samestep.screen.words import count, wrapped


def lines(report: Report) -> Iterator[str]:
    """Yield the lines of the report."""
    for mode, results in report.results.items():
        if len(results) == 1:
            continue  # a warning says why there is nothing to hold against it
        yield from _table(mode, results)
        yield from _phases(results)
        yield from _why(mode, results, report.crowded)
        yield ""
    for warning in report.warnings:
        yield from wrapped(f"warning: {warning}", "  ")
    first = next(iter(report.results.values()))[0]
    yield from wrapped(
        f"{count(first.rounds, 'round')}, numbers of ranks in turn, {report.seconds:g} s each "
        "after warming up; training steps alone. In brackets 95 % intervals: a bootstrap over "
        "rounds, then over the segments of a round.",
        "",
    )


def _table(mode: Mode, results: list[Result]) -> Iterator[str]:
    setup = results[0].setup
    if mode == "weak":
        each = setup.global_batch_size // setup.ranks
        yield f"weak scaling: {each:,} samples a rank, so that a step of more ranks is more work"
    else:
        yield f"strong scaling: {setup.global_batch_size:,} samples a step, shared by the ranks"
    heads = (("ranks", 7), ("batch", 8), ("samples/s", 12), ("ms a step", 11), ("speed-up", 20))
    yield "".join(f"{head:>{width}}" for head, width in (*heads, ("efficiency", 19)))
    for one in results:
        base = one is results[0]
        speed_up = "1" if base else f"{one.speed_up:.2f} {_span(one.speed_up_interval, '{:.2f}')}"
        low, high = one.efficiency_interval
        efficiency = (
            "100 %"
            if base
            else f"{100 * one.efficiency:.0f} % {_span((100 * low, 100 * high), '{:.0f}')}"
        )
        yield (
            f"{one.setup.ranks:>7}{one.setup.global_batch_size:>8,}{one.samples_per_s:>12,.0f}"
            f"{sum(one.phases.values()):>11.3f}{speed_up:>20}{efficiency:>19}"
        )


def _span(interval: Interval, form: str) -> str:
    return f"[{form.format(interval[0])}–{form.format(interval[1])}]"


def _phases(results: list[Result]) -> Iterator[str]:
    """Yield where a step's time goes, and how much of it is above the ideal."""
    names = dict.fromkeys(name for one in results for name in one.phases)
    more = results[1:]
    head = "".join(f"{one.setup.ranks:>10}" for one in results)
    lost = "".join(f"{'lost, ' + str(one.setup.ranks):>11}" for one in more)
    yield ""
    yield f"{'ms of a step':<14}{head}{lost}"
    rows = [
        (
            name,
            [one.phases.get(name, 0.0) for one in results],
            [one.lost.get(name, 0.0) for one in more],
        )
        for name in names
    ]
    rows.append(
        (
            "together",
            [sum(one.phases.values()) for one in results],
            [sum(one.lost.values()) for one in more],
        )
    )
    for name, values, losses in rows:
        yield (
            f"  {name:<12}"
            + "".join(f"{v:>10.3f}" for v in values)
            + "".join(f"{v:>+11.3f}" for v in losses)
        )


def _why(mode: Mode, results: list[Result], crowded: dict[int, bool]) -> Iterator[str]:
    yield ""
    for one in results[1:]:
        ranks, whole = one.setup.ranks, sum(one.phases.values())
        lost = sum(one.lost.values())
        parts = reasons(one, crowded=crowded.get(ranks, False))
        if not parts:
            yield from wrapped(f"At {ranks} ranks nothing is lost.", "  ")
            continue
        least = results[0].setup.ranks
        ideal = (
            ""
            if mode == "weak"
            else f" (that of {least} rank{'s' * (least > 1)} / {ranks / least:g})"
        )
        text = "; ".join(f"{name} {ms:+.3f} ({meaning})" for name, ms, meaning in parts)
        yield from wrapped(
            f"At {ranks} ranks a step takes {whole:.3f} ms where {whole - lost:.3f} would be ideal"
            f"{ideal}: {text}.",
            "  ",
        )


def as_json(report: Report) -> str:
    """Return everything as one JSON object."""
    table = {
        "recipe": report.recipe,
        "seconds": report.seconds,
        "modes": {
            mode: [
                {
                    "ranks": one.setup.ranks,
                    "global_batch_size": one.setup.global_batch_size,
                    "batch_size": one.setup.batch_size,
                    "samples_per_s": one.samples_per_s,
                    "steps_per_s": one.steps_per_s,
                    "speed_up": one.speed_up,
                    "speed_up_interval": one.speed_up_interval,
                    "efficiency": one.efficiency,
                    "efficiency_interval": one.efficiency_interval,
                    "phases_ms_per_step": one.phases,
                    "lost_ms_per_step": one.lost,
                    "rounds": one.rounds,
                    "segments": one.segments,
                }
                for one in results
            ]
            for mode, results in report.results.items()
        },
        "warnings": report.warnings,
    }
    return json.dumps(table, indent=2)
