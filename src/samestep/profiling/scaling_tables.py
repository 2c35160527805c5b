"""The tables for people, the object for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from samestep.profiling.scaling import ScalingReport, ScalingResult, reasons
from samestep.profiling.scaling_study import Mode
from samestep.reporting.words import count, wrapped


def lines(report: ScalingReport) -> Iterator[str]:
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


def _table(mode: Mode, results: list[ScalingResult]) -> Iterator[str]:
    setup = results[0].setup
    if mode == "weak":
        each = setup.global_batch_size // setup.ranks
        yield f"weak scaling: {each:,} samples a rank, so that a step of more ranks is more work"
    else:
        yield f"strong scaling: {setup.global_batch_size:,} samples a step, shared by the ranks"
    heads = (("ranks", 7), ("batch", 8), ("samples/s", 12), ("ms a step", 11), ("speed-up", 20))
    yield "".join(f"{head:>{width}}" for head, width in (*heads, ("efficiency", 19)))
    for one in results:
        speed_up, efficiency = "1", "100 %"
        if one is not results[0]:
            low, high = one.speed_up_interval
            speed_up = f"{one.speed_up:.2f} [{low:.2f}–{high:.2f}]"
            low, high = (100 * share for share in one.efficiency_interval)
            efficiency = f"{100 * one.efficiency:.0f} % [{low:.0f}–{high:.0f}]"
        yield (
            f"{one.setup.ranks:>7}{one.setup.global_batch_size:>8,}{one.samples_per_s:>12,.0f}"
            f"{one.step_ms:>11.3f}{speed_up:>20}{efficiency:>19}"
        )


def _phases(results: list[ScalingResult]) -> Iterator[str]:
    """Yield where a step's time goes, and how much of it is above the ideal."""
    names = dict.fromkeys(name for one in results for name in one.phases_ms_per_step)
    more = results[1:]
    head = "".join(f"{one.setup.ranks:>10}" for one in results)
    lost = "".join(f"{'lost, ' + str(one.setup.ranks):>11}" for one in more)
    yield ""
    yield f"{'ms of a step':<14}{head}{lost}"
    for name in names:
        values = [one.phases_ms_per_step.get(name, 0.0) for one in results]
        yield _row(name, values, [one.lost_ms_per_step.get(name, 0.0) for one in more])
    yield _row("together", [one.step_ms for one in results], [one.lost_ms for one in more])


def _row(name: str, values: list[float], losses: list[float]) -> str:
    cells = [f"{v:>10.3f}" for v in values] + [f"{v:>+11.3f}" for v in losses]
    return f"  {name:<12}{''.join(cells)}"


def _why(mode: Mode, results: list[ScalingResult], crowded: dict[int, bool]) -> Iterator[str]:
    yield ""
    for one in results[1:]:
        ranks = one.setup.ranks
        parts = reasons(one, crowded=crowded.get(ranks, False))
        if not parts:
            yield from wrapped(f"At {ranks} ranks nothing is lost.", "  ")
            continue
        least = results[0].setup.ranks
        of_least = f" (that of {count(least, 'rank')} / {ranks / least:g})"
        text = "; ".join(f"{name} {ms:+.3f} ({meaning})" for name, ms, meaning in parts)
        yield from wrapped(
            f"At {ranks} ranks a step takes {one.step_ms:.3f} ms where "
            f"{one.step_ms - one.lost_ms:.3f} would be ideal{of_least * (mode == 'strong')}: "
            f"{text}.",
            "  ",
        )


def as_json(report: ScalingReport) -> str:
    """Return everything as one JSON object."""
    table = {
        "recipe": report.recipe,
        "seconds": report.seconds,
        "modes": {mode: [_plain(one) for one in found] for mode, found in report.results.items()},
        "warnings": report.warnings,
    }
    return json.dumps(table, indent=2)


def _plain(one: ScalingResult) -> dict[str, Any]:
    """Return the plain values of a result, those of its setup first."""
    table = asdict(one)
    setup = table.pop("setup")
    del setup["mode"]
    return {**setup, **table}
