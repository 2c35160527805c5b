"""Speed-up, efficiency and what is lost to whom, from the measurements."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.profiling.scaling_study import (
    MeasuredSetup,
    Measurement,
    Mode,
    Segment,
    Setup,
    Study,
    samples_per_s,
)
from samestep.reporting.words import count
from samestep.reporting.words import ranks as ranks_in_words

DRAWS = 1000
BUSY = 0.3
"""Cores that other work keeps busy, from which on it counts."""
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class ScalingResult:
    """One setup beside the smallest number of ranks."""

    setup: Setup
    samples_per_s: float
    steps_per_s: float
    speed_up: float
    """Samples per second, relative to the smallest number of ranks."""
    speed_up_interval: Interval
    efficiency: float
    """The speed-up, relative to that of the ranks' number."""
    efficiency_interval: Interval
    phases_ms_per_step: dict[str, float]
    """On rank 0."""
    lost_ms_per_step: dict[str, float]
    """What each phase takes above the ideal; the sum is the step's own."""
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
    """All that is said of a study."""

    recipe: str
    results: dict[Mode, list[ScalingResult]]
    """Of each mode that was asked for, by the number of ranks; the base first."""
    crowded: dict[int, bool]
    """Whether so many ranks share cores, with each other or with other work."""
    warnings: list[str]
    seconds: float
    """Of each measurement, as asked for."""


def analyse(
    recipe: str,
    study: Study,
    found: Sequence[MeasuredSetup],
    modes: Sequence[Mode],
    seconds: float,
    busy: float,
) -> ScalingReport:
    """Return speed-ups, efficiencies and losses of every setup, and what to beware of.

    `busy` is how many cores other work kept busy when it began.
    """
    by_setup = {one.setup: one for one in found}
    base = by_setup[study.base]
    return ScalingReport(
        recipe=recipe,
        results={m: [scaling_of(by_setup[s], base, m) for s in study.of(m)] for m in modes},
        seconds=seconds,
        crowded={one.setup.ranks: is_crowded(one, busy) for one in found},
        warnings=[*study.left_out, *find_warnings(found, busy)],
    )


def scaling_of(one: MeasuredSetup, base: MeasuredSetup, mode: Mode) -> ScalingResult:
    """Hold a setup against the smallest number of ranks.

    Ideal is, when scaling weakly, the step of the smallest number of ranks; when scaling strongly,
    that step divided by how many times more ranks share its batch.
    """
    times = one.setup.ranks / base.setup.ranks
    phases, reference = per_step(one), per_step(base)
    ideal = 1.0 if mode == "weak" else 1 / times
    speed = samples_per_s(one.segments)
    speed_up = speed / samples_per_s(base.segments)
    low, high = (1.0, 1.0) if one is base else interval(one.rounds, base.rounds)
    return ScalingResult(
        setup=one.setup,
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
        rounds=len(one.rounds),
        segments=len(one.segments),
    )


def per_step(one: MeasuredSetup) -> dict[str, float]:
    """Return the milliseconds of a step in each phase, over all rounds."""
    segments = one.segments
    steps = sum(segment.steps for segment in segments)
    names = dict.fromkeys(name for segment in segments for name in segment.phases)
    return {n: 1000 * sum(s.phases.get(n, 0.0) for s in segments) / steps for n in names}


def interval(one: Sequence[Measurement], base: Sequence[Measurement]) -> Interval:
    """Return a 95 % interval of the speed-up.

    A bootstrap in two stages (Davison & Hinkley 1997, "Bootstrap methods and their application",
    section 3.8): rounds are drawn with replacement, the same for both so that what slowed a whole
    round cancels, then segments within each. With few rounds it is rather too narrow.
    """
    # Seeded, so that the same measurements always give the same interval.
    generator = random.Random(0)  # noqa: S311 - no secret

    def draw() -> float:
        mine: list[Segment] = []
        its: list[Segment] = []
        for number in generator.choices(range(len(one)), k=len(one)):
            for drawn, segments in ((mine, one[number].segments), (its, base[number].segments)):
                drawn.extend(generator.choices(segments, k=len(segments)))
        return samples_per_s(mine) / samples_per_s(its)

    ratios = sorted(draw() for _ in range(DRAWS))
    return ratios[round(0.025 * (DRAWS - 1))], ratios[round(0.975 * (DRAWS - 1))]


def find_warnings(found: Sequence[MeasuredSetup], busy: float = 0.0) -> list[str]:
    """Return what of this machine keeps more ranks from being more hardware."""
    said = []
    crowded = [one for one in found if is_crowded(one)]
    if crowded:
        ranks = sorted({one.setup.ranks for one in crowded})
        cores = crowded[0].rounds[0].cores
        said.append(
            f"{ranks_in_words(ranks)} share {count(cores, 'usable core')}: they take "
            "turns, so this measures the machine's limit and not how the training scales."
        )
    if busy > BUSY:
        said.append(
            f"Other work kept {busy:.1f} cores busy when this began: the numbers are of what it "
            "left over. Measure again on a quiet machine."
        )
    base = found[0].rounds[0]
    fewer = sorted({o.setup.ranks for o in found if o.rounds[0].threads < base.threads})
    if base.device == "cpu" and fewer:
        first = found[0].setup.ranks
        said.append(
            f"{count(first, 'rank')} computed on {base.threads} threads each and "
            f"{ranks_in_words(fewer)} on fewer: the smallest number already uses several cores. "
            "--threads 1 compares core by core."
        )
    shared = sorted({o.setup.ranks for o in found if o.rounds[0].sharing_gpu})
    if shared:
        said.append(f"Of {ranks_in_words(shared)}, some share a GPU: they take turns on it.")
    return said


def reasons(one: ScalingResult, *, crowded: bool) -> list[tuple[str, float, str]]:
    """Return what most of a loss goes to: (phases, milliseconds of a step, what that means)."""
    lost = one.lost_ms
    if lost <= 0:
        return []
    last = "the slowest rank"
    compute = "ranks share memory and caches, and DDP does work of its own"
    if one.setup.mode == "strong":
        compute = "less for each rank to do, but every operation has a cost of its own"
    if crowded:
        last = "ranks whose turn on the cores has not come"
        compute = "ranks, or other work, take turns on the cores"
    meaning = {
        "all_reduce": f"sending gradients, and waiting for {last}",
        "data": "every rank reads, and a step waits for it",
        "to_device": "ranks share the way to the device",
        "other": "what lies between the steps' work",
    }
    groups: dict[str, dict[str, float]] = {}
    for name, ms in one.lost_ms_per_step.items():
        groups.setdefault(meaning.get(name, compute), {})[name] = ms
    found = [(", ".join(parts), sum(parts.values()), what) for what, parts in groups.items()]
    found.sort(key=lambda part: -part[1])
    return [part for part in found if part[1] >= 0.05 * lost][:3]


def is_crowded(one: MeasuredSetup, busy: float = 0.0) -> bool:
    """Whether the ranks of a setup share cores, with each other or with other work."""
    first = one.rounds[0]
    wanted = one.setup.ranks * first.threads + (busy if busy > BUSY else 0.0)
    return first.device == "cpu" and wanted > first.cores
