"""A scaling study: which batch sizes each number of ranks is measured at, and one measurement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from signal import Signals
from typing import Any, Literal

import msgspec
import torch

from samestep.base.errors import UserError
from samestep.base.machine import usable_cores
from samestep.base.run.files import write_text
from samestep.base.settings import Settings
from samestep.base.words import count
from samestep.core.plan import ENDLESS, make_plan
from samestep.core.recipe import Splits
from samestep.core.recipe_checks import with_options
from samestep.core.session.request import Request
from samestep.core.session.training_run import NATIVE, Engine, Shown, Task, run_session
from samestep.core.training.loop import rehearse
from samestep.core.training.meter import Meter, epoch_record
from samestep.core.training.stopping import Agreement, ReceivedSignal
from samestep.core.training.work import State, Work, epoch_is_full
from samestep.launch.ranks.world import World

Mode = Literal["weak", "strong"]
FILE = "measurement.json"


@dataclass(frozen=True)
class Setup:
    """One number of ranks with its batch sizes."""

    mode: Mode
    ranks: int
    global_batch_size: int
    micro_batch_size: int  # most samples per rank and micro-step


@dataclass(frozen=True, kw_only=True)
class Study:
    """All setups to measure; the others are compared with the smallest number of ranks."""

    setups: tuple[Setup, ...]  # the first has the smallest number of ranks, and serves both modes
    left_out: tuple[str, ...] = ()  # sentences on what cannot be measured, and why

    @property
    def base(self) -> Setup:
        """The smallest number of ranks."""
        return self.setups[0]

    def of(self, mode: Mode) -> list[Setup]:
        """Return the setups of one mode, the base first."""
        return [self.base, *(s for s in self.setups[1:] if s.mode == mode)]


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive steps of a measurement."""

    steps: int
    samples: int
    phases: dict[str, float]  # seconds in each phase, on rank 0

    @property
    def seconds(self) -> float:
        """The seconds of all phases."""
        return sum(self.phases.values())


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One setup in one round."""

    segments: list[Segment]
    device: str
    threads: int  # CPU threads per rank
    cores: int  # cores that the ranks of rank 0's node may use together
    num_samples: int  # of the training set
    sharing_gpu: int = 0  # number of ranks that share a GPU


class MeasurementTask(msgspec.Struct, frozen=True, kw_only=True):
    """What started ranks measure: all setups of their number, one after the other."""

    setups: list[tuple[int, int, str]]
    """(global batch size, micro-batch size, run directory) of each."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredSetup:
    """A setup and its measurements, one per round."""

    setup: Setup
    rounds: list[Measurement]

    @property
    def segments(self) -> list[Segment]:
        """The segments of all rounds."""
        return [segment for measurement in self.rounds for segment in measurement.segments]


def samples_per_s(segments: Sequence[Segment]) -> float:
    """Return the samples per second over some segments."""
    return sum(s.samples for s in segments) / sum(s.seconds for s in segments)


def plan_study(settings: Settings, sizes: Sequence[int], modes: Sequence[Mode]) -> Study:
    """Plan batch sizes: weak scaling keeps a rank's batch, strong scaling the global one."""
    base = _setup(settings, modes[0], sizes[0])
    setups = [base]
    left_out = []
    for ranks, mode in product(sizes[1:], modes):
        total = base.global_batch_size
        if mode == "weak":
            total = total * ranks // base.ranks
        own = with_sizes(settings, total, base.micro_batch_size)
        try:
            setups.append(_setup(own, mode, ranks))
        except UserError as error:
            left_out.append(f"{mode} scaling at {ranks} ranks is left out: {error}")
    if len(setups) == 1:
        raise UserError(" ".join(left_out))
    return Study(setups=tuple(setups), left_out=tuple(left_out))


def with_sizes(settings: Settings, global_batch: int, micro_batch: int) -> Settings:
    """Return the settings with these batch sizes in place of their own."""
    return replace(
        settings,
        batch_size=global_batch,
        batch_size_per_rank=None,
        batch_tokens=None,
        micro_batch_size=micro_batch,
        accumulate=None,
    )


def _setup(settings: Settings, mode: Mode, ranks: int) -> Setup:
    plan = make_plan(replace(settings, epochs=1, max_steps=None), 10**12, ranks)
    return Setup(mode, ranks, plan.global_batch_size, plan.micro_batch_size)


def run_study(
    study: Study,
    folder: Path,
    *,
    rounds: int,
    seconds: float,
    launch: Callable[[int, MeasurementTask], None],
    progress: Callable[[str], None],
) -> tuple[Study, list[MeasuredSetup]]:
    """Measure every setup once per round; return the study without setups that are too large."""
    measurements: dict[Setup, list[Measurement]] = {setup: [] for setup in study.setups}
    for number in range(1, rounds + 1):
        for ranks in sorted({setup.ranks for setup in study.setups}):
            setups = [setup for setup in study.setups if setup.ranks == ranks]
            if not setups:
                continue  # the training set is too small
            runs = {s: folder / f"{s.mode}-{ranks}-round-{number}" for s in setups}
            sizes = [(s.global_batch_size, s.micro_batch_size, str(run)) for s, run in runs.items()]
            launch(ranks, MeasurementTask(seconds=seconds, setups=sizes))
            speeds = []
            for setup, run in runs.items():
                measurements[setup].append(read_measurement(run))
                speed = f"{samples_per_s(measurements[setup][-1].segments):,.0f}"
                speeds.append(speed if setup is study.base else f"{setup.mode} {speed}")
            study = _without_too_large(study, measurements[study.base][0].num_samples)
            done = f"round {number} of {rounds}, {count(ranks, 'rank')}"
            progress(f"{done}: {', '.join(speeds)} samples/s")
    return study, [MeasuredSetup(setup=setup, rounds=measurements[setup]) for setup in study.setups]


