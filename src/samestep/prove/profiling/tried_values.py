"""Try values of one setting in turns, stop where more does not help, write the best to a file."""

import re
import time
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from samestep.base.errors import UserError
from samestep.base.phases import make_phases
from samestep.base.settings import Settings, canonical_names
from samestep.core.data.source import Source
from samestep.core.plan import make_plan
from samestep.core.training.loop import rehearse
from samestep.core.training.steps import make_step, what_compiles
from samestep.core.training.work import State, StepsTaken, Work
from samestep.launch.ranks.world import World
from samestep.scripts.measuring.profile_report import Sweep, SweepRow
from samestep.scripts.measuring.tracing import write_whole

ROUNDS, MOST_ROUNDS = 3, 7
_WIDE = 0.15
"""More rounds follow while their ratios differ by more than this: something else is running."""
TURN_S = 0.5
NOISE = 0.03  # a value helps if it is faster in most rounds, and by more than this in the fastest
_PATIENCE = 2
"""The sweep ends after this many values without gain: one worker is often slower than none."""
_UNSURE = 0.5
"""Rounds that differ by more than this, and of which some found the value slower, are not sure."""


@dataclass
class Candidate:
    """A training with one value of the setting, which continues a little in each of its turns."""

    value: int
    work: Work
    state: State
    steps: Generator[StepsTaken]
    prefetched: int  # steps that the loader has ready after a pause, which are not measured
    each: int = 1  # calls of the step in a turn
    turns: list["Turn"] = field(default_factory=list)
    ratios: list[float] = field(default_factory=lambda: [1.0])
    """Per round, samples per second relative to the best value before it."""
    helps: bool = True

    @property
    def fastest(self) -> "Turn":
        """The least disturbed turn: whatever else runs only adds to the time."""
        return max(self.turns, key=lambda turn: turn.samples_per_s)

    def close(self) -> None:
        """End its training and its workers."""
        self.steps.close()
        self.work.train.close()


class Turn(NamedTuple):
    """What was measured in one turn."""

    seconds: float  # per step
    samples_per_s: float  # counted over all ranks: an epoch's last batch may be smaller
    data: float  # seconds per step of waiting for data


def sweep(
    world: World,
    setting: str,
    values: Sequence[int],
    make: Callable[[int], tuple[Work, State]],
    stop: Callable[[], bool] = lambda: False,
) -> Sweep:
    """Try values in ascending order, each in turns with the best so far; return what to use."""
    ordered = sorted(set(values))
    best = first = _open(ordered[0], *make(ordered[0]))
    _take_turns(world, best)
    tried = [best]
    misses = 0
    stopped = False
    for value in ordered[1:]:
        stopped = stop()
        if misses == _PATIENCE or stopped:
            break
        candidate = _open(value, *make(value))
        _compare(world, best, candidate)
        tried.append(candidate)
        misses = 0 if candidate.helps else misses + 1
        best, other = (candidate, best) if candidate.helps else (best, candidate)
        other.close()
    best.close()
    rows = tuple(
        SweepRow(
            value=candidate.value,
            **candidate.fastest._asdict(),
            ratio=candidate.fastest.samples_per_s / first.fastest.samples_per_s,
            low=min(candidate.ratios),
            high=max(candidate.ratios),
            helps=candidate.helps,
        )
        for candidate in tried
    )
    left = tuple(ordered[len(tried) :])
    sure = not any(_spread([row.low, row.high]) > _UNSURE and row.low < 1 for row in rows)
    why = ""
    if stopped:
        why = "A stop signal came: the rest was not tried."
    elif not sure:
        why = "The rounds differ too much to tell: something else uses the machine. Measure "
        why += "again on a quiet one."
    elif left:
        why = f"Not tried: {', '.join(map(str, left))}. More no longer helped."
    elif len(rows) > 1 and rows[-1].helps:
        why = "The largest value was the fastest: an even larger one may be faster still."
    return Sweep(setting=setting, rows=rows, best=best.value, skipped=left, why=why, sure=sure)


def _compare(world: World, best: Candidate, candidate: Candidate) -> None:
    """Let both take turns until their ratio is known, at most `MOST_ROUNDS` times."""
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


