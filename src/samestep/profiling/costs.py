"""What an evaluation and a checkpoint of a job cost, without waiting for one to fall due."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from samestep.data.source import Source
from samestep.errors import UserError
from samestep.profiling.tracing import unwritable
from samestep.run import checkpoints
from samestep.training.evaluation import evaluate
from samestep.training.loop import Job, evaluation_batch
from samestep.training.state import capture

_LONGEST_S = 2.0
_NAME = "profile.pt"


def every(job: Job) -> dict[str, int]:
    """Return how many steps lie between two evaluations, and between two checkpoints."""
    settings, epoch = job.settings, job.plan.steps_per_epoch
    evaluation = settings.eval_every_epochs * epoch
    saving = settings.checkpoint_every_epochs * epoch
    return {
        "evaluation": min(evaluation, settings.eval_every_steps or evaluation),
        "checkpoint": min(saving, settings.checkpoint_every_steps or saving),
    }


def evaluation_seconds(job: Job) -> float:
    """Return the seconds of an evaluation; of a long one a part is done, the rest follows."""
    assert job.validation is not None
    batch = evaluation_batch(job.plan.batch_size)
    share = -(-job.validation.num_samples // job.world.world_size)
    part = _Part(job.validation)
    evaluate(
        job.trainee.model,
        cast("Source", part),
        job.trainee.loss,
        job.metrics,
        world=job.world,
        batch_size=batch,
        precision=job.settings.precision,
    )
    mine = part.seconds / max(1, part.batches) * -(-share // batch)
    return max(job.world.gather(mine))


class _Part:
    """A source whose evaluation ends early, and says how far it came."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.seconds = 0.0
        self.batches = 0

    def evaluation(self, batch_size: int) -> Iterator[tuple[Any, Any]]:
        """Yield batches until the time is up."""
        began = time.perf_counter()
        for batch in self._source.evaluation(batch_size):
            yield batch
            self.batches += 1
            self.seconds = time.perf_counter() - began
            if self.seconds > _LONGEST_S:
                return


def checkpoint_seconds(job: Job, path: Path) -> float:
    """Return the seconds of a checkpoint, written to where the run's would be and removed."""
    folder = path / "checkpoints"

    def write() -> None:
        try:
            checkpoints.save(folder, _NAME, state)
        except UserError as error:
            raise unwritable(folder / _NAME, error.__cause__) from error
        (folder / _NAME).unlink()

    began = time.perf_counter()
    state = capture(job, "profile")
    job.world.on_main(write)
    return time.perf_counter() - began
