"""One measurement, on every rank: the training loop, timed, without evaluations or checkpoints."""

from dataclasses import replace
from pathlib import Path
from signal import Signals
from typing import Any

import msgspec
import torch

from samestep.machine import usable_cores
from samestep.profiling.scaling_study import FILE, Measurement, Segment, with_sizes
from samestep.ranks.world import World
from samestep.recipe import Splits
from samestep.recipe_source import with_options
from samestep.run.files import write_text
from samestep.session.request import Request
from samestep.session.training_run import NATIVE, Engine, Task, run_session
from samestep.training.loop import rehearse
from samestep.training.meter import Meter, epoch_record
from samestep.training.plan import ENDLESS
from samestep.training.stopping import Agreement, ReceivedSignal
from samestep.training.work import State, Work, epoch_is_full

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
        monitor=None,
        keep_top_k=None,
        pictures=False,
    )
    recipe = replace(request.recipe, data=_training_part(request.recipe.data))
    outcome = run_session(
        replace(request, recipe=recipe, settings=settings),
        world,
        received=received,
        show=lambda _record: None,  # rank 0 writes a file instead
        begin=lambda _path: None,
        started_at=started_at,
        engine=Engine(wrap=NATIVE.wrap, drive=stopwatch.drive),
    )
    if outcome.signum == 0:
        gpu = "mps" if world.device.type == "mps" else ""
        if world.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(world.device).uuid)
        facts = world.gather((world.node, gpu, tuple(sorted(usable_cores()))))
        here = [fact for fact in facts if fact[0] == world.node]
        gpus = [fact[:2] for fact in facts if fact[1]]
        found = Measurement(
            segments=stopwatch.segments,
            device=world.device.type,
            threads=torch.get_num_threads(),
            cores=len({core for _, _, cores in here for core in cores}),
            num_samples=stopwatch.num_samples,
            sharing_gpu=sum(gpus.count(gpu) > 1 for gpu in gpus),
        )
        if world.is_main:
            write_text(Path(path) / FILE, msgspec.json.encode(found).decode())
    return outcome.signum


def _training_part(data: Any) -> Any:

    def load(options: Any = None) -> Splits:
        splits: Splits = with_options("data", data, options)()
        return replace(splits, validation=None, test=None)

    return load


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
                self._look(work, state)
            agreed = agreement.after(state.position.step)
            ends = agreed.signum or agreed.wished
            if ends or epoch_is_full(work, state):
                meter.settle()
                task.session.emit(
                    epoch_record(work, state)
                )  # which tools that read a kept run need
            if ends:
                state.signum = agreed.signum
                break
        state.stop_reason = Signals(state.signum).name if state.signum else "measured"

    def _look(self, work: Work, state: State) -> None:
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
