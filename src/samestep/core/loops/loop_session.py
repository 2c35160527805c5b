"""The state, records and checkpoints of a run whose loop the user writes."""

import contextlib
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any, Self

import tomli_w
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from samestep.base.errors import UserError, listed, no_sudden_exit
from samestep.base.run import checkpoints
from samestep.base.run.directory import is_run, new_run_path
from samestep.base.run.files import write_text
from samestep.base.run.index import Retention, find_checkpoint
from samestep.base.run.records import Record
from samestep.base.run.user_modules import modules_note
from samestep.base.settings import Backend, Device, Settings, free_names
from samestep.base.startup import JOB_RUN
from samestep.base.trees import tree_leaves
from samestep.core.data.keyed_random import seed_alike
from samestep.core.learner.agreement import OF_A_RANK, check_same, check_same_model, check_weights
from samestep.core.learner.carried import Carry
from samestep.core.learner.model_state import ModelTrial
from samestep.core.learner.prepare import share_buffers
from samestep.core.learner.quick_step import step_by_lists
from samestep.core.loops import kept_state
from samestep.core.loops.carry import RankState, SlotState, carried_state
from samestep.core.loops.kept_state import Means, Stateful, added_up
from samestep.core.loops.left_out import LeftOut
from samestep.core.session.declared import checked_settings
from samestep.core.session.recipe_changes import keep_script, script_changes
from samestep.core.session.restoring import load_first, load_newest, remove_unfinished
from samestep.core.session.saver import say
from samestep.core.session.session import (
    Session,
    Stopped,
    environment,
    refuse_taken,
    resume_record,
    room_notes,
    run_result,
    start_record,
    state_bytes,
)
from samestep.core.training.meter import Clock
from samestep.core.training.stopping import Agreement, Watch, catch_signals
from samestep.core.training.work import Position
from samestep.launch.ranks import process_group, watched
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.process import RankLog, why_failed
from samestep.launch.ranks.world import World

_OF_MAIN = frozenset(
    {"path", "settings", "may_change", "checkpoint_sync", "keep_newest", "keep_hours", "trackers"}
)
"""Arguments that only rank 0 reads, and settings, which are compared one by one."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `open_run`; see there."""

    path: str | Path | None
    seed: int
    resume: bool
    settings: Mapping[str, Any]
    may_change: Collection[str]
    name: str
    log_every: int | None
    checkpoint_every_epochs: int
    checkpoint_every_steps: int | None
    checkpoint_sync: bool
    keep_newest: int | None
    keep_hours: float | None
    device: Device
    backend: Backend
    timeout_s: float
    stall_s: float | None
    trackers: tuple[Callable[..., Any], ...] = ()
    """Each starts what follows the run: (tell, stopped) → a context that takes records."""

    def checked(self) -> Self:
        """Return them as the flags of the same names would be; refuse what no flag may be."""
        if isinstance(self.may_change, str):
            raise UserError(f"open_run(may_change={self.may_change!r}) must be a list of names.")
        if not isinstance(self.settings, Mapping):
            raise UserError(f"open_run(settings={self.settings!r:.80}) must be a dict of names.")
        named = {f.name for f in fields(self)} & {f.name for f in fields(Settings)}
        given = checked_settings({name: getattr(self, name) for name in named}, "open_run")
        free = OF_A_RANK.union(self.may_change)
        return replace(self, settings=kept_state.plain(self.settings, free=free), **given)

    def check_same(self, world: World) -> None:
        """Refuse what another rank was given otherwise; all ranks call it."""
        free = OF_A_RANK.union(self.may_change)
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _OF_MAIN}
        given |= {f"settings[{name!r}]": v for name, v in self.settings.items() if name not in free}
        given = {name: v for name, v in given.items() if name not in OF_A_RANK}
        check_same(given, world, "The arguments of open_run")


