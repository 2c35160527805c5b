"""Speed-up, efficiency and losses by phase, from the measurements of a study."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from samestep.base.table import Table, text_lines
from samestep.base.words import count, wrapped
from samestep.base.words import ranks as ranks_in_words
from samestep.prove.profiling.scaling_study import (
    MeasuredSetup,
    Measurement,
    Mode,
    Segment,
    Setup,
    Study,
    samples_per_s,
)

DRAWS = 1000
_WIDTH = 80
_A_GAIN, _WORTH_IT = 1.1, 0.7
"""A speed-up that is more than noise; the share of the ideal from which more ranks pay."""
BUSY = 0.3  # from this many cores on, other work that keeps them busy counts
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """One setup relative to the smallest number of ranks."""

    setup: Setup
    samples_per_s: float
    steps_per_s: float
    speed_up: float  # samples per second, relative to the smallest number of ranks
    speed_up_interval: Interval
    efficiency: float  # the speed-up, relative to that of the ranks' number
    efficiency_interval: Interval
    phases_ms_per_step: dict[str, float]  # on rank 0
    lost_ms_per_step: dict[str, float]  # what each phase takes above the ideal
    rounds: int
    segments: int

    @property
    def step_ms(self) -> float:
        """Milliseconds per step."""
        return sum(self.phases_ms_per_step.values())

    @property
    def lost_ms(self) -> float:
        """Milliseconds per step above the ideal."""
        return sum(self.lost_ms_per_step.values())


@dataclass(frozen=True, kw_only=True)
class ScalingReport:
    """The results of a study."""

    recipe: str
    seconds: float  # requested per measurement
    results: dict[Mode, list[ScalingResult]]  # by the number of ranks; the base first
    warnings: list[str]
    crowded: dict[int, bool]
    """Whether this many ranks share cores, with each other or with other work."""

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        modes: dict[str, list[object]] = {}
        for mode, results in self.results.items():
            modes[mode] = []
            for table in map(asdict, results):
                setup = table.pop("setup")
                del setup["mode"]
                modes[mode].append({**setup, **table})
        plain = {"recipe": self.recipe, "seconds": self.seconds, "modes": modes}
        return json.dumps({**plain, "warnings": self.warnings}, indent=2)


def analyse(
    recipe: str,
    study: Study,
    measured: Sequence[MeasuredSetup],
    modes: Sequence[Mode],
    seconds: float,
    busy: float,
) -> ScalingReport:
    """Judge every setup; `busy` is how many cores other work kept busy at the beginning."""
    by_setup = {m.setup: m for m in measured}
    base = by_setup[study.base]
    return ScalingReport(
        recipe=recipe,
        results={m: [scaling_of(by_setup[s], base, m) for s in study.of(m)] for m in modes},
        seconds=seconds,
        crowded={setup.ranks: is_crowded(m, busy) for setup, m in by_setup.items()},
        warnings=[*study.left_out, *find_warnings(measured, busy)],
    )


def scaling_of(measured: MeasuredSetup, base: MeasuredSetup, mode: Mode) -> ScalingResult:
    """Compare with the base: the ideal is its step, in strong scaling divided by the ranks."""
    times = measured.setup.ranks / base.setup.ranks
    phases, reference = _per_step(measured), _per_step(base)
    ideal = 1.0 if mode == "weak" else 1 / times
    speed = samples_per_s(measured.segments)
    speed_up = speed / samples_per_s(base.segments)
    low, high = (1.0, 1.0) if measured is base else interval(measured.rounds, base.rounds)
    return ScalingResult(
        setup=measured.setup,
        samples_per_s=speed,
        steps_per_s=1000 / sum(phases.values()),
        speed_up=speed_up,
        speed_up_interval=(low, high),
        efficiency=speed_up / times,
        efficiency_interval=(low / times, high / times),
        phases_ms_per_step=phases,
        lost_ms_per_step={
            name: phases.get(name, 0.0) - ideal * reference.get(name, 0.0)
            for name in {**reference, **phases}
        },
        rounds=len(measured.rounds),
        segments=len(measured.segments),
    )


def _per_step(measured: MeasuredSetup) -> dict[str, float]:
    steps = sum(segment.steps for segment in measured.segments)
    names = dict.fromkeys(name for segment in measured.segments for name in segment.phases)
    return {n: 1000 * sum(s.phases.get(n, 0.0) for s in measured.segments) / steps for n in names}


def interval(rounds: Sequence[Measurement], base: Sequence[Measurement]) -> Interval:
    """Return a 95 % interval of the speed-up.

    A bootstrap in two stages (Davison & Hinkley 1997, "Bootstrap methods and their application",
    section 3.8): draw rounds with replacement, the same for both so that what slowed a whole round
    cancels, then segments within each. With few rounds the interval is rather too narrow.
    """
    # Seeded, so that the same measurements always give the same interval.
    generator = random.Random(0)  # noqa: S311 - no secret

    def draw() -> float:
        mine: list[Segment] = []
        its: list[Segment] = []
        for number in generator.choices(range(len(rounds)), k=len(rounds)):
            for drawn, segments in ((mine, rounds[number].segments), (its, base[number].segments)):
                drawn.extend(generator.choices(segments, k=len(segments)))
        return samples_per_s(mine) / samples_per_s(its)

    ratios = sorted(draw() for _ in range(DRAWS))
    return ratios[round(0.025 * (DRAWS - 1))], ratios[round(0.975 * (DRAWS - 1))]


def find_warnings(measured: Sequence[MeasuredSetup], busy: float = 0.0) -> list[str]:
    """Return why more ranks on this machine are not more hardware."""
    warnings = []
    if crowded := [m for m in measured if is_crowded(m)]:
        ranks = sorted({m.setup.ranks for m in crowded})
        cores = crowded[0].rounds[0].cores
        warnings.append(
            f"{ranks_in_words(ranks)} share {count(cores, 'usable core')}: they take "
            "turns, so this measures the machine's limit and not how the training scales."
        )
    if busy > BUSY:
        warnings.append(
            f"Other programs kept {busy:.1f} cores busy at the start: the numbers are too low. "
            "Measure again on an idle machine."
        )
    base = measured[0].rounds[0]
    fewer = sorted({m.setup.ranks for m in measured if m.rounds[0].threads < base.threads})
    if base.device == "cpu" and fewer:
        first = measured[0].setup.ranks
        warnings.append(
            f"{count(first, 'rank')} computed on {base.threads} threads each and "
            f"{ranks_in_words(fewer)} on fewer: the smallest number already uses several cores. "
            "--threads 1 compares core by core."
        )
    if shared := sorted({m.setup.ranks for m in measured if m.rounds[0].sharing_gpu}):
        warnings.append(f"Of {ranks_in_words(shared)}, some share a GPU: they take turns on it.")
    return warnings


def is_crowded(measured: MeasuredSetup, busy: float = 0.0) -> bool:
    """Whether the ranks of a setup share cores, with each other or with other work."""
    first = measured.rounds[0]
    wanted = measured.setup.ranks * first.threads + (busy if busy > BUSY else 0.0)
    return first.device == "cpu" and wanted > first.cores


def reasons(result: ScalingResult, *, crowded: bool) -> list[tuple[str, float, str]]:
    """Return the largest parts of a loss: (phases, milliseconds per step, meaning)."""
    lost = result.lost_ms
    if lost <= 0:
        return []
    last = "the slowest rank"
    compute = "ranks share memory and caches, and DDP does work of its own"
    if result.setup.mode == "strong":
        compute = "less work per rank, but each operation has a fixed cost"
    if crowded:
        last = "ranks without a free core"
        compute = "ranks, or other programs, share the cores"
    meaning = {
        "all_reduce": f"sending gradients, and waiting for {last}",
        "data": "every rank reads its data, and the step waits",
        "to_device": "ranks share the link to the device",
        "other": "the time between the steps' work",
    }
    groups: dict[str, dict[str, float]] = {}
    for name, ms in result.lost_ms_per_step.items():
        groups.setdefault(meaning.get(name, compute), {})[name] = ms
    parts = [(", ".join(parts), sum(parts.values()), text) for text, parts in groups.items()]
    parts.sort(key=lambda part: -part[1])
    return [part for part in parts if part[1] >= 0.05 * lost][:3]


def report_lines(report: ScalingReport) -> Iterator[str]:
    """Yield the lines of the report for the terminal."""
    for mode, results in report.results.items():
        if len(results) > 1:  # else a warning says why there is nothing to compare
            yield _answer(results)
            yield from _speed_ups(mode, results)
            yield from _phases(results)
            yield from _explanation(mode, results, report.crowded)
    for warning in report.warnings:
        yield from wrapped(f"warning: {warning}", "  ")
    first = next(iter(report.results.values()))[0]
    yield from wrapped(
        f"{count(first.rounds, 'round')}, numbers of ranks in turn, {report.seconds:g} s each "
        "after warm-up; training steps only. 95 % intervals in brackets: a bootstrap over rounds, "
        "then over the segments of a round.",
        "",
    )


def _answer(results: list[ScalingResult]) -> str:
    base, most = results[0], results[-1]
    gains = most.speed_up_interval[0] > _A_GAIN
    worth = f"a gain, at {most.efficiency:.0%} of the ideal" if gains else "not worth it"
    if gains and most.efficiency >= _WORTH_IT:
        worth = "worth it"
    than = f"{most.speed_up:.2f} times as fast as {base.setup.ranks}"
    return f"{ranks_in_words([most.setup.ranks])} are {than} here: {worth}."


def _speed_ups(mode: Mode, results: list[ScalingResult]) -> Iterator[str]:
    setup = results[0].setup
    if mode == "weak":
        each = setup.global_batch_size // setup.ranks
        yield f"weak scaling: {each:,} samples per rank, so that more ranks do more work per step"
    else:
        yield f"strong scaling: {setup.global_batch_size:,} samples per step, shared by the ranks"
    rows = []
    for result in results:
        speed_up, efficiency = "1", "100 %"
        if result is not results[0]:
            low, high = result.speed_up_interval
            speed_up = f"{result.speed_up:.2f} [{low:.2f}–{high:.2f}]"
            low, high = (100 * share for share in result.efficiency_interval)
            efficiency = f"{100 * result.efficiency:.0f} % [{low:.0f}–{high:.0f}]"
        sizes = (str(result.setup.ranks), f"{result.setup.global_batch_size:,}")
        speed = (f"{result.samples_per_s:,.0f}", f"{result.step_ms:.3f}")
        rows.append((*sizes, *speed, speed_up, efficiency))
    columns = ("ranks", "batch", "samples/s", "ms per step", "speed-up", "efficiency")
    yield from text_lines(Table(columns=columns, rows=rows), _WIDTH)


def _phases(results: list[ScalingResult]) -> Iterator[str]:
    names = list(dict.fromkeys(name for result in results for name in result.phases_ms_per_step))
    times = [
        [*(f"{result.phases_ms_per_step.get(n, 0.0):.3f}" for n in names), f"{result.step_ms:.3f}"]
        for result in results
    ]
    lost = [
        [*(f"{result.lost_ms_per_step.get(n, 0.0):+.3f}" for n in names), f"{result.lost_ms:+.3f}"]
        for result in results[1:]
    ]
    ranks = [str(result.setup.ranks) for result in results]
    columns = ("ms per step", *ranks, *(f"lost, {number}" for number in ranks[1:]))
    rows = list(zip([*names, "total"], *times, *lost, strict=True))
    yield ""
    yield from text_lines(Table(columns=columns, rows=rows), _WIDTH)


def _explanation(
    mode: Mode, results: list[ScalingResult], crowded: dict[int, bool]
) -> Iterator[str]:
    yield ""
    for result in results[1:]:
        ranks, least = result.setup.ranks, results[0].setup.ranks
        parts = reasons(result, crowded=crowded.get(ranks, False))
        if not parts:
            yield from wrapped(f"{ranks} ranks lose nothing.", "  ")
            continue
        of_least = f" (that of {count(least, 'rank')} / {ranks / least:g})"
        of_least = of_least if mode == "strong" else ""
        text = "; ".join(f"{name} {ms:+.3f} ({meaning})" for name, ms, meaning in parts)
        ideal_ms = result.step_ms - result.lost_ms
        yield from wrapped(
            f"At {ranks} ranks a step takes {result.step_ms:.3f} ms where {ideal_ms:.3f} would be "
            f"ideal{of_least}: {text}.",
            "  ",
        )
    yield ""