def variant(work: Work, settings: Settings, source: Source) -> Work:
    """Return endless work with other settings: the same model, on its own source."""
    world, learner = work.world, work.learner
    plan = make_plan(
        settings,
        source.num_samples,
        world.world_size,
        schedule=work.plan.schedule,
        by_tokens=source.token_cut,
    )
    phases = make_phases(world.device)
    compiles = what_compiles(settings, world, learner.model, own=learner.own)
    per_block = source.steps_per_block(plan.global_batch_size)
    step = make_step(compiles, learner, settings, world, plan, per_block, phases)
    changed = replace(
        work, settings=settings, plan=plan, step=step, train=source, validation=None, phases=phases
    )
    return changed.endless()


def _open(value: int, work: Work, state: State) -> Candidate:
    """Make a candidate and train it for a moment, to start its workers and see its speed."""
    world, workers = work.world, work.settings.num_workers
    prefetched = 2 * workers + 2 if workers else 1
    candidate = Candidate(value, work, state, rehearse(work, state), prefetched)
    _train_for(candidate, prefetched + 2)
    began = time.perf_counter()
    calls = 0
    while world.broadcast(time.perf_counter() - began < TURN_S):
        _train_for(candidate, 1)
        calls += 1
    # In a turn the host waits for the device once, at its end.
    each = (time.perf_counter() - began) / max(1, calls)
    candidate.each = world.broadcast(max(1, round(TURN_S / each)))
    return candidate


def _train_for(candidate: Candidate, calls: int) -> None:
    """Call the step this often, and wait until the device is done."""
    for _ in range(calls):
        taken = next(candidate.steps)
    float(taken.result.losses[-1])


def _take_turns(world: World, *candidates: Candidate) -> None:
    for candidate in candidates:
        phases, position = candidate.work.phases, candidate.state.position
        phases.begin()
        _train_for(candidate, 1 + candidate.prefetched)
        before, trained = position.step, position.samples
        waited = phases.running().get("data", 0.0)
        began = time.perf_counter()
        _train_for(candidate, candidate.each)
        seconds = time.perf_counter() - began
        steps, samples = position.step - before, position.samples - trained
        data = phases.running().get("data", 0.0) - waited
        turn = (seconds / steps, samples / seconds, data / steps)
        candidate.turns.append(Turn(*world.broadcast(turn)))


def file_to_apply(config: Path | None, recipe: str) -> Path:
    """Return the file for `apply_settings`: that of --config, or a new one named by the recipe."""
    path = config or Path(f"{recipe}.toml")
    if path.suffix in (".yaml", ".yml"):
        raise UserError(f"--apply changes only TOML, and {path} is YAML.", on_all_ranks=True)
    if config is None and path.exists():
        raise UserError(f"{path} exists: to change it, add --config {path}.", on_all_ranks=True)
    return path


def apply_settings(path: Path, values: Mapping[str, int], recipe: str) -> None:
    """Set top-level keys of a TOML file and keep all else; a new file also names its recipe."""
    text = path.read_text(encoding="utf-8") if path.exists() else f'recipe = "{recipe}"\n'
    try:
        before = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}. Nothing was changed.") from error
    written = {
        own: key for key in before for own in canonical_names({key.replace("-", "_"): 0}, path)
    }
    changes = {written.get(key, key): value for key, value in values.items()}
    table = re.search(r"\s*^[ \t]*\[", text, re.MULTILINE)
    end = table.start() if table else len(text.rstrip())
    top, tables = text[:end], text[end:]
    for key, value in changes.items():
        line = re.compile(rf"^([ \t]*{re.escape(key)}[ \t]*=[ \t]*)[^\s#]+", re.MULTILINE)
        top, count = line.subn(rf"\g<1>{value}", top)
        if not count:
            top += f"\n{key} = {value}"
    try:
        after = tomllib.loads(top + tables)
    except tomllib.TOMLDecodeError:
        after = {}
    if after != before | changes:  # a quoted key, say, or a value over several lines
        wanted = ", ".join(f"{key} = {value}" for key, value in changes.items())
        raise UserError(f"{path} is written in a form that --apply cannot change. Set: {wanted}.")
    write_whole(path, (top + tables).encode())
