"""What an evaluation and a checkpoint cost, without waiting for one to fall due."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from samestep.data.blocks import Batch
from samestep.data.source import Source
from samestep.errors import UserError
from samestep.profiling.tracing import unwritable
from samestep.run import checkpoints
from samestep.training.evaluation import evaluation_batch
from samestep.training.loop import evaluate_work
from samestep.training.snapshot import capture
from samestep.training.work import State, Work

_LONGEST_S = 2.0
_NAME = "profile.pt"


def every(work: Work) -> dict[str, int]:
    """Return how many steps lie between two evaluations, and between two checkpoints."""
    settings, epoch = work.settings, work.plan.steps_per_epoch
    evaluation = settings.eval_every_epochs * epoch
    saving = settings.checkpoint_every_epochs * epoch
    return {
        "evaluation": min(evaluation, settings.eval_every_steps or evaluation),
        "checkpoint": min(saving, settings.checkpoint_every_steps or saving),
    }


def evaluation_seconds(work: Work) -> float:
    """Return the seconds of an evaluation, if there is one; of a long one a part is done."""
    if work.validation is None:
        return 0.0
    share = -(-work.validation.num_samples // work.world.world_size)
    part = _Part(work.validation)
    evaluate_work(replace(work, forward=None), part)  # compiling happens once, and is no part of it
    if work.world.device.type == "cuda":  # the host was ahead; by now it has read the sums
        part.seconds = time.perf_counter() - part.began
    batches = -(-share // evaluation_batch(work.settings, work.plan.micro_batch_size))
    return max(work.world.gather(part.seconds / max(1, part.batches) * batches))


class _Part:
    """A source whose evaluation ends early, and says how far it came."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.began = self.seconds = 0.0
        self.batches = 0

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        """Yield batches until the time is up."""
        self.began = time.perf_counter()
        for batch in self._source.evaluation(batch_size):
            yield batch
            self.batches += 1
            self.seconds = time.perf_counter() - self.began
            if self.seconds > _LONGEST_S:
                return


def checkpoint_seconds(work: Work, state: State, path: Path) -> float:
    """Return the seconds of a checkpoint, written to where the run's would be and removed."""
    folder = path / "checkpoints"

    def write() -> None:
        try:
            checkpoints.save(folder, _NAME, content)
        except UserError as error:
            raise unwritable(folder / _NAME, error.__cause__) from error
        (folder / _NAME).unlink()

    began = time.perf_counter()
    content = capture(work, state, "profile")
    work.world.on_main(write)
    return time.perf_counter() - began
