"""The epochs of a user's own loop: their records and checkpoints, when they end, which is best."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from samestep.base.errors import UserError, did_you_mean
from samestep.base.run.files import read_object
from samestep.core.data.keyed_random import mix, seed_alike
from samestep.core.data.order import steps_per_epoch
from samestep.core.learner.agreement import is_checked
from samestep.core.loops.forgotten import Forgotten
from samestep.core.loops.gradients import meet
from samestep.core.loops.kept_state import Stateful
from samestep.core.loops.loop_session import LoopSession
from samestep.core.loops.place import (
    AFTER_BATCHES,
    AFTER_EPOCHS,
    BEFORE_BATCHES,
    BEFORE_EPOCHS,
    LoopState,
)
from samestep.core.plan import is_recorded, steps_between_records
from samestep.core.session.saver import say
from samestep.core.training.meter import Clock
from samestep.core.training.stopping import Watch
from samestep.launch.ranks import watched

_EPOCH_BEGINS, _EPOCH_ENDS = 1, 2
"""Tags of the seeds for what is drawn around the batches of an epoch; a validation's is 3."""


class LoopEpochs:
    """The epochs of a run, on this rank."""

    def __init__(self, opened: LoopSession, loop: LoopState) -> None:
        self._opened, self._loop = opened, loop
        self._num_epochs = 0
        self._log_every = opened.options.log_every
        self._summed_up = False
        """Whether the running epoch has its record."""

    def train(self, num_epochs: int, state: Mapping[str, Stateful]) -> Iterator[int]:
        """Yield the epochs that are to be trained; see `OwnRun.epochs`."""
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise UserError(f"run.epochs({num_epochs!r}): it must be a whole number, 1 or more.")
        opened, loop = self._opened, self._loop
        opened.track(state, num_epochs)
        self._num_epochs, position = num_epochs, opened.position
        opened.clock = Clock(position)
        variables = Forgotten(opened.values, state.values())
        if opened.finished and num_epochs > opened.finished["epochs"]:
            opened.finished = None  # the script asks for more epochs now
        if not self._goes_on:
            self._nothing_to_train()
        while self._goes_on:
            loop.place = BEFORE_BATCHES
            self._summed_up = False
            loop.means, opened.metric = {}, None
            if note := variables.look():
                opened.left_out.say(note)
            self.seed(_EPOCH_BEGINS)
            yield position.epoch
            loop.check_place("the next epoch", AFTER_BATCHES)
            meet(opened.world, "the end of the epoch")
            self._close()
            if opened.world.connected and opened.agreement.on(int(opened.finished is not None)):
                opened.finished = opened.finished or {"reason": "", "epochs": num_epochs}
            every = opened.options.checkpoint_every_steps
            due = position.epoch % opened.options.checkpoint_every_epochs == 0 or bool(
                every and position.step % every == 0
            )
            if opened.is_best_on_all() or due or not self._goes_on:
                opened.save()
            opened.stop_on(opened.agreement.on(opened.received.now))
        opened.settle()
        loop.place = AFTER_EPOCHS
        self.seed(_EPOCH_BEGINS)

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch is still to be trained, or to be completed."""
        position, finished = self._opened.position, self._opened.finished is not None
        return position.epoch < self._num_epochs and (not finished or position.step_in_epoch > 0)

    def _nothing_to_train(self) -> None:
        opened = self._opened
        result = opened.world.on_main(lambda: read_object(opened.path / "result.json"))
        ended = result.get("status") == "completed" and result.get("steps") == opened.position.step
        if not ended:  # the end of the run is still to be recorded
            sizes = opened.order["num_samples"], opened.order["global_batch_size"]
            steps = steps_per_epoch(*sizes, drop_last=opened.order["drop_last"])
            self.begin(opened.order, steps)
        why = f" ({opened.finished['reason']})" if opened.finished else ""
        say(
            opened.world,
            f"{opened.path} has all its {opened.position.epoch} epochs{why}: nothing to train.",
        )

    def finish(self, reason: str) -> None:
        """Let this epoch be the last."""
        self._opened.finished = {"reason": reason, "epochs": self._num_epochs}

    def best(self, name: str, mode: Literal["min", "max"]) -> bool:
        """Return whether a mean is the best so far; see `OwnRun.best`."""
        opened, means = self._opened, self._loop.means
        call = f"run.best({name!r}, mode={mode!r})"
        watch = opened.watch or Watch(metric=name, mode=mode)
        if mode not in ("min", "max"):
            raise UserError(f"{call}: mode must be 'min' or 'max'.")
        if (watch.metric, watch.mode) != (name, mode):
            raise UserError(
                f"{call}: the best checkpoint of this run is chosen by {watch.metric!r}, "
                f"{watch.mode!r}. A run has one such measure."
            )
        if name not in means:
            raise UserError(
                f"run.best({name!r}): there is no such mean. {did_you_mean(name, means)}"
                f"run.means has: {', '.join(means) or 'nothing'}. Call it after the batches, "
                "or after a run.validation in which you run.log the value."
            )
        if opened.metric is None:  # the first call of the epoch
            opened.metric = means[name]
            opened.watch = watch.after(opened.metric, opened.position.epoch + 1, 0.0)
        return opened.is_best()

    def leave(self, call: str = "the end of open_run") -> None:
        """Save where the script has left its loops, if it is not saved yet; all ranks call it."""
        opened, loop = self._opened, self._loop
        meet(opened.world, call)
        if loop.place == AFTER_BATCHES:
            self._close()
            loop.place = AFTER_EPOCHS
            opened.is_best_on_all()
            if self._goes_on:
                opened.left = f"left after epoch {opened.position.epoch} of {self._num_epochs}"
        if loop.place != BEFORE_EPOCHS:
            opened.save()
            opened.settle()

    def _close(self) -> None:
        self.sum_up()  # if the script left its batches by break
        position = self._opened.position
        position.epoch, position.step_in_epoch = position.epoch + 1, 0
        position.epoch_started_s = position.seconds
        self._opened.means.clear()

    # --- the steps of an epoch

    def begin(self, order: dict[str, Any], num_steps: int) -> None:
        """Begin an epoch whose data is known; the first one also begins the records of the run."""
        opened, total = self._opened, order["global_batch_size"]
        steps = num_steps * self._num_epochs
        self._log_every = opened.options.log_every or steps_between_records(steps)
        sizes = {
            "num_samples": order["num_samples"],
            "global_batch_size": total,
            "micro_batch_size": -(-total // opened.world.world_size),
            "accumulate": 1,
            "steps_per_epoch": num_steps,
            "epochs": self._num_epochs,
            "total_steps": steps,
            "log_every": self._log_every,
        }
        opened.begin(order, sizes)

    def count(self, num_samples: int) -> None:
        """Count a step, and its samples on all ranks."""
        if self._opened.carried is not None:
            self._opened.carried.settle()
        position = self._opened.position
        position.step, position.step_in_epoch = position.step + 1, position.step_in_epoch + 1
        position.samples += num_samples

    def after_step(self, *, is_last: bool) -> None:
        """Record the step; save and stop where that is due within the epoch."""
        opened = self._opened
        position, means = opened.position, opened.means
        opened.session.beat()
        watched.step(position.step)
        if is_recorded(position.step, self._log_every):
            opened.record(means.of_step())
        means.next_step()
        if is_checked(position.step - 1, position.step):
            opened.left_out.look(position.step)
            opened.check_weights()
        signum = opened.agreement.after(position.step).signum
        every = opened.options.checkpoint_every_steps
        saves = every is not None and position.step % every == 0 and not is_last
        if saves or signum:
            opened.check_loss(means.read())
            position.seconds = opened.clock.seconds()
            opened.save()
            opened.clock.resume(position)
        opened.stop_on(signum)

    def sum_up(self) -> None:
        """Sum up the epoch, once."""
        if self._summed_up:
            return
        self._summed_up = True
        opened = self._opened
        position, order = opened.position, opened.order
        means = self._loop.means = opened.means.read()
        opened.check_loss(means)
        position.seconds = opened.clock.seconds()
        self.seed(_EPOCH_ENDS)
        if "loss" not in means:
            return
        # Those of its steps: the last batch is smaller, and the script may have left by break.
        samples = min(position.step_in_epoch * order["global_batch_size"], order["num_samples"])
        seconds = position.seconds - position.epoch_started_s
        others = {name: value for name, value in means.items() if name != "loss"}
        opened.session.emit(
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
        opened = self._opened
        seed_alike(mix(opened.options.seed, 0, 0, opened.position.epoch, *tags))
