"""What Lightning's Trainer tells while it trains, as the records and the account of a job."""

import signal
import time
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from samestep.execution.session import Task
from samestep.lightning.data import Part
from samestep.lightning.module import LitRecipe
from samestep.training.clock import Clock
from samestep.training.loop import close_epoch, epoch_record, evaluate_job, file_name, judge, settle
from samestep.training.parallel import tell_end_of_autograd
from samestep.training.plan import learning_rate
from samestep.training.prepare import match_layouts
from samestep.training.step import check_used
from samestep.training.window import Window


class Stopped(Exception):  # noqa: N818 - it is no error
    """All ranks have agreed to stop, and saved."""


class Records(Callback):
    """Keep the job's own account, and pass its records on."""

    def __init__(self, task: Task) -> None:
        self._task, self._job = task, task.job
        self._window = Window(self._job.world, self._job.loss_sum)
        self._clock = Clock(self._job.position)
        self._norm: float | None = None
        self._unchecked = self._job.world.world_size > 1
        # Lightning would raise at the next step; the ranks have their own way to agree on a stop.
        self._heed = signal.getsignal(signal.SIGTERM)
        self._validation_began = 0.0
        self.saving_began = 0.0
        """When the state of the newest checkpoint began to be gathered."""
        self.metric: float | None = None
        """The monitored metric of the newest evaluation, if nothing was trained since."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count."""
        del trainer, pl_module
        signal.signal(signal.SIGTERM, self._heed)
        optimizer, job = self._job.trainee.optimizer, self._job
        match_layouts(optimizer)  # Lightning has loaded its state
        optimizer.register_step_post_hook(lambda *_: job.phases.lap("optimizer"))
        job.phases.earlier = dict(job.position.phases)
        self._job.agreement.start(self._job.position.step)
        self._clock = Clock(self._job.position)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the clock: evaluations and checkpoints are no training."""
        del trainer, pl_module
        self._clock.resume(self._job.position)
        self._job.phases.begin()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Part, batch_idx: int
    ) -> None:
        """Begin to count the forward pass."""
        del trainer, pl_module, batch, batch_idx
        self._job.phases.lap("other")

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Begin to count the backward pass, and see where it ends and DDP's wait begins."""
        del pl_module
        phases = self._job.phases
        phases.lap("forward")
        if trainer.world_size > 1:
            tell_end_of_autograd(loss, lambda: phases.lap("backward"))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the backward pass, or DDP's wait; check the first, as samestep's own step does."""
        del pl_module
        self._job.phases.lap("all_reduce" if trainer.world_size > 1 else "backward")
        if self._unchecked:
            self._unchecked = False
            check_used(self._job.trainee.model)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Measure the gradient before it is clipped, where it will be recorded."""
        del optimizer
        if (trainer.global_step + 1) % self._job.settings.log_every == 0:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._norm = float(nn.utils.get_total_norm(grads))

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Part,
        batch_idx: int,
    ) -> None:
        """Count a step once its last part is done."""
        del outputs, batch_idx
        if not batch.last:
            return
        job, position = self._job, self._job.position
        part = torch.as_tensor(cast("LitRecipe", pl_module).step_loss)
        self._window.add(position.step, [part], batch.size)
        self.metric = None
        position.step += 1
        position.step_in_epoch += 1
        position.samples += batch.size
        self._tell()
        job.phases.lap("other")
        ends = position.step_in_epoch == job.plan.steps_per_epoch
        if ends or position.step == job.plan.total_steps:
            self._settle()
            self._task.emit(epoch_record(job))
        agreed = job.agreement.after(position.step)
        if position.step == job.plan.total_steps and not ends:
            # Now, not when Lightning ends the epoch: by its count this one would be over.
            if job.validation is not None:
                record, self.metric = evaluate_job(job, job.validation)
                self._task.emit(record)
            trainer.save_checkpoint(self._task.path / "checkpoints" / file_name(job))
        elif agreed.signum and not ends:
            self._settle()
            trainer.save_checkpoint(self._task.path / "checkpoints" / file_name(job))
            job.signum = agreed.signum
            job.stop_reason = signal.Signals(agreed.signum).name
            raise Stopped

    def _tell(self) -> None:
        """Pass on the `step` record if one is due, and `progress` now and then."""
        job, position = self._job, self._job.position
        lr = learning_rate(job.plan, job.settings, position.step - 1)
        due = position.step % job.settings.log_every == 0
        if due or self._window.full:
            losses = self._window.read([position.step] if due else [], lr)
            for loss in losses:
                self._task.emit(
                    {
                        "event": "step",
                        "step": position.step,
                        "epoch": position.epoch + 1,
                        "loss": loss,
                        "grad_norm": self._norm,
                        "lr": lr,
                        "samples": position.samples,
                        **self._clock.rate(position),
                    }
                )
                self._clock.mark(position)
        if self._clock.shows():
            now = {"event": "progress", "step": position.step, "samples": position.samples}
            self._task.emit(now | self._clock.rate(position))

    def _settle(self) -> None:
        job = self._job
        self._window.read([], learning_rate(job.plan, job.settings, job.position.step - 1))
        settle(job, self._window, self._clock)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count the seconds of an evaluation."""
        del trainer, pl_module
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what was measured, and close the epoch, before the checkpoint is written."""
        del trainer
        seconds = time.perf_counter() - self._validation_began
        record, self.metric = judge(self._job, cast("LitRecipe", pl_module).means, seconds)
        self._task.emit(record)
        self._close()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Begin to count the seconds of a checkpoint; its state is gathered next."""
        del trainer, pl_module, checkpoint
        self.saving_began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the epoch where nothing is validated."""
        del trainer, pl_module
        if self._job.position.step_in_epoch == self._job.plan.steps_per_epoch:
            self._close()

    def _close(self) -> None:
        close_epoch(self._job)
        self._window = Window(self._job.world, 0.0)
