"""What Lightning's Trainer tells while it trains, as records and as the state of a training."""

import signal
import time
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from samestep.lightning.data import Part
from samestep.lightning.module import LitRecipe
from samestep.session.training_run import Task
from samestep.training.alike import is_checked
from samestep.training.loop import checkpoint_name, evaluate_now, judge
from samestep.training.meter import Meter, epoch_record
from samestep.training.metrics import StepOutputs
from samestep.training.plan import is_recorded, learning_rate
from samestep.training.prepare import match_layouts, tell_end_of_autograd
from samestep.training.snapshot import check_alike
from samestep.training.step import StepResult, check_used
from samestep.training.work import StepsTaken, close_epoch, epoch_is_full


class Stopped(Exception):  # noqa: N818 - it is no error
    """All ranks have agreed to stop, and saved."""


class Records(Callback):
    """Keep the state up to date, and pass the records on."""

    def __init__(self, task: Task) -> None:
        self._task, self._work, self._state = task, task.work, task.state
        self._meter = Meter(task.work, task.state)
        self._norm: Tensor | None = None
        self._unchecked = task.work.world.world_size > 1 and not task.work.settings.allows_unused
        # Lightning would raise at the next step; the ranks have their own way to agree on a stop.
        self._heed = signal.getsignal(signal.SIGTERM)
        self._validation_began = 0.0
        self.saving_began = 0.0
        """When the state of the newest checkpoint began to be gathered."""
        self.metric: float | None = None
        """The monitored metric of the newest evaluation, if nothing was trained since."""

    def on_train_start(self, *_: Any) -> None:
        """Begin to count."""
        signal.signal(signal.SIGTERM, self._heed)
        optimizer, phases = self._work.learner.optimizer, self._work.phases
        match_layouts(optimizer)  # Lightning has loaded its state
        optimizer.register_step_post_hook(lambda *_: phases.lap("optimizer"))
        self._task.control.agreement.start(self._state.position.step)
        self._meter = Meter(self._work, self._state)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Go on with the clock: evaluations and checkpoints are no training."""
        self._meter.resume()

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin to count the forward pass."""
        self._work.phases.lap("other")

    def on_before_backward(self, trainer: Trainer, _: LightningModule, loss: Tensor) -> None:
        """Begin to count the backward pass, and see where it ends and DDP's wait begins."""
        phases = self._work.phases
        phases.lap("forward")
        if trainer.world_size > 1:
            tell_end_of_autograd(loss, lambda: phases.lap("backward"))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward pass, or DDP's wait; check the first, as samestep's own step does."""
        self._work.phases.lap("all_reduce" if trainer.world_size > 1 else "backward")
        if self._unchecked:
            self._unchecked = False
            check_used(self._work.learner.model)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, _: torch.optim.Optimizer
    ) -> None:
        """Measure the gradient before it is clipped, where it will be recorded."""
        if is_recorded(trainer.global_step + 1, self._work.plan.log_every):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._norm = nn.utils.get_total_norm(grads)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, _: Any, batch: Part, batch_idx: int
    ) -> None:
        """Count a step once its last part is done."""
        if not batch.last:
            return
        work, state, between = self._work, self._state, self._task.control
        position, total = state.position, work.plan.total_steps
        part = torch.as_tensor(cast("LitRecipe", pl_module).step_loss)
        taken = self._taken(part, batch.size, cast("LitRecipe", pl_module).take_seen())
        self.metric = None
        position.step += 1
        position.step_in_epoch += 1
        position.samples += batch.size
        for record in self._meter.count(taken):
            self._task.emit(record)
        if is_checked(position.step - 1, position.step):
            check_alike(work, position.step)
        work.phases.lap("other")
        ends = epoch_is_full(work, state)
        if ends or position.step == total:
            self._meter.settle()
            self._task.emit(epoch_record(work, state))
        agreed = between.agreement.after(position.step)
        if position.step == total and not ends:
            # Now, not when Lightning ends the epoch: by its count this one would be over.
            if work.validation is not None:
                record, self.metric = evaluate_now(work, state, work.validation)
                self._task.emit(record)
            self._save(trainer)
        elif agreed.signum and not ends:
            self._meter.settle()
            self._save(trainer)
            state.signum = agreed.signum
            state.stop_reason = signal.Signals(agreed.signum).name
            raise Stopped

    def _taken(self, loss: Tensor, size: int, seen: list[StepOutputs]) -> StepsTaken:
        """Return the step that has just been taken."""
        first, work = self._state.position.step, self._work
        logged = [first + 1] if is_recorded(first + 1, work.plan.log_every) else []
        norms = None if self._norm is None else [self._norm]
        lrs = [learning_rate(work.plan, work.settings, first)]
        return StepsTaken(first, size, lrs, logged, StepResult([loss], norms, seen=seen))

    def _save(self, trainer: Trainer) -> None:
        trainer.save_checkpoint(
            self._task.session.path / "checkpoints" / checkpoint_name(self._state.position)
        )

    def on_validation_start(self, *_: Any) -> None:
        """Begin to count the seconds of an evaluation."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what was measured, and close the epoch, before the checkpoint is written."""
        seconds = time.perf_counter() - self._validation_began
        means = cast("LitRecipe", pl_module).means
        record, self.metric = judge(self._work, self._state, means, seconds)
        self._task.emit(record)
        close_epoch(self._work, self._state)

    def on_save_checkpoint(self, *_: Any) -> None:
        """Begin to count the seconds of a checkpoint; its state is gathered next."""
        self.saving_began = time.perf_counter()

    def on_train_epoch_end(self, *_: Any) -> None:
        """Close the epoch where nothing is validated."""
        if epoch_is_full(self._work, self._state):
            close_epoch(self._work, self._state)
