"""The loops that a user writes within `open_run`: epochs, batches, validation."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from zlib import crc32

import torch
from torch import nn

from samestep.data.keyed_random import mix
from samestep.data.order import steps_per_epoch
from samestep.errors import UserError, did_you_mean
from samestep.recipe import Collate
from samestep.run.files import read_object
from samestep.session import own_state
from samestep.session.gradients import Passes
from samestep.session.means import Means
from samestep.session.own_data import OpenedData, OwnBatch, open_data
from samestep.session.own_session import OwnSession
from samestep.session.own_state import Stateful
from samestep.session.session import say
from samestep.training.alike import is_checked, seed_alike, seed_rank, seed_torch, seed_update
from samestep.training.meter import Clock
from samestep.training.plan import is_recorded, steps_between_records
from samestep.training.prepare import share_buffers
from samestep.training.stopping import Watch

_EPOCH_BEGINS, _EPOCH_ENDS, _VALIDATED = 1, 2, 3
"""Tags of the seeds for what is drawn around the batches of an epoch."""

BEFORE_EPOCHS = "before the epochs"
BEFORE_BATCHES = "before the batches of an epoch"
IN_BATCHES = "between the batches of an epoch"
AFTER_BATCHES = "after the batches of an epoch"
AFTER_EPOCHS = "after the epochs"


class OwnLoop:
    """Where a script is in its loops, and what happens between two of its steps."""

    def __init__(self, own: OwnSession) -> None:
        self._own, self._state, self._world = own, own.state, own.world
        self.place = BEFORE_EPOCHS
        """Where the script is; a phrase for messages."""
        self.batch: OwnBatch | None = None
        """The batch that the script has now, in training or validation."""
        self.means: dict[str, float] = {}
        """Means over the latest epoch or validation."""
        self.log_into = own.means
        self.passes = Passes(own.world)
        self._used = False
        """Whether the script has done anything with the batch."""
        self._backwards = 0  # of the running step
        self._num_epochs = 0
        self._log_every = own.options.log_every
        self._data: dict[str, OpenedData] = {}
        self._epoch_ended = False

    # --- the epochs

    def epochs(self, num_epochs: int, state: Mapping[str, Stateful]) -> Iterator[int]:
        """Yield the epochs that are still to be trained; see `OwnRun.epochs`."""
        self._check_place("run.epochs", BEFORE_EPOCHS)
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise UserError(f"run.epochs({num_epochs!r}): it must be a whole number from 1.")
        self._own.track(state)
        own = self._state
        self._num_epochs, position = num_epochs, own.position
        self._own.clock = Clock(position)
        if own.finished and num_epochs > own.finished["epochs"]:
            own.finished = None  # the script asks for more epochs now
        if not self._goes_on:
            self._nothing_to_train()
        while self._goes_on:
            self.place, self._epoch_ended = BEFORE_BATCHES, False
            self.means, own.metric = {}, None
            self._seed(_EPOCH_BEGINS)
            yield position.epoch
            self._check_place("the next epoch", AFTER_BATCHES)
            self._close_epoch()
            if self._world.connected and self._own.agreement.on(int(own.finished is not None)):
                own.finished = own.finished or {"reason": "", "epochs": num_epochs}
            due = self._own.options.saves_after(position.epoch, position.step)
            if own_state.best_on_all(own, self._world) or due or not self._goes_on:
                self._own.save()
            self._own.stop_on(self._own.agreement.on(self._own.received.signum))
        self.place = AFTER_EPOCHS
        self._seed(_EPOCH_BEGINS)

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch is still to be trained, or to be completed."""
        position, finished = self._state.position, self._state.finished is not None
        return position.epoch < self._num_epochs and (not finished or position.step_in_epoch > 0)

    def _nothing_to_train(self) -> None:
        own = self._state
        result = self._world.on_main(lambda: read_object(self._own.path / "result.json"))
        ended = result.get("status") == "completed" and result.get("steps") == own.position.step
        if not ended:  # the end of the run is still to be recorded
            sizes = own.order["num_samples"], own.order["global_batch_size"]
            steps = steps_per_epoch(*sizes, drop_last=own.order["drop_last"])
            self._own.begin(own.order, self._sizes(own.order, steps))
        why = f" ({own.finished['reason']})" if own.finished else ""
        has = f"{self._own.path} has its {own.position.epoch} epochs{why}"
        say(self._world, f"{has}: nothing to train.")

    def finish(self, reason: str) -> None:
        """Let this epoch be the last; see `OwnRun.finish`."""
        self._check_place("run.finish", IN_BATCHES, AFTER_BATCHES)
        self._state.finished = {"reason": str(reason), "epochs": self._num_epochs}

    def best(self, name: str, mode: str) -> bool:
        """Return whether this epoch is the best so far; see `OwnRun.best`."""
        self._check_place("run.best", AFTER_BATCHES)
        own, call = self._state, f"run.best({name!r}, mode={mode!r})"
        watch = own.watch or Watch(metric=name, mode=mode)
        if mode not in ("min", "max"):
            raise UserError(f"{call}: it must be 'min' or 'max'.")
        if (watch.metric, watch.mode) != (name, mode):
            raise UserError(
                f"{call}: the best checkpoint of this run is chosen by {watch.metric!r}, "
                f"{watch.mode!r}. A run has one such measure."
            )
        if name not in self.means:
            raise UserError(
                f"run.best({name!r}): there is no such mean. {did_you_mean(name, self.means)}"
                f"run.means has: {', '.join(self.means) or 'nothing'}. Call it after the batches, "
                "or after run.validation, in which run.log is given the value."
            )
        if own.metric is None:  # the first call of the epoch
            own.metric = self.means[name]
            own.watch = watch.after(own.metric, own.position.epoch + 1, 0.0)
        return own.is_best

    def load_best(self) -> int:
        """Load the best checkpoint's weights into the modules; return its epoch."""
        self.leave()
        self._check_place("run.load_best", AFTER_EPOCHS)
        return own_state.load_best(self._state, self._own.path / "checkpoints", self._world)

    def leave(self) -> None:
        """Save where the script has left its loops, if it is not saved yet; all ranks call it."""
        if self.place == AFTER_BATCHES:
            self._close_epoch()
            self.place = AFTER_EPOCHS
            own_state.best_on_all(self._state, self._world)
            if self._goes_on:
                epoch = self._state.position.epoch
                self._own.left = f"left after epoch {epoch} of {self._num_epochs}"
        if self.place != BEFORE_EPOCHS:
            self._own.save()

    def _close_epoch(self) -> None:
        self._end_epoch()  # if the script left its batches by break
        position = self._state.position
        position.epoch, position.step_in_epoch = position.epoch + 1, 0
        position.epoch_started_s = position.seconds
        self._own.means.clear()

    # --- the batches of an epoch

    def batches(
        self,
        data: Any,
        global_batch_size: int,
        collate: Collate | None,
        num_workers: int,
        *,
        drop_last: bool,
    ) -> Iterator[OwnBatch]:
        """Yield this rank's batches of the running epoch; see `OwnRun.batches`."""
        self._check_place("run.batches", BEFORE_BATCHES)
        seed, position = self._own.options.seed, self._state.position
        opened = self._open("train", data, collate, num_workers)
        num_steps = opened.steps(global_batch_size, drop_last=drop_last)
        order = {
            "seed": seed,
            "num_samples": opened.source.num_samples,
            "global_batch_size": global_batch_size,
            "drop_last": drop_last,
            "data": opened.digest,
        }
        self._own.begin(order, self._sizes(order, num_steps))
        self.place = IN_BATCHES
        self._own.clock.resume(position)
        first = position.step_in_epoch
        read = opened.epoch(position.epoch, first, global_batch_size, drop_last=drop_last)
        with closing(read):
            for batch in read:
                batch.step, self._backwards = position.step, 0
                # The script draws other numbers on each rank.
                seed_torch(mix(seed, self._world.rank, batch.step), self._world.device)
                seed_rank(mix(seed, batch.step), self._world.rank)
                torch.clear_autocast_cache()  # a context around the loop would keep older weights
                self.batch, self._used = batch, False
                try:
                    yield batch
                except GeneratorExit:
                    if self._used:  # break after the step, not before
                        self._count(batch)
                    self.place = AFTER_BATCHES
                    raise
                finally:
                    self.batch = None
                self.passes.end(batch.step)
                self._count(batch)
                self._after_step(is_last=position.step_in_epoch == num_steps)
        self._end_epoch()
        self.place = AFTER_BATCHES

    def validation(
        self, data: Any, batch_size: int, split: str, collate: Collate | None, num_workers: int
    ) -> Iterator[OwnBatch]:
        """Yield this rank's share of all samples; see `OwnRun.validation`."""
        self._check_place("run.validation", BEFORE_BATCHES, AFTER_BATCHES, AFTER_EPOCHS)
        before, started = self.place, time.perf_counter()
        opened = self._open(split, data, collate, num_workers)
        for one in self._state.state.values():
            if isinstance(one, nn.Module):
                share_buffers(one, self._world)  # else each rank evaluates a model of its own
        means = self.log_into = Means(self._world)
        self.place = f"in the {split}"
        position = self._state.position
        epoch = position.epoch
        try:
            for batch in opened.once(batch_size, epoch):
                batch.step, self.batch = position.step, batch
                torch.clear_autocast_cache()
                yield batch
        finally:
            self.place, self.batch, self.log_into = before, None, self._own.means
            # Ranks have drawn unequally often where their shares are unequal.
            self._seed(_VALIDATED, crc32(f"{split} {before}".encode()))
        self.means = means.read()
        self._own.session.emit(
            {
                "event": "evaluation",
                "split": split,
                "epoch": epoch + (before != AFTER_EPOCHS),
                "step": position.step,
                **self.means,
                "samples": opened.source.num_samples,
                "seconds": time.perf_counter() - started,
            }
        )

    def current(self, what: str, *, trains: bool = False) -> OwnBatch:
        """Return the batch that the script has; `trains` refuses one of a validation."""
        if self.batch is None or (trains and self.place != IN_BATCHES):
            raise UserError(
                f"{what} was called {self.place}; it belongs to a batch: call it in the loop over "
                "run.batches."
            )
        self._used = True
        return self.batch

    def _open(self, split: str, data: Any, collate: Collate | None, workers: int) -> OpenedData:
        """Return the data, opened once."""
        before = self._data.get(split)
        if before is not None:
            if before.is_of(data, collate, workers):
                return before
            before.source.close()
            del before, self._data[split]  # its memory may be needed for the new one
        opened = open_data(data, self._world, self._own.options.seed, collate, workers)
        self._data[split] = opened
        return opened

    def _check_place(self, what: str, *places: str) -> None:
        if self.place not in places:
            held = (
                " After a break, close an iterator that something like tqdm holds: batches = "
                "run.batches(…), then batches.close()."
            )
            raise UserError(
                f"{what} was reached {self.place}; it belongs {' or '.join(places)}: for epoch in "
                "run.epochs(…), and within it, once, for batch in run.batches(…)."
                + (held if self.place == IN_BATCHES else "")
            )

    # --- records, checkpoints, stops

    def _sizes(self, order: dict[str, Any], num_steps: int) -> dict[str, Any]:
        total, steps = order["global_batch_size"], num_steps * self._num_epochs
        self._log_every = self._own.options.log_every or steps_between_records(steps)
        return {
            "num_samples": order["num_samples"],
            "global_batch_size": total,
            "micro_batch_size": -(-total // self._world.world_size),
            "accumulate": 1,
            "steps_per_epoch": num_steps,
            "epochs": self._num_epochs,
            "total_steps": steps,
            "log_every": self._log_every,
        }

    def _count(self, batch: OwnBatch) -> None:
        position = self._state.position
        position.step, position.step_in_epoch = position.step + 1, position.step_in_epoch + 1
        position.samples += batch.global_size

    def _after_step(self, *, is_last: bool) -> None:
        """Record the step; save and stop where that is due within the epoch."""
        position, means = self._state.position, self._own.means
        self._own.session.beat()
        if is_recorded(position.step, self._log_every):
            self._own.record(means.of_step())
        means.next_step()
        if is_checked(position.step - 1, position.step):
            self._own.check_weights()
        signum = self._own.agreement.after(position.step).signum
        every = self._own.options.checkpoint_every_steps
        saves = every is not None and position.step % every == 0 and not is_last
        if saves or signum:
            self._own.check_loss(means.read())
            position.seconds = self._own.clock.seconds()
            self._own.save()
            self._own.clock.resume(position)
        self._own.stop_on(signum)

    def _end_epoch(self) -> None:
        """Sum up the epoch, once."""
        if self._epoch_ended:
            return
        self._epoch_ended = True
        position, order = self._state.position, self._state.order
        self.means = self._own.means.read()
        self._own.check_loss(self.means)
        position.seconds = self._own.clock.seconds()
        self._seed(_EPOCH_ENDS)
        loss = self.means.get("loss")
        if loss is None:
            return
        # Those of its steps: the last batch is smaller, and the script may have left by break.
        samples = min(position.step_in_epoch * order["global_batch_size"], order["num_samples"])
        seconds = position.seconds - position.epoch_started_s
        others = {name: value for name, value in self.means.items() if name != "loss"}
        self._own.session.emit(
            {
                "event": "epoch",
                "epoch": position.epoch + 1,
                "step": position.step,
                "loss": loss,
                "samples": samples,
                "train_seconds": seconds,
                "samples_per_s": samples / max(seconds, 1e-9),
                **({"metrics": others} if others else {}),
            }
        )

    def close(self) -> None:
        """End what reads the data."""
        for opened in self._data.values():
            opened.source.close()

    # --- random numbers

    def seed_update(self) -> None:
        """Seed what the script draws after a backward: the same numbers on each rank."""
        self._backwards += 1
        step = self._state.position.step
        seed_update(self._own.options.seed, step, self._world.device, self._backwards)

    def _seed(self, *tags: int) -> None:
        """Seed what the script draws around the batches: the same numbers on each rank.

        The epoch decides: a run resumed within it draws what it had drawn before the batches.
        """
        # Five parts and more, so that no step of a rank is seeded alike.
        seed_alike(mix(self._own.options.seed, 0, 0, self._state.position.epoch, *tags))
