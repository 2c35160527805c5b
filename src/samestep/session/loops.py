"""The two loops of a run: its epochs, and the batches of each; and what comes between them."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any
from zlib import crc32

import torch

from samestep.data.keyed_random import mix
from samestep.data.order import steps_per_epoch
from samestep.errors import UserError, did_you_mean
from samestep.recipe import Collate
from samestep.session import own_data as reading
from samestep.session import own_state as keeping
from samestep.session.gradients import Passes
from samestep.session.means import Means
from samestep.session.own_batch import Batch
from samestep.session.own_ending import say
from samestep.session.own_session import Session
from samestep.session.own_state import Kept
from samestep.training.alike import is_checked, seed_alike, seed_rank, seed_torch, seed_update
from samestep.training.meter import Clock
from samestep.training.plan import is_recorded, steps_between_records
from samestep.training.prepare import share_buffers
from samestep.training.stopping import Watch

_EPOCH_BEGINS, _EPOCH_ENDS, _VALIDATED = 1, 2, 3
"""By what numbers that are drawn around the batches are seeded, beside the epoch."""
_IN_BATCHES = "between the batches of an epoch"


class Loops:
    """Where a script is in its loops."""

    def __init__(self, session: Session) -> None:
        self._session, self._standing = session, session.standing
        self._world = session.world
        self.place = "before the epochs"
        """Where the script is; a phrase for messages."""
        self.batch: Batch | None = None
        """The batch that the script has now, in training or validation."""
        self.means: dict[str, float] = {}
        self.log_into = session.means
        self.passes = Passes(self._world)
        self.used = False
        """Whether the script has done anything with the batch."""
        self._backwards = 0  # of the running step
        self._num_epochs = 0
        self._log_every = session.wanted.log_every
        self._clock = Clock(self._standing.position)
        self._opened: dict[str, reading.Opened] = {}
        self._epoch_ended = False

    def epochs(self, num_epochs: int, state: Mapping[str, Kept]) -> Iterator[int]:
        """Yield the epochs that are still to be trained; see `OwnRun.epochs`."""
        self._check_place("run.epochs", "before the epochs")
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise UserError(f"run.epochs({num_epochs!r}): it must be a whole number from 1.")
        standing, session = self._standing, self._session
        session.track(state)
        self._num_epochs, position = num_epochs, standing.position
        self._clock = Clock(position)
        if standing.finished and num_epochs > standing.finished["epochs"]:
            standing.finished = None  # more are wanted now
        if not self._goes_on:
            if not session.has_ended():  # what comes after the epochs is still to be recorded
                order = standing.order
                samples, total = order["num_samples"], order["global_batch_size"]
                steps = steps_per_epoch(samples, total, drop_last=order["drop_last"])
                session.begin(order, self._sizes(order, steps))
            why = f" ({standing.finished['reason']})" if standing.finished else ""
            has = f"{session.path} has its {position.epoch} epochs{why}: nothing to train."
            say(self._world, has)
        while self._goes_on:
            self.place, self._epoch_ended = "before the batches of an epoch", False
            self.means, standing.metric = {}, None
            self._seed(_EPOCH_BEGINS)
            yield position.epoch
            self._check_place("the next epoch", "after the batches of an epoch")
            self._close_epoch()
            if self._world.connected and session.agreement.on(int(standing.finished is not None)):
                standing.finished = standing.finished or {"reason": "", "epochs": num_epochs}
            due = session.wanted.saves_after(position.epoch, position.step)
            if keeping.best_on_all(standing, self._world) or due or not self._goes_on:
                session.save()
            session.stop_on(session.agreement.on(session.received.signum))
        self.place = "after the epochs"
        self._seed(_EPOCH_BEGINS)

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch is still to be trained, or to be brought to its end."""
        position, finished = self._standing.position, self._standing.finished is not None
        return position.epoch < self._num_epochs and (not finished or position.step_in_epoch > 0)

    def finish(self, reason: str) -> None:
        """Let this epoch be the last; see `OwnRun.finish`."""
        self._check_place("run.finish", _IN_BATCHES, "after the batches of an epoch")
        self._standing.finished = {"reason": str(reason), "epochs": self._num_epochs}

    def best(self, name: str, mode: str) -> bool:
        """Return whether this epoch is the best so far; see `OwnRun.best`."""
        self._check_place("run.best", "after the batches of an epoch")
        standing = self._standing
        watch = standing.watch or Watch(metric=name, mode=mode)
        if mode not in ("min", "max"):
            raise UserError(f"run.best({name!r}, mode={mode!r}): it must be 'min' or 'max'.")
        if (watch.metric, watch.mode) != (name, mode):
            raise UserError(
                f"run.best({name!r}, mode={mode!r}): the best checkpoint of this run is chosen by "
                f"{watch.metric!r}, {watch.mode!r}. A run has one such measure."
            )
        if name not in self.means:
            raise UserError(
                f"run.best({name!r}): there is no such mean. {did_you_mean(name, self.means)}"
                f"run.means has: {', '.join(self.means) or 'nothing'}. Call it after the batches, "
                "or after run.validation, in which run.log is given the value."
            )
        if standing.metric is None:  # not asked again
            standing.metric = self.means[name]
            standing.watch = watch.after(standing.metric, standing.position.epoch + 1, 0.0)
        return standing.is_best

    def load_best(self) -> int:
        """Return the epoch of the best checkpoint, now that the modules have its weights."""
        self.leave()
        self._check_place("run.load_best", "after the epochs")
        session = self._session
        return keeping.load_best(self._standing, session.path / "checkpoints", self._world)

    def leave(self) -> None:
        """Save where the script has left its loops, if it is not saved yet."""
        if self.place == "after the batches of an epoch":
            self._close_epoch()
            self.place, position = "after the epochs", self._standing.position
            if self._goes_on:
                self._session.left = f"left after epoch {position.epoch} of {self._num_epochs}"
        if self.place != "before the epochs":
            self._session.save()

    def _close_epoch(self) -> None:
        self._end_epoch()  # if the script left its batches by break
        position = self._standing.position
        position.epoch, position.step_in_epoch = position.epoch + 1, 0
        position.epoch_started_s = position.seconds
        self._session.means.clear()

    def batches(
        self,
        data: Any,
        global_batch_size: int,
        collate: Collate | None,
        num_workers: int,
        *,
        drop_last: bool,
    ) -> Iterator[Batch]:
        """Yield this rank's batches of the running epoch; see `OwnRun.batches`."""
        self._check_place("run.batches", "before the batches of an epoch")
        session, position = self._session, self._standing.position
        seed = session.wanted.seed
        opened = self._open("train", data, collate, num_workers)
        num_steps = reading.steps_of(opened, global_batch_size, drop_last=drop_last)
        order = {
            "seed": seed,
            "num_samples": opened.source.num_samples,
            "global_batch_size": global_batch_size,
            "drop_last": drop_last,
            "data": opened.print,
        }
        session.begin(order, self._sizes(order, num_steps))
        self.place = _IN_BATCHES
        self._clock.resume(position)
        read = reading.read_epoch(
            opened,
            self._world,
            seed=seed,
            epoch=position.epoch,
            first_step=position.step_in_epoch,
            global_batch_size=global_batch_size,
            drop_last=drop_last,
        )
        with closing(read):
            for batch in read:
                batch.step = position.step
                self._seed_step()
                torch.clear_autocast_cache()  # a context around the loop would keep older weights
                self.batch, self.used = batch, False
                try:
                    yield batch
                except GeneratorExit:
                    if self.used:  # break after the step, not before
                        self._count(batch)
                    self.place = "after the batches of an epoch"
                    raise
                finally:
                    self.batch = None
                self.passes.end(batch.step)
                self._count(batch)
                self._after_step(is_last=position.step_in_epoch == num_steps)
        self._end_epoch()
        self.place = "after the batches of an epoch"

    def _sizes(self, order: dict[str, Any], num_steps: int) -> dict[str, Any]:
        world_size, total = self._world.world_size, order["global_batch_size"]
        steps = num_steps * self._num_epochs
        self._log_every = self._session.wanted.log_every or steps_between_records(steps)
        return {
            "num_samples": order["num_samples"],
            "global_batch_size": total,
            "micro_batch_size": -(-total // world_size),
            "accumulate": 1,
            "steps_per_epoch": num_steps,
            "epochs": self._num_epochs,
            "total_steps": steps,
            "log_every": self._log_every,
        }

    def _count(self, batch: Batch) -> None:
        position = self._standing.position
        position.step, position.step_in_epoch = position.step + 1, position.step_in_epoch + 1
        position.samples += batch.global_size

    def _after_step(self, *, is_last: bool) -> None:
        """Record the step, and do what falls due within an epoch: a checkpoint, an agreed stop."""
        session, position = self._session, self._standing.position
        wanted, means = session.wanted, session.means
        if session.heart is not None:
            session.heart.beat()
        if is_recorded(position.step, self._log_every):
            self._record(means.of_step())
        means.next_step()
        if is_checked(position.step - 1, position.step):
            session.check_weights()
        signum = session.agreement.after(position.step).signum
        every = wanted.checkpoint_every_steps
        saves = every is not None and position.step % every == 0 and not is_last
        if saves or signum:
            self._check_loss(means.read())
            position.seconds = self._clock.seconds()
            session.save()
            self._clock.resume(position)
        session.stop_on(signum)

    def _record(self, values: dict[str, float]) -> None:
        if not values:
            return
        self._check_loss(values)
        position = self._standing.position
        where = {"step": position.step, "epoch": position.epoch + 1}
        if "loss" in values:
            rate = {"samples": position.samples, **self._clock.rate(position)}
            self._session.emit({"event": "step", **where, **values, **rate})
            self._clock.mark(position)
        else:
            now = {"time": time.time(), "values": values}
            self._session.emit({"event": "metrics", **where, **now})

    def _end_epoch(self) -> None:
        """Sum up the epoch, once."""
        if self._epoch_ended:
            return
        self._epoch_ended = True
        session, position = self._session, self._standing.position
        self.means = session.means.read()
        self._check_loss(self.means)
        position.seconds = self._clock.seconds()
        self._seed(_EPOCH_ENDS)
        loss = self.means.get("loss")
        if loss is None:
            return
        # Those of its steps: the last batch is smaller, and the script may have left by break.
        full = position.step_in_epoch * self._standing.order["global_batch_size"]
        samples = min(full, self._standing.order["num_samples"])
        seconds = position.seconds - position.epoch_started_s
        others = {name: value for name, value in self.means.items() if name != "loss"}
        session.emit(
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

    def _check_loss(self, means: dict[str, float]) -> None:
        if not math.isfinite(means.get("loss", 0.0)):
            raise UserError(
                f"The loss is NaN or infinite at step {self._standing.position.step} or before. "
                "The run has ended; earlier checkpoints are kept. Try a smaller learning rate, or "
                "clip the gradients. What may be infinite can be logged by another name than loss.",
                on_all_ranks=True,
            )

    def validation(
        self, data: Any, batch_size: int, split: str, collate: Collate | None, num_workers: int
    ) -> Iterator[Batch]:
        """Yield this rank's share of all samples; see `OwnRun.validation`."""
        places = ("before the batches of an epoch", "after the batches of an epoch")
        self._check_place("run.validation", *places, "after the epochs")
        before, started = self.place, time.perf_counter()
        opened = self._open(split, data, collate, num_workers)
        for kept in self._standing.state.values():
            if isinstance(kept, torch.nn.Module):
                share_buffers(kept, self._world)  # else each rank evaluates a model of its own
        means = self.log_into = Means(self._world)
        self.place = f"in the {split}"
        position = self._standing.position
        epoch, seed = position.epoch, self._session.wanted.seed
        try:
            for batch in reading.read_once(opened, self._world, batch_size, seed, epoch):
                batch.step, self.batch = position.step, batch
                torch.clear_autocast_cache()
                yield batch
        finally:
            self.place, self.batch, self.log_into = before, None, self._session.means
            # Ranks have drawn unequally often where their shares are unequal.
            self._seed(_VALIDATED, crc32(f"{split} {before}".encode()))
        self.means = means.read()
        self._session.emit(
            {
                "event": "evaluation",
                "split": split,
                "epoch": epoch + (before != "after the epochs"),
                "step": position.step,
                **self.means,
                "samples": opened.source.num_samples,
                "seconds": time.perf_counter() - started,
            }
        )

    def close(self) -> None:
        """End what reads the data."""
        for opened in self._opened.values():
            opened.source.close()

    def current(self, what: str, *, trains: bool = False) -> Batch:
        """Return the batch that the script has.

        Raises:
            UserError: it has none; or it `trains`, and the batch is not of the training.
        """
        if self.batch is None or (trains and self.place != _IN_BATCHES):
            raise UserError(
                f"{what} was called {self.place}; it belongs to a batch: call it in the loop over "
                "run.batches."
            )
        self.used = True
        return self.batch

    def _open(self, split: str, data: Any, collate: Collate | None, workers: int) -> reading.Opened:
        """Return the data, opened once."""
        before = self._opened.get(split)
        if before is not None:
            if before.is_of(data, collate, workers):
                return before
            before.source.close()
            del before, self._opened[split]  # its memory may be needed for the new one
        opened = reading.open_data(data, self._world, self._session.wanted.seed, collate, workers)
        self._opened[split] = opened
        return opened

    def _check_place(self, what: str, *places: str) -> None:
        if self.place not in places:
            held = (
                " After break, close an iterator that is still held, such as tqdm's: batches = "
                "run.batches(…), and then batches.close()."
            )
            raise UserError(
                f"{what} was reached {self.place}; it belongs {' or '.join(places)}: for epoch in "
                "run.epochs(…), and within it, once, for batch in run.batches(…)."
                + (held if self.place == _IN_BATCHES else "")
            )

    def _seed_step(self) -> None:
        """Seed what the script draws in a step: other numbers on each rank."""
        self._backwards = 0
        seed, step = self._session.wanted.seed, self._standing.position.step
        seed_torch(mix(seed, self._world.rank, step), self._world.device)
        seed_rank(mix(seed, step), self._world.rank)

    def seed_update(self) -> None:
        """Seed what the script draws after a backward: the same numbers on each rank."""
        self._backwards += 1
        seed, step = self._session.wanted.seed, self._standing.position.step
        seed_update(seed, step, self._world.device, self._backwards)

    def _seed(self, *tags: int) -> None:
        """Seed what the script draws around the batches: the same numbers on each rank.

        It is by the epoch: a run that goes on within it draws what it had drawn before the batches.
        """
        # Five parts and more, so that no step of a rank is seeded alike.
        around = mix(self._session.wanted.seed, 0, 0, self._standing.position.epoch, *tags)
        seed_alike(around)
