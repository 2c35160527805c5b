"""Try values of one setting in turns, and stop where more does not help beyond noise."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple

from samestep.data.batches import Source
from samestep.profiling.profile_result import Row, Sweep
from samestep.ranks.world import World
from samestep.run.records import Record
from samestep.settings import Settings
from samestep.training.clock import Position
from samestep.training.compiled import make_step, what_compiles
from samestep.training.loop import Job, train
from samestep.training.phases import make_phases
from samestep.training.plan import make_plan
from samestep.training.stopping import Agreement, Received

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
ENDLESS = 2**40
"""Steps: a profile ends by itself."""


@dataclass
class Candidate:
    """A job with one value of the setting, which trains a little whenever it is its turn."""

    value: int
    job: Job
    records: Iterator[Record]
    prefetched: int
    """Steps that the loader has ready after a pause: they are not measured."""
    turns: list["Turn"] = field(default_factory=list)

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
    make: Callable[[int], Job],
    look: Callable[[Job], None] = lambda _job: None,
) -> Sweep:
    """Try values in ascending order, each in turns with the best so far; return what to use.

    Args:
        world: this rank; all ranks try the same values, and rank 0's clock counts.
        setting: name of the setting.
        values: of the setting.
        make: returns a job with a value, with a source of its own.
        look: given each job before it is tried.
    """
    ordered = sorted(set(values))

    def open_one(value: int) -> Candidate:
        job = make(value)
        look(job)
        return _open(value, job, world)

    best = open_one(ordered[0])
    _turns(world, [best], 1)
    tried: list[_Tried] = [_Tried(best, [1.0], helps=True)]
    misses = 0
    for value in ordered[1:]:
        if misses == _PATIENCE:
            break
        candidate = open_one(value)
        one = _compare(world, best, candidate)
        tried.append(one)
        misses = 0 if one.helps else misses + 1
        best, other = (candidate, best) if one.helps else (best, candidate)
        _close(other)
    _close(best)
    rows = tuple(_row(one, tried[0].candidate) for one in tried)
    left = tuple(ordered[len(tried) :])
    sure = not any(_spread([row.low, row.high]) > _UNSURE and row.low < 1 for row in rows)
    return Sweep(
        setting=setting,
        rows=rows,
        best=best.value,
        skipped=left,
        sure=sure,
        why=_why(left, rows, sure=sure),
    )


@dataclass
class _Tried:
    candidate: Candidate
    ratios: list[float]
    """In each round, how many times as many samples a second as the best before it."""
    helps: bool


def _compare(world: World, best: Candidate, candidate: Candidate) -> _Tried:
    """Let both take turns until their ratio is known, or as often as is worth while."""
    ratios: list[float] = []
    before = len(best.turns)
    while len(ratios) < ROUNDS or (_spread(ratios) > _WIDE and len(ratios) < MOST_ROUNDS):
        _turns(world, [best, candidate], 1)
        ratios.append(candidate.turns[-1].samples_per_s / best.turns[-1].samples_per_s)
    its = max(turn.samples_per_s for turn in best.turns[before:])
    fastest = candidate.fastest.samples_per_s / its
    return _Tried(candidate, ratios, helps=fastest > 1 + NOISE and median(ratios) > 1)


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


def variant(job: Job, settings: Settings, source: Source) -> Job:
    """Return a job with other settings that trains the same model on a source of its own."""
    world = job.world
    plan = make_plan(settings, source.num_samples, world.world_size, resumed=False)
    phases = make_phases(world.device)
    compiles = what_compiles(settings, world, job.trainee.model)
    step = make_step(
        compiles,
        job.trainee,
        settings,
        world,
        plan,
        source.steps_per_block(plan.global_batch_size),
        phases,
    )
    return replace(
        job,
        settings=settings,
        plan=replace(plan, total_steps=ENDLESS),
        step=step,
        train=source,
        validation=None,
        position=Position(),
        phases=phases,
        loss_sum=0.0,
        agreement=Agreement(world, Received(), None),
        save=lambda *_: {"event": "checkpoint"},
    )


def _open(value: int, job: Job, world: World) -> Candidate:
    """Make a candidate, and let it train for a moment: workers start, and its speed shows."""
    job.settings = replace(
        job.settings,
        log_every=1,
        eval_every_steps=None,
        checkpoint_every_steps=None,
        checkpoint_every_minutes=None,
        patience=None,
    )
    workers = job.settings.num_workers
    prefetched = 2 * workers + 2 if workers else 1
    records = _steps(job)
    for _ in range(prefetched + 2):
        next(records)
    began, steps = time.perf_counter(), 0
    while world.broadcast(time.perf_counter() - began < TURN_S):
        next(records)
        steps += 1
    # From here on a record comes several times a turn, and none of them costs anything.
    each = (time.perf_counter() - began) / max(1, steps)
    log_every = world.broadcast(max(1, round(TURN_S / 4 / each)))
    job.settings = replace(job.settings, log_every=log_every)
    return Candidate(value, job, _steps(job), prefetched)


def _steps(job: Job) -> Iterator[Record]:
    return (record for record in train(job) if record["event"] == "step")


def _turns(world: World, candidates: list[Candidate], rounds: int) -> None:
    for _ in range(rounds):
        for candidate in candidates:
            candidate.turns.append(Turn(*world.broadcast(tuple(_turn(candidate)))))


def _turn(candidate: Candidate) -> Turn:
    """Train for a moment."""
    job, every = candidate.job, candidate.job.settings.log_every
    job.phases.begin()
    for _ in range(1 + candidate.prefetched // every):
        next(candidate.records)
    before, trained = job.position.step, job.position.samples
    waited = job.phases.running().get("data", 0.0)
    began = time.perf_counter()
    for _ in range(4):
        next(candidate.records)
    seconds = time.perf_counter() - began
    steps, samples = job.position.step - before, job.position.samples - trained
    data = job.phases.running().get("data", 0.0) - waited
    return Turn(seconds / steps, samples / seconds, data / steps)


def _row(one: _Tried, first: Candidate) -> Row:
    turn = one.candidate.fastest
    return Row(
        value=one.candidate.value,
        seconds=turn.seconds,
        samples_per_s=turn.samples_per_s,
        ratio=turn.samples_per_s / first.fastest.samples_per_s,
        low=min(one.ratios),
        high=max(one.ratios),
        data=turn.data,
        helps=one.helps,
    )


def _close(candidate: Candidate) -> None:
    candidate.records = iter(())
    candidate.job.train.close()
