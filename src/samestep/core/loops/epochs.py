"""The epochs of a user's own loop: their records and checkpoints, when they end, which is best."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from samestep.base.errors import UserError, did_you_mean
from samestep.base.run.files import read_object
from samestep.core.data.keyed_random import mix, seed_alike
from samestep.core.data.order import steps_per_epoch
from samestep.core.loops.kept_state import Stateful
from samestep.core.loops.loop_session import OwnSession
from samestep.core.loops.place import (
    AFTER_BATCHES,
    AFTER_EPOCHS,
    BEFORE_BATCHES,
    BEFORE_EPOCHS,
    LoopState,
)
from samestep.core.session.saver import say
from samestep.core.training.agreement import is_checked
from samestep.core.training.meter import Clock
from samestep.core.training.plan import is_recorded, steps_between_records
from samestep.core.training.stopping import Watch
from samestep.launch.ranks import watched

_EPOCH_BEGINS, _EPOCH_ENDS = 1, 2
"""Tags of the seeds for what is drawn around the batches of an epoch; a validation's is 3."""


class OwnEpochs:
    """The epochs of a run, on this rank."""

    def __init__(self, own: OwnSession, loop: LoopState) -> None:
        self._own, self._loop = own, loop
        self._num_epochs = 0
        self._log_every = own.options.log_every
        self._summed_up = False
        """Whether the running epoch has its record."""

    def train(self, num_epochs: int, state: Mapping[str, Stateful]) -> Iterator[int]:
        """Yield the epochs that are to be trained; see `OwnRun.epochs`."""
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise UserError(f"run.epochs({num_epochs!r}): it must be a whole number from 1.")
        own, loop = self._own, self._loop
        own.track(state, num_epochs)
        self._num_epochs, position = num_epochs, own.position
        own.clock = Clock(position)
        if own.finished and num_epochs > own.finished["epochs"]:
            own.finished = None  # the script asks for more epochs now
        if not self._goes_on:
            self._nothing_to_train()
        while self._goes_on:
            loop.place = BEFORE_BATCHES
            self._summed_up = False
            loop.means, own.metric = {}, None
            self.seed(_EPOCH_BEGINS)
            yield position.epoch
            loop.check_place("the next epoch", AFTER_BATCHES)
            self._close()
            if own.world.connected and own.agreement.on(int(own.finished is not None)):
                own.finished = own.finished or {"reason": "", "epochs": num_epochs}
            every = own.options.checkpoint_every_steps
            due = position.epoch % own.options.checkpoint_every_epochs == 0 or bool(
                every and position.step % every == 0
            )
            if own.is_best_on_all() or due or not self._goes_on:
                own.save()
            own.stop_on(own.agreement.on(own.received.signum))
        own.settle()
        loop.place = AFTER_EPOCHS
        self.seed(_EPOCH_BEGINS)

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch is still to be trained, or to be completed."""
        position, finished = self._own.position, self._own.finished is not None
        return position.epoch < self._num_epochs and (not finished or position.step_in_epoch > 0)

    def _nothing_to_train(self) -> None:
        own = self._own
        result = own.world.on_main(lambda: read_object(own.path / "result.json"))
        ended = result.get("status") == "completed" and result.get("steps") == own.position.step
        if not ended:  # the end of the run is still to be recorded
            sizes = own.order["num_samples"], own.order["global_batch_size"]
            steps = steps_per_epoch(*sizes, drop_last=own.order["drop_last"])
            self.begin(own.order, steps)
        why = f" ({own.finished['reason']})" if own.finished else ""
        say(own.world, f"{own.path} has its {own.position.epoch} epochs{why}: nothing to train.")

    def finish(self, reason: str) -> None:
        """Let this epoch be the last."""
        self._own.finished = {"reason": reason, "epochs": self._num_epochs}

    def best(self, name: str, mode: Literal["min", "max"]) -> bool:
        """Return whether a mean is the best so far; see `OwnRun.best`."""
        own, means = self._own, self._loop.means
        call = f"run.best({name!r}, mode={mode!r})"
        watch = own.watch or Watch(metric=name, mode=mode)
        if mode not in ("min", "max"):
            raise UserError(f"{call}: it must be 'min' or 'max'.")
        if (watch.metric, watch.mode) != (name, mode):
            raise UserError(
                f"{call}: the best checkpoint of this run is chosen by {watch.metric!r}, "
                f"{watch.mode!r}. A run has one such measure."
            )
        if name not in means:
            raise UserError(
                f"run.best({name!r}): there is no such mean. {did_you_mean(name, means)}"
                f"run.means has: {', '.join(means) or 'nothing'}. Call it after the batches, "
                "or after run.validation, in which run.log is given the value."
            )
        if own.metric is None:  # the first call of the epoch
            own.metric = means[name]
            own.watch = watch.after(own.metric, own.position.epoch + 1, 0.0)
        return own.is_best()

    def leave(self) -> None:
        """Save where the script has left its loops, if it is not saved yet; all ranks call it."""
        own, loop = self._own, self._loop
        if loop.place == AFTER_BATCHES:
            self._close()
            loop.place = AFTER_EPOCHS
            own.is_best_on_all()
            if self._goes_on:
                own.left = f"left after epoch {own.position.epoch} of {self._num_epochs}"
        if loop.place != BEFORE_EPOCHS:
            own.save()
            own.settle()

    def _close(self) -> None:
        self.sum_up()  # if the script left its batches by break
        position = self._own.position
        position.epoch, position.step_in_epoch = position.epoch + 1, 0
        position.epoch_started_s = position.seconds
        self._own.means.clear()

    # --- the steps of an epoch

    def begin(self, order: dict[str, Any], num_steps: int) -> None:
        """Begin an epoch whose data is known; the first one also begins the records of the run."""
        own, total, steps = self._own, order["global_batch_size"], num_steps * self._num_epochs
        self._log_every = own.options.log_every or steps_between_records(steps)
        sizes = {
            "num_samples": order["num_samples"],
            "global_batch_size": total,
            "micro_batch_size": -(-total // own.world.world_size),
            "accumulate": 1,
            "steps_per_epoch": num_steps,
            "epochs": self._num_epochs,
            "total_steps": steps,
            "log_every": self._log_every,
        }
        own.begin(order, sizes)

    def count(self, num_samples: int) -> None:
        """Count a step, and its samples on all ranks."""
        if self._own.carried is not None:
            self._own.carried.settle()
        position = self._own.position
        position.step, position.step_in_epoch = position.step + 1, position.step_in_epoch + 1
        position.samples += num_samples

    def after_step(self, *, is_last: bool) -> None:
        """Record the step; save and stop where that is due within the epoch."""
        own = self._own
        position, means = own.position, own.means
        own.session.beat()
        watched.step(position.step)
        if is_recorded(position.step, self._log_every):
            own.record(means.of_step())
        means.next_step()
        if is_checked(position.step - 1, position.step):
            own.check_weights()
        signum = own.agreement.after(position.step).signum
        every = own.options.checkpoint_every_steps
        saves = every is not None and position.step % every == 0 and not is_last
        if saves or signum:
            own.check_loss(means.read())
            position.seconds = own.clock.seconds()
            own.save()
            own.clock.resume(position)
        own.stop_on(signum)

    def sum_up(self) -> None:
        """Sum up the epoch, once."""
        if self._summed_up:
            return
        self._summed_up = True
        own = self._own
        position, order = own.position, own.order
        means = self._loop.means = own.means.read()
        own.check_loss(means)
        position.seconds = own.clock.seconds()
        self.seed(_EPOCH_ENDS)
        if "loss" not in means:
            return
        # Those of its steps: the last batch is smaller, and the script may have left by break.
        samples = min(position.step_in_epoch * order["global_batch_size"], order["num_samples"])
        seconds = position.seconds - position.epoch_started_s
        others = {name: value for name, value in means.items() if name != "loss"}
        own.session.emit(
            {
                "event": "epoch",
                "epoch": position.epoch + 1,
                "step": position.step,
                "loss": means["loss"],
                "samples": samples,
                "train_seconds": seconds,
                "samples_per_s": samples / max(seconds, 1e-9),
                **({"metrics": others} if others else {}),
            }
        )

    def seed(self, *tags: int) -> None:
        """Seed what the script draws around the batches: the same numbers on each rank.

        The epoch decides: a run resumed within it draws what it had drawn before the batches.
        """
        # Five parts and more, so that no step of a rank is seeded alike.
        own = self._own
        seed_alike(mix(own.options.seed, 0, 0, own.position.epoch, *tags))
