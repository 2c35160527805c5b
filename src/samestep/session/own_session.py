"""An open run of a loop of one's own: its ranks, its directory, its signals, where it stands."""

import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep import dist
from samestep.errors import UserError, listed
from samestep.ranks.process import JOB_RUN, RankLog
from samestep.ranks.world import Backend, Device
from samestep.run.directory import is_run
from samestep.run.files import read_object
from samestep.run.heartbeat import Heartbeat
from samestep.run.records import Record
from samestep.session import own_directory as directory
from samestep.session import own_state as keeping
from samestep.session.means import Means
from samestep.session.own_ending import Stopped, say
from samestep.session.own_state import Standing
from samestep.session.recipe_changes import script_changes
from samestep.session.saving import load_newest
from samestep.session.training_run import open_directory
from samestep.settings import Settings, free_names
from samestep.training import alike
from samestep.training.stopping import Agreement, catch_signals


def _forget_casts(*_: object) -> None:
    """Forget the weights that autocast has cast, now that they have changed.

    PyTorch does so when the outermost context ends, which may be one around the whole loop.
    """
    torch.clear_autocast_cache()


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `open_run` was given; see there."""

    path: str | Path | None
    seed: int
    resume: bool
    settings: Mapping[str, Any]
    may_change: Collection[str]
    name: str
    log_every: int | None
    checkpoint_every_epochs: int
    checkpoint_every_steps: int | None
    keep_checkpoints: int | None
    device: Device
    backend: Backend
    timeout_s: float

    def check(self) -> None:
        """Check the numbers.

        Raises:
            UserError: one is out of its range.
        """
        names = ("log_every", "checkpoint_every_epochs", "checkpoint_every_steps")
        for name in (*names, "keep_checkpoints"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"open_run({name}={value!r}): it must be a whole number from 1.")
        if isinstance(self.may_change, str):
            raise UserError(
                f"open_run(may_change={self.may_change!r}): it must be a list of names."
            )
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UserError(f"open_run(seed={self.seed!r}): it must be a whole number from 0.")

    def saves_after(self, epoch: int, step: int) -> bool:
        """Whether a checkpoint falls due at the end of an epoch."""
        by_steps = self.checkpoint_every_steps
        return epoch % self.checkpoint_every_epochs == 0 or bool(by_steps and step % by_steps == 0)


class Session:
    """What is open within the `with` of `open_run`, on this rank."""

    def __init__(self, wanted: Wanted, log: RankLog) -> None:
        """Join the other ranks, open the run directory, seed all alike, catch stop signals.

        Raises:
            UserError: on every rank, for anything the user can mend.
        """
        wanted.check()
        if dist.current_world().connected:
            raise UserError("open_run joins the ranks by itself: leave setup_distributed() out.")
        dist.setup_distributed(wanted.device, wanted.backend, wanted.timeout_s)
        self.wanted, self.world = wanted, dist.current_world()
        self.path = self.world.on_main(
            lambda: directory.choose_path(wanted.path, wanted.name, resume=wanted.resume)
        )
        self.run = open_directory(self.path, self.world, log.move_to)
        job = os.environ.get(JOB_RUN) if self.world.is_main else None
        self.heart = Heartbeat(Path(job)) if job else None
        if wanted.resume and not wanted.path and not os.environ.get(JOB_RUN):
            say(self.world, f"{self.path} is a new run: to go on with it, name it in open_run.")
        self.standing = Standing(program=wanted.name, settings=wanted.settings)
        self.means = Means(self.world)
        self.trained: dict[str, Tensor] = {}
        """The weights of the modules in `state`, and what else `run.backward` was given."""
        self.begun = False
        """Whether the run's records have begun, or gone on, in this process."""
        self.left = ""
        """How the script has left its epochs early, for a record; empty where it has not."""
        self._early: list[Record] = []
        """Of what came before the records began."""
        self._resumed: tuple[str, list[str]] | None = None
        self._saved_at: tuple[int, int] | None = None
        """Epochs and steps of the newest checkpoint."""
        self._signals = catch_signals()
        self.received = self._signals.__enter__()
        self.agreement = Agreement(self.world, self.received)
        self._forgets = register_optimizer_step_post_hook(_forget_casts)
        alike.seed_alike(wanted.seed)

    def track(self, state: Any) -> None:
        """Take the state that checkpoints hold, and bring it to where the run stands.

        Raises:
            UserError: on every rank; it cannot be saved, or does not fit the checkpoint.
        """
        world, standing = self.world, self.standing
        world.on_every(lambda: keeping.check_state(state))
        standing.state = dict(state)
        keeping.share_weights(standing.state, world)
        modules = [(n, kept) for n, kept in standing.state.items() if isinstance(kept, nn.Module)]
        self.trained = {f"{n}.{of}": p for n, m in modules for of, p in m.named_parameters()}
        resumes = self.wanted.resume and world.on_main(lambda: is_run(self.path))
        if resumes and (found := load_newest(self.path, world)):
            entry, saved, problems = found
            free = free_names(Settings).union(self.wanted.may_change)
            world.on_every(lambda: keeping.restore(standing, saved, self.path, free))
            self.means.sums = keeping.sums_of(saved["sums"], world)
            self._resumed = entry.path, problems
            self._saved_at = standing.position.epoch, standing.position.step
        self.agreement.start(standing.position.step)

    def begin(self, order: dict[str, Any], numbers: Record) -> None:
        """Write what a run begins or goes on with, once its data is known.

        Raises:
            UserError: the run was begun with another order of samples.
        """
        world, standing = self.world, self.standing
        position = standing.position
        may_be_new, within = self.begun or position.epoch == 1, position.step_in_epoch > 0
        before = standing.order
        keeping.check_order(before, order, self.path, may_be_new=may_be_new, within=within)
        standing.order = order
        if self.begun:
            return
        if (run := self.run) is not None:
            directory.describe(run, world, standing, numbers)
        resumed = self._resumed
        self.begun = True
        self.emit(
            directory.start_record(world, standing, self.path, numbers, resumed=bool(resumed))
        )
        if resumed is not None:
            checkpoint, problems = resumed
            after = f"after step {standing.position.step}, from {checkpoint}"
            changed = script_changes(self.path / directory.SCRIPT_COPY, Path(sys.argv[0]))
            if changed:
                told = listed(changed, 5)
                problems.append(f"{sys.argv[0]} has changed since the run began: {told}.")
            say(world, " ".join([f"{self.path} goes on {after}.", *problems]))
            self.emit(
                {
                    "event": "resume",
                    "step": standing.position.step,
                    "checkpoint": checkpoint,
                    "world_size": world.world_size,
                    "problems": problems,
                }
            )
        for record in self._early:
            self.emit(record)

    def has_ended(self) -> bool:
        """Whether result.json tells of the end of all epochs that were trained."""
        result = self.world.on_main(lambda: read_object(self.path / "result.json"))
        position = self.standing.position
        return result.get("status") == "completed" and result.get("steps") == position.step

    def emit(self, record: Record) -> None:
        """Add a record to events.jsonl, on rank 0; it waits where the data is not known yet."""
        if self.run is not None:
            self.run.append(record) if self.begun else self._early.append(record)

    def save(self) -> None:
        """Save where the run stands, if it is not saved yet; all ranks call it."""
        position, started = self.standing.position, time.perf_counter()
        if not self.begun or self._saved_at == (position.epoch, position.step):
            return
        self.means.read()  # what is on the device still belongs to the sums
        self.check_weights()
        folder, keep = self.path / "checkpoints", self.wanted.keep_checkpoints
        record = keeping.save(folder, self.world, self.standing, self.means.sums, keep)
        self.emit({**record, "seconds": time.perf_counter() - started})
        self._saved_at = position.epoch, position.step

    def check_weights(self) -> None:
        """Check that all ranks have the same weights.

        Raises:
            UserError: on every rank, that they have not.
        """
        step, added = self.standing.position.step, "add it up by run.backward, not loss.backward()"
        alike.check_weights(self.trained, self.world, step, added)

    def stop_on(self, signum: int) -> None:
        """Save and stop where all ranks have agreed on a signal.

        Raises:
            Stopped: there is one.
        """
        if signum:
            self.save()
            raise Stopped(signum)

    def end(self, error: BaseException | None) -> None:
        """Write how the run ended."""
        if self.run is None or not self.begun:
            return
        step, status, reason = self.standing.position.step, "completed", "finished"
        if isinstance(error, Stopped):
            status, reason = "stopped", Signals(error.signum).name
            goes_on = f"{self.path} goes on from there with resume=True."
            say(self.world, f"Stopped by {reason} after step {step}; {goes_on}")
        elif error is not None:
            status, reason = "failed", f"failed: {error or type(error).__name__}"
        elif self.standing.finished is not None:
            reason = self.standing.finished["reason"]
        elif self.left:
            reason = self.left
            more = "With resume=True it goes on from there; run.finish() ends it for good."
            say(self.world, f"The run was {reason}. {more}")
        self.emit({"event": "stop", "step": step, "reason": reason})
        self.run.write_result(directory.result_of(self.world, self.standing, status, reason))

    def close(self, error: BaseException | None) -> None:
        """Let signals be, and another process open the run."""
        self._forgets.remove()
        if error is None or isinstance(error, Stopped):
            self._signals.__exit__(None, None, None)
        else:  # a signal that no training could act on is kept for who tells of the failure
            self._signals.__exit__(type(error), error, error.__traceback__)
        if self.run is not None:
            self.run.close()