def _without_too_large(study: Study, num_samples: int) -> Study:
    """Leave out the setups whose steps need more samples than the training set has."""
    if num_samples == 0:  # of a stream
        return study
    too_large = [setup for setup in study.setups if setup.global_batch_size > num_samples]
    sentences = [
        f"{setup.mode} scaling at {count(setup.ranks, 'rank')} is left out: a step of "
        f"{setup.global_batch_size:,} samples is more than the {num_samples:,} training samples."
        for setup in too_large
    ]
    left = tuple(setup for setup in study.setups if setup not in too_large)
    if study.base in too_large or len(left) < 2:
        raise UserError(f"{sentences[0]} Take a smaller --batch-size.")
    return replace(study, setups=left, left_out=(*study.left_out, *sentences))


def read_measurement(run: Path) -> Measurement:
    """Return the measurement that rank 0 wrote into the directory of a run."""
    return msgspec.json.decode((run / FILE).read_bytes(), type=Measurement)


SEGMENTS = 8
_WARM_STEPS, _WARM_S = 5, 0.3


def measure(
    request: Request,
    world: World,
    received: ReceivedSignal,
    sizes: tuple[int, int, str],
    seconds: float,
    started_at: float,
) -> int:
    """Measure (global batch, micro-batch, run directory) for so long; return the stop signal."""
    global_batch, micro_batch, path = sizes
    stopwatch = _Stopwatch(received, seconds)
    settings = replace(
        with_sizes(request.settings, global_batch, micro_batch),
        run_dir=path,
        epochs=None,
        max_steps=ENDLESS,
        patience=None,
        stop_monitor=None,
        monitor=None,
        keep_top_k=None,
        keep_newest=None,
        keep_hours=None,
        pictures=False,
    )

    def training_data(options: Any = None) -> Splits:
        splits: Splits = with_options("data", request.recipe.data, options)()
        return replace(splits, validation=None, test=None)

    recipe = replace(request.recipe, data=training_data)
    outcome = run_session(
        replace(request, recipe=recipe, settings=settings),
        world,
        received=received,
        shown=Shown(started_at=started_at),  # rank 0 writes a file instead
        engine=Engine(wrap=NATIVE.wrap, drive=stopwatch.drive),
    )
    if outcome.signum == 0:
        gpu = "mps" if world.device.type == "mps" else ""
        if world.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(world.device).uuid)
        facts = world.gather((world.node, gpu, tuple(sorted(usable_cores()))))
        here = [fact for fact in facts if fact[0] == world.node]
        gpus = [fact[:2] for fact in facts if fact[1]]
        measurement = Measurement(
            segments=stopwatch.segments,
            device=world.device.type,
            threads=torch.get_num_threads(),
            cores=len({core for _, _, cores in here for core in cores}),
            num_samples=stopwatch.num_samples,
            sharing_gpu=sum(gpus.count(gpu) > 1 for gpu in gpus),
        )
        if world.is_main:
            write_text(Path(path) / FILE, msgspec.json.encode(measurement).decode())
    return outcome.signum


class _Stopwatch:
    """Drive a training until enough is measured, in segments."""

    def __init__(self, received: ReceivedSignal, seconds: float) -> None:
        self._received, self._seconds = received, seconds
        self.segments: list[Segment] = []
        self.num_samples = 0  # of the training set
        self._cut: tuple[int, int, dict[str, float]] | None = None
        """Steps, samples and seconds at the begin of the running segment."""

    def drive(self, task: Task) -> None:
        work, state = task.work, task.state
        self.num_samples = work.plan.num_samples
        agreement = Agreement(work.world, self._received, self._is_enough)
        agreement.start(state.position.step)
        meter = Meter(work, state)
        for taken in rehearse(work, state):
            for record in meter.count(taken):
                task.session.emit(record)
                self._cut_segments(work, state)
            agreed = agreement.after(state.position.step)
            ends = agreed.signum or agreed.wished
            if ends or epoch_is_full(work, state):
                meter.settle()
                task.session.emit(epoch_record(work, state))  # for tools that read a kept run
            if ends:
                state.signum = agreed.signum
                break
        state.stop_reason = Signals(state.signum).name if state.signum else "measured"

    def _cut_segments(self, work: Work, state: State) -> None:
        seconds = work.phases.attempt()  # on a GPU the host waits here, a few times a second
        now = (state.position.step, state.position.samples, seconds)
        if self._cut is None:
            if now[0] >= _WARM_STEPS and sum(seconds.values()) >= _WARM_S:
                self._cut = now
            return
        steps, samples, before = self._cut
        passed = {name: value - before.get(name, 0.0) for name, value in seconds.items()}
        if sum(passed.values()) >= self._seconds / SEGMENTS:
            segment = Segment(steps=now[0] - steps, samples=now[1] - samples, phases=passed)
            self.segments.append(segment)
            self._cut = now

    def _is_enough(self) -> bool:
        measured = sum(segment.seconds for segment in self.segments)
        return len(self.segments) > 1 and measured >= self._seconds