class LoopSession:
    """What is open within the `with` of `open_run`, on this rank."""

    def __init__(self, options: Options, log: RankLog) -> None:
        """Join the other ranks, open the run directory, seed all alike, catch stop signals."""
        options = options.checked()
        if process_group.current_world().connected:
            raise UserError(
                "open_run joins the ranks itself.", remedy="Leave setup_distributed() out."
            )
        watched.start_watcher(detect_launch(os.environ), options.stall_s)
        process_group.setup_distributed(options.device, options.backend, options.timeout_s)
        self.options, self.world = options, process_group.current_world()
        options.check_same(self.world)
        self.session = Session(self.world.on_main(self._choose_path), self.world, log.move_to)
        self.path = self.session.path
        self.state: dict[str, Stateful] = {}
        """What the script has named: modules, optimizers, schedules."""
        self.position = Position()
        self.order: dict[str, Any] = {}
        """What the order of the samples depends on; empty until the data is open."""
        self.carried: SlotState | RankState | None = None
        """State of each slot of the global batch, or of each rank, where the script carries any."""
        self.carried_before: Any = None
        """That of the checkpoint which the run continues from."""
        self.values: dict[str, Any] = {}
        """Numbers and texts that the script keeps, by name."""
        self.watch: Watch | None = None
        """What the best checkpoint is chosen by; None where the script never calls `run.best`."""
        self.metric: float | None = None
        """Its value in this epoch."""
        self.finished: dict[str, Any] | None = None
        """Why the script has ended the training, and how many epochs it had asked for."""
        self.left = ""
        """How the script has left its epochs early, for a record."""
        self.means = Means(self.world)
        """Of the running epoch."""
        self.clock = Clock(self.position)
        self.trained: dict[str, Tensor] = {}
        """The weights of the modules in `state`, and what else `run.backward` was given."""
        self.left_out = LeftOut(self.world, self.trained)
        self._within: dict[str, Any] = {}  # a checkpoint within an epoch, until its batches begin
        self._resumed: tuple[str, list[str]] | None = None
        self._saved_at: tuple[int, int] | None = None  # epochs and steps of the newest checkpoint
        self._signals = catch_signals()
        self.received = self._signals.__enter__()
        self.agreement = Agreement(self.world, self.received)
        self._trackers = contextlib.ExitStack()
        self._exits = no_sudden_exit()
        self._exits.__enter__()
        # Autocast keeps casts of the weights until its outermost context ends, and that may be
        # around the whole loop: forget them whenever the weights have changed.
        self._hook = register_optimizer_step_post_hook(self._has_stepped)
        self._open_trackers()
        seed_alike(options.seed)

    def _open_trackers(self) -> None:
        def tell(record: Record) -> None:
            say(self.world, f"{record['tracker']}: {record['text']}")

        def start(starts: Callable[..., Any]) -> None:
            trackers = starts(tell=tell, stopped=lambda: bool(self.received.now))
            self.session.add_sink(self._trackers.enter_context(trackers).take)

        try:
            for starts in self.options.trackers:
                self.world.on_main(partial(start, starts))
        except Exception as error:
            self.close(error)
            raise

    def _choose_path(self) -> Path:
        options, named = self.options, self.options.path or os.environ.get(JOB_RUN)
        path = Path(named or new_run_path(options.name))
        if not options.resume:
            remedy = "Continue it with open_run(…, resume=True), or name another directory."
            refuse_taken(path, remedy)
        elif not named:
            say(
                self.world,
                f"{path} is a new run. To continue it later, pass this path to open_run.",
            )
        return path

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        torch.clear_autocast_cache()
        self.left_out.stepped(optimizer)

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules of the state."""
        return {name: part for name, part in self.state.items() if isinstance(part, nn.Module)}

    def track(self, state: Mapping[str, Stateful], num_epochs: int) -> None:
        """Take the state that checkpoints hold; restore it if the run is resumed."""
        world = self.world
        world.on_every(lambda: kept_state.check_state(state))
        kinds = {f"state[{name!r}]": type(part).__name__ for name, part in state.items()}
        check_same({"num_epochs": num_epochs, **kinds}, world, "The arguments of run.epochs")
        self._check_values()
        self.state = self.left_out.state = dict(state)
        self._trials = {name: ModelTrial(module) for name, module in self.modules().items()}
        self._begun = {name: kept_state.still_parts(m) for name, m in self.modules().items()}
        for name, module in self.modules().items():  # all ranks begin with rank 0's weights
            check_same_model(module, world, f"{name}.")
            share_buffers(module, world)
            self.trained |= {f"{name}.{of}": p for of, p in module.named_parameters()}
            for parameter in module.parameters():
                world.take_from_main(parameter.detach())
        resumes = self.options.resume and world.on_main(lambda: is_run(self.path))
        kept = tuple(f"state/{name}" for name in state if name not in self.modules())
        if resumes and (loaded := load_newest(self.path, world, own=kept)):
            world.on_main(lambda: remove_unfinished(self.path))
            world.on_every(lambda: self._restore(loaded.content))
            sums = loaded.content["sums"]
            if len(sums) == world.world_size:
                self.means.sums = sums[world.rank]
            elif world.is_main:  # on another number of ranks, it takes all
                self.means.sums = added_up(sums)
            self._resumed = loaded.entry.path, loaded.problems
            self._saved_at = self.position.epoch, self.position.step
        for part in self.state.values():
            if isinstance(part, torch.optim.Optimizer):
                step_by_lists(part, in_own_loop=True)
        self.agreement.start(self.position.step)

    def _check_values(self) -> None:
        """Refuse a `run.state` that another rank has otherwise; all ranks call it."""
        values = self.world.on_every(lambda: kept_state.checked_values(self.values))
        named = {f"run.state[{name!r}]": value for name, value in values.items()}
        check_same(named, self.world, "The values that checkpoints hold")

    def _restore(self, saved: dict[str, Any]) -> None:
        options = self.options
        free = free_names(Settings).union(options.may_change, OF_A_RANK)
        kept_state.check_same_program(saved, options.name, options.settings, self.path, free)
        self.position = Position(**saved["position"])
        if self.position.step_in_epoch:
            # Before it is loaded: an object may keep it, or take things out. Modules copy theirs.
            modules = [saved["state"].get(name) for name in self.modules()]
            shared = {id(t): t for t in tree_leaves(modules) if isinstance(t, Tensor)}
            parts = {name: saved.get(name, {}) for name in ("state", "own", "still")}
            self._within = copy.deepcopy(parts, shared)
        self._load_state(saved)
        self.order = saved["order"]
        self.watch = Watch(**saved["watch"]) if saved.get("watch") else None
        self.finished = saved.get("finished")
        self.carried_before = saved.get("carried")

    def _load_state(self, saved: Mapping[str, Any]) -> None:
        kept_state.load_state(self.state, saved["state"], self.path)
        for name, still in saved.get("still", {}).items():
            kept_state.keep_still(self.modules()[name], self._begun[name], still)
        self.values.update(saved.get("own", {}))

    def carry(self, function: Carry, slots: int) -> None:
        """Carry state of each slot of the global batch, or of each rank, from now on."""
        if self.carried is None:
            self.carried = carried_state(function, slots, self.world, self.options.seed)
            self.carried.load(self.carried_before)

    def _content(self, sums: list[Any], carried: Any) -> dict[str, Any]:
        return {
            "format": checkpoints.FORMAT,
            "program": self.options.name,
            "settings": dict(self.options.settings),
            "state": {name: kept_state.state_of(name, part) for name, part in self.state.items()},
            "still": {
                name: {"begun": self._begun[name], "now": kept_state.still_parts(module)}
                for name, module in self.modules().items()
            },
            "position": asdict(self.position),
            "order": self.order,
            "sums": sums,
            "own": kept_state.checked_values(self.values),
            "watch": self.watch and asdict(self.watch),
            "finished": self.finished,
            **({} if carried is None else {"carried": carried}),
        }

    def begin(self, order: dict[str, Any], sizes: Record) -> None:
        """Write the first records of the run, once its data is known."""
        world, session, position = self.world, self.session, self.position
        may_be_new, within = session.begun or position.epoch == 1, position.step_in_epoch > 0
        kept_state.check_order(self.order, order, self.path, may_be_new=may_be_new, within=within)
        self.order = order
        if session.begun:
            return
        if self._within:
            # What the script does before the batches it has done again: this state has it already.
            saved, self._within = self._within, {}
            world.on_every(lambda: self._load_state(saved))
        self.left_out.begin()
        if session.run is not None:
            self._describe(sizes)
        resume = None
        if self._resumed is not None:
            checkpoint, problems = self._resumed
            if changed := listed(script_changes(self.path, Path(sys.argv[0])), 5):
                problems.append(f"{sys.argv[0]} has changed since the run began: {changed}.")
            goes_on = f"{self.path} continues after step {position.step}, from {checkpoint}."
            say(world, " ".join([goes_on, *problems]))
            resume = resume_record(world, position.step, checkpoint, problems)
        everything: Iterable[Any] = self.state.values()
        parameters = [p for part in everything for p in getattr(part, "parameters", tuple)()]
        optimizers = [o for o in self.state.values() if isinstance(o, torch.optim.Optimizer)]
        notes = room_notes(self.path, state_bytes(self.modules().values(), optimizers))
        notes += modules_note(self.path)
        for note in notes:
            say(world, f"note: {note}")
        start = start_record(
            world,
            recipe=self.options.name,
            run_dir=self.path,
            parameters=parameters,
            modules=self.modules().values(),
            **sizes,
            precision=kept_state.precision_of({p.dtype for p in parameters}),
            lower_is_better=["loss"],
            resumed=resume is not None,
            notes=notes,
        )
        session.begin(start, resume, position.step, None)

    def _describe(self, sizes: Record) -> None:
        """Write settings, environment and a copy of the script into the run."""
        run = self.session.run
        assert run is not None
        table = {name: sizes[name] for name in ("epochs", "global_batch_size")}
        table |= {"seed": self.order["seed"], "options": dict(self.options.settings)}
        write_text(run.path / "settings.toml", tomli_w.dumps(table))
        keep_script(run.path, Path(sys.argv[0]))
        run.write_environment(environment(self.world))

    def record(self, values: dict[str, float]) -> None:
        """Record what was logged of a step; without a loss as a `metrics` record."""
        if not values:
            return
        self.check_loss(values)
        position = self.position
        where = {"step": position.step, "epoch": position.epoch + 1}
        if "loss" in values:
            rate = {"samples": position.samples, **self.clock.rate(position.samples)}
            self.session.emit({"event": "step", **where, **values, **rate})
            self.clock.mark(position.samples)
        else:
            now = {"time": time.time(), "values": values}
            self.session.emit({"event": "metrics", **where, **now})

    def check_loss(self, means: dict[str, float]) -> None:
        """Refuse to continue with a loss that is NaN or infinite."""
        if not math.isfinite(means.get("loss", 0.0)):
            raise UserError(
                f"The loss is NaN or infinite at step {self.position.step} or before. The run has "
                "ended; earlier checkpoints are kept. Try a smaller learning rate, or clip the "
                "gradients. If a value may be infinite, log it under another name than loss.",
                on_all_ranks=True,
            )

    def check_weights(self) -> None:
        """Check that all ranks have the same weights, and a checkpoint leads back to them."""
        self.world.on_every(self._check_trials)
        added = "call run.backward, not loss.backward(), to add it up"
        optimizers = [o for o in self.state.values() if isinstance(o, torch.optim.Optimizer)]
        also: Any = {"optimizers": optimizers, "modules": self.modules()}
        check_weights(self.trained, self.world, self.position.step, added, **also)

    def _check_trials(self) -> None:
        for name, module in self.modules().items():
            self._trials[name].check(module, f"state[{name!r}]", of_loop=True)

    def is_best(self) -> bool:
        """Return whether this epoch is the best so far."""
        watch = self.watch
        return self.metric is not None and watch is not None and not watch.evaluations_since

    def is_best_on_all(self) -> bool:
        """Return whether this epoch is the best so far; refuse ratings of some ranks only."""
        rated = self.world.gather(self.metric is not None)
        if len(set(rated)) > 1:
            ranks = listed([str(rank) for rank, has in enumerate(rated) if has])
            raise UserError(
                f"run.best was called on rank {ranks} of {len(rated)} in epoch "
                f"{self.position.epoch}. All ranks save the best checkpoint together: call it on "
                "every rank, and test run.is_main afterwards.",
                on_all_ranks=True,
            )
        return self.is_best()

    def load_best(self) -> int:
        """Load the best checkpoint's weights into the modules of the state; return its epoch."""
        if self.watch is None:
            raise UserError("run.load_best: no epoch was rated. Call run.best(…) in each epoch.")
        self.settle()
        folder = self.path / "checkpoints"
        problems: list[str] = []
        loaded = load_first(self.world, folder, lambda: [find_checkpoint(folder, "best")], problems)
        if loaded is None:
            raise UserError(problems[0], on_all_ranks=True)
        for name, module in self.modules().items():
            kept_state.load_one(name, module, loaded.content["state"][name])
        return loaded.entry.epoch

    def save(self) -> None:
        """Save where the run stands, if it is not saved yet; all ranks call it."""
        began, position = time.perf_counter(), self.position
        if not self.session.begun or self._saved_at == (position.epoch, position.step):
            return
        watched.turn_to(watched.CHECKPOINT)  # until the next step
        self.means.read()  # values that wait on the device belong to the sums
        self.check_weights()
        self._check_values()
        sums = self.world.gather(self.means.sums)
        carried = None if self.carried is None else self.carried.state()
        self.world.on_main(
            lambda: self.session.saver.save(
                self._content(sums, carried),
                position,
                metric=self.metric,
                watch=self.watch,
                retention=Retention(newest=self.options.keep_newest, hours=self.options.keep_hours),
                began=began,
                sync=self.options.checkpoint_sync,
            )
        )
        self._saved_at = position.epoch, position.step

    def settle(self) -> None:
        """Wait until all checkpoints are written; all ranks call it."""
        self.world.on_main(self.session.saver.settle_well)

    def stop_on(self, signum: int) -> None:
        """Save and stop if all ranks have agreed on a signal."""
        if signum:
            self.save()
            self.settle()
            raise Stopped(signum)

    def end(self, error: BaseException | None) -> None:
        """Write the run's end to its records."""
        run, step = self.session.run, self.position.step
        if run is None or not self.session.begun:
            return
        self.session.saver.settle()
        status, reason = "completed", "finished"
        if isinstance(error, Stopped):
            status, reason = "stopped", Signals(error.signum).name
            text = f"Stopped by {reason} after step {step}; {self.path} continues from there"
            say(self.world, f"{text} with resume=True.")
        elif error is not None:
            status, reason = "failed", f"failed: {why_failed(error)}"
        elif self.finished is not None:
            reason = self.finished["reason"]
        elif self.left:
            reason = self.left
            more = "With resume=True it continues from there; run.finish() ends it for good."
            say(self.world, f"The run was {reason}. {more}")
        self.session.emit({"event": "stop", "step": step, "reason": reason})
        outcome = {"recipe": self.options.name, "status": status, "reason": reason}
        total = self.order.get("global_batch_size")
        run.write_result(run_result(self.world, self.position, **outcome, global_batch_size=total))

    def close(self, error: BaseException | None) -> None:
        """Stop catching signals, and let another process open the run."""
        self._hook.remove()
        self._exits.__exit__(None, None, None)
        raised: Any = (None, None, None)
        if error is not None and not isinstance(error, Stopped):
            raised = type(error), error, error.__traceback__
        self._trackers.__exit__(*raised)
        # After a failure, a signal that no training could act on is kept for who reports that.
        self._signals.__exit__(*raised)
        self.session.close()
