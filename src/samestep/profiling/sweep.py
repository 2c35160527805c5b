"""Try values of one setting in turns, and stop where more does not help beyond noise."""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from samestep.data.source import Source
from samestep.profiling.profile_result import Row, Sweep
from samestep.ranks.world import World
from samestep.settings import Settings
from samestep.training.compiled import make_step, what_compiles
from samestep.training.loop import rehearse
from samestep.training.phases import make_phases
from samestep.training.plan import make_plan
from samestep.training.work import State, StepsTaken, Work

ROUNDS, MOST_ROUNDS = 3, 7
_WIDE = 0.15
"""Rounds are added while their ratios differ by more than this: something else uses the machine."""
TURN_S = 0.5
NOISE = 0.03
"""A value helps if it is faster in most rounds, and by more than this in the fastest."""
_PATIENCE = 2
"""So many values in a row that do not help end the sweep: one worker alone is often slower than
none, and two are not."""
_UNSURE = 0.5
"""Rounds that differ by more than this, relative to the value, and of which some say that it is the
slower one, say nothing."""


@dataclass
class Candidate:
    """A training with one value of the setting, which goes on a little whenever it is its turn."""

    value: int
    work: Work
    state: State
    steps: Generator[StepsTaken]
    prefetched: int
    """Steps that the loader has ready after a pause: they are not measured."""
    each: int = 1
    """Calls of the step in a turn."""
    turns: list["Turn"] = field(default_factory=list)
    ratios: list[float] = field(default_factory=lambda: [1.0])
    """In each round, how many times as many samples a second as the best before it."""
    helps: bool = True

    @property
    def fastest(self) -> "Turn":
        """The turn that was disturbed least: whatever else runs only adds to the time."""
        return max(self.turns, key=lambda turn: turn.samples_per_s)


class Turn(NamedTuple):
    """What was measured in one turn."""

    seconds: float
    """A step."""
    samples_per_s: float
    """Over all ranks, as counted: an epoch's last batch may be smaller."""
    data: float
    """Seconds a step that it waited for data."""


def sweep(
    world: World,
    setting: str,
    values: Sequence[int],
    make: Callable[[int], tuple[Work, State]],
    stop: Callable[[], bool] = lambda: False,
) -> Sweep:
    """Try values in ascending order, each in turns with the best so far; return what to use.

    All ranks try the same values, and rank 0's clock counts. `make` returns the work with a value,
    with a source of its own, and where it stands. `stop` says on all ranks alike whether to leave
    the rest.
    """
    ordered = sorted(set(values))
    best = first = _open(ordered[0], *make(ordered[0]))
    _take_turns(world, best)
    tried, misses, stopped = [best], 0, False
    for value in ordered[1:]:
        stopped = stop()
        if misses == _PATIENCE or stopped:
            break
        candidate = _open(value, *make(value))
        _compare(world, best, candidate)
        tried.append(candidate)
        misses = 0 if candidate.helps else misses + 1
        best, other = (candidate, best) if candidate.helps else (best, candidate)
        _close(other)
    _close(best)
    rows = tuple(
        Row(
            value=one.value,
            **one.fastest._asdict(),
            ratio=one.fastest.samples_per_s / first.fastest.samples_per_s,
            low=min(one.ratios),
            high=max(one.ratios),
            helps=one.helps,
        )
        for one in tried
    )
    left = tuple(ordered[len(tried) :])
    sure = not any(_spread([row.low, row.high]) > _UNSURE and row.low < 1 for row in rows)
    why = "A stop signal came: the rest was not tried." if stopped else ""
    why = why or _why(left, rows, sure=sure)
    return Sweep(setting=setting, rows=rows, best=best.value, skipped=left, why=why, sure=sure)


def _compare(world: World, best: Candidate, candidate: Candidate) -> None:
    """Let both take turns until their ratio is known, or as often as is worth while."""
    ratios = candidate.ratios = []
    before = len(best.turns)
    while len(ratios) < ROUNDS or (_spread(ratios) > _WIDE and len(ratios) < MOST_ROUNDS):
        _take_turns(world, best, candidate)
        ratios.append(candidate.turns[-1].samples_per_s / best.turns[-1].samples_per_s)
    its = max(turn.samples_per_s for turn in best.turns[before:])
    fastest = candidate.fastest.samples_per_s / its
    candidate.helps = fastest > 1 + NOISE and median(ratios) > 1


def _spread(ratios: Sequence[float]) -> float:
    return (max(ratios) - min(ratios)) / median(ratios)


def _why(skipped: Sequence[int], rows: Sequence[Row], *, sure: bool) -> str:
    if not sure:
        return (
            "The rounds differ too much to be sure: something else uses the machine. Measure "
            "again on a quiet one."
        )
    if skipped:
        return f"Not tried: {', '.join(map(str, skipped))}. More had stopped to help."
    if len(rows) > 1 and rows[-1].helps:
        return "The largest value was the fastest: a still larger one may be, too."
    return ""


def variant(work: Work, settings: Settings, source: Source) -> Work:
    """Return endless work with other settings: the same model, on a source of its own."""
    world, learner = work.world, work.learner
    schedule = work.plan.schedule
    plan = make_plan(settings, source.num_samples, world.world_size, schedule=schedule)
    phases = make_phases(world.device)
    compiles = what_compiles(settings, world, learner.model, own=learner.own)
    per_block = source.steps_per_block(plan.global_batch_size)
    step = make_step(compiles, learner, settings, world, plan, per_block, phases)
    changed = replace(
        work, settings=settings, plan=plan, step=step, train=source, validation=None, phases=phases
    )
    return changed.endless()


def _open(value: int, work: Work, state: State) -> Candidate:
    """Make a candidate, and let it train for a moment: workers start, and its speed shows."""
    world, workers = work.world, work.settings.num_workers
    prefetched = 2 * workers + 2 if workers else 1
    candidate = Candidate(value, work, state, rehearse(work, state), prefetched)
    _go_on(candidate, prefetched + 2)
    began, calls = time.perf_counter(), 0
    while world.broadcast(time.perf_counter() - began < TURN_S):
        _go_on(candidate, 1)
        calls += 1
    # In a turn the host waits for the device once, at its end.
    each = (time.perf_counter() - began) / max(1, calls)
    candidate.each = world.broadcast(max(1, round(TURN_S / each)))
    return candidate


def _go_on(candidate: Candidate, calls: int) -> None:
    """Train for so many calls of the step, and wait until the device has done them."""
    for _ in range(calls):
        taken = next(candidate.steps)
    float(taken.result.losses[-1])


def _take_turns(world: World, *candidates: Candidate) -> None:
    """Let each train for a moment."""
    for candidate in candidates:
        phases, position = candidate.work.phases, candidate.state.position
        phases.begin()
        _go_on(candidate, 1 + candidate.prefetched)
        before, trained = position.step, position.samples
        waited = phases.running().get("data", 0.0)
        began = time.perf_counter()
        _go_on(candidate, candidate.each)
        seconds = time.perf_counter() - began
        steps, samples = position.step - before, position.samples - trained
        data = phases.running().get("data", 0.0) - waited
        turn = (seconds / steps, samples / seconds, data / steps)
        candidate.turns.append(Turn(*world.broadcast(turn)))


def _close(candidate: Candidate) -> None:
    candidate.steps.close()
    candidate.work.train.close()
