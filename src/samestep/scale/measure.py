"""One measurement, on every rank: a run's own loop, timed; no evaluations, no checkpoints."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from samestep.execution.request import Request
from samestep.execution.session import NATIVE, Engine, Task, run_session
from samestep.machine import usable_cores
from samestep.ranks.world import World
from samestep.recipe import Splits
from samestep.run.files import write_text
from samestep.run.records import Record
from samestep.scale.study import FILE, Measurement, Segment
from samestep.settings import Settings
from samestep.training.loop import Job, epoch_record, train
from samestep.training.stopping import Received

SEGMENTS = 8
_WARM_STEPS, _WARM_S = 5, 0.3
_FOREVER = 10**9
# Tells all ranks, by the way that signals take, that the time is up; nobody sends this one.
_TIME_IS_UP = int(signal.SIGABRT)

Account = dict[str, float]


def measure(
    request: Request,
    world: World,
    received: Received,
    sizes: tuple[int, int, str],
    seconds: float,
    started_at: float,
) -> int:
    """Train for some seconds and leave a `Measurement` in the run's directory.

    Args:
        request: what to train; its batch sizes and its end are replaced.
        world: this rank among the others, joined.
        received: the stop signal of this process.
        sizes: global batch size, batch size, and the run's directory.
        seconds: to measure, after warming up.
        started_at: when the user's command began.

    Returns:
        The signal that stopped it, or 0.
    """
    global_batch, batch, path = sizes
    stopwatch = _Stopwatch(received, seconds)
    outcome = run_session(
        replace(
            request,
            recipe=replace(request.recipe, data=_training_part(request.recipe.data)),
            settings=_settings(request.settings, global_batch, batch, path),
        ),
        world,
        received=received,
        show=_ignore,
        begin=_ignore,
        started_at=started_at,
        engine=Engine(wrap=NATIVE.wrap, drive=stopwatch.drive),
    )
    if outcome.signum == 0:
        facts = world.gather((world.node, _gpu(world), tuple(sorted(usable_cores()))))
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
    """Return what loads the training set of a recipe alone: nothing is evaluated here."""

    def load(*options: Any) -> Splits:
        splits: Splits = data(*options)
        return replace(splits, validation=None, test=None)

    return load


def _settings(settings: Settings, global_batch: int, batch: int, path: str) -> Settings:
    return replace(
        settings,
        run_dir=path,
        epochs=None,
        max_steps=_FOREVER,
        global_batch_size=global_batch,
        batch_size=batch,
        accumulate=None,
        patience=None,
        monitor=None,
        keep_top_k=None,
        eval_every_steps=None,
        checkpoint_every_steps=None,
        checkpoint_every_minutes=None,
        checkpoint_every_epochs=_FOREVER,
    )


class _Stopwatch:
    """Drive a job until enough is measured; cut what is measured into segments."""

    def __init__(self, received: Received, seconds: float) -> None:
        self._received, self._seconds = received, seconds
        self.segments: list[Segment] = []
        self.num_samples = 0
        """Of the training set."""
        self._whole: Account = {}
        """Seconds in each phase, of the epochs that are over."""
        self._cut: tuple[int, int, Account] | None = None
        """Steps, samples and seconds where the running segment began."""

    def drive(self, task: Task) -> None:
        job = task.job
        self.num_samples = job.plan.num_samples
        job.save = lambda _job, _name, _metric: {"event": "progress"}
        with _one_segment_at_a_time(self._received):
            for record in train(job):
                if record["event"] == "epoch":
                    self._whole = _add(self._whole, record["phases"])
                    task.emit(record)
                elif record["event"] in ("step", "progress"):
                    self._look(job)
                    task.emit(record)
            if job.signum == _TIME_IS_UP:
                if job.position.step_in_epoch:
                    task.emit(epoch_record(job))  # so that other tools can read a kept run
                job.signum, job.stop_reason = 0, "measured"

    def _look(self, job: Job) -> None:
        """Close the segment if it is long enough, and call the end when there are enough."""
        seconds = job.phases.seconds()  # on a GPU the host waits for it here, a few times a second
        now = (job.position.step, job.position.samples, _add(self._whole, seconds))
        if self._cut is None:
            if now[0] >= _WARM_STEPS and sum(now[2].values()) >= _WARM_S:
                self._cut = now
            return
        steps, samples, before = self._cut
        passed = _add(now[2], before, -1)
        if sum(passed.values()) < self._seconds / SEGMENTS:
            return
        self.segments.append(Segment(steps=now[0] - steps, samples=now[1] - samples, phases=passed))
        self._cut = now
        enough = sum(segment.seconds for segment in self.segments) >= self._seconds
        if enough and len(self.segments) > 1 and job.world.is_main and not self._received.signum:
            self._received.signum = _TIME_IS_UP


@contextmanager
def _one_segment_at_a_time(received: Received) -> Iterator[None]:
    """Take the call to the end back afterwards: another measurement may follow."""
    try:
        yield
    finally:
        if received.signum == _TIME_IS_UP:
            received.signum = 0


def _add(one: Mapping[str, float], other: Mapping[str, float], sign: int = 1) -> Account:
    return {name: one.get(name, 0.0) + sign * other.get(name, 0.0) for name in {**one, **other}}


def _gpu(world: World) -> str:
    if world.device.type == "cuda":
        return str(torch.cuda.get_device_properties(world.device).uuid)
    return "mps" if world.device.type == "mps" else ""


def _ignore(_: Record | Path) -> None:
    """Show nothing: rank 0 speaks through what it leaves."""
