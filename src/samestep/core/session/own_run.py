"""`samestep.open_run`: a run for a training loop that the user writes."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor

from samestep.base.errors import AlreadyTold, UserError, did_you_mean, raised_at
from samestep.base.run.files import read_object
from samestep.base.settings import OrderName
from samestep.core.data.keyed_random import (
    mix,
    mix_next,
    seed_alike,
    seed_rank,
    seed_torch,
    seed_update,
)
from samestep.core.data.order import steps_per_epoch
from samestep.core.recipe import Collate, PerSample
from samestep.core.session.declared import checked_settings
from samestep.core.session.gradients import (
    Kept,
    Passes,
    Trained,
    backward,
    check_loss,
    parameters_of,
    weight_of,
)
from samestep.core.session.own_carry import RankState, SlotState
from samestep.core.session.own_data import Drawn, OpenedData, OwnBatch
from samestep.core.session.own_gather import close_gather, open_gather
from samestep.core.session.own_session import Options, OwnSession
from samestep.core.session.own_state import Means, Stateful, check_held, check_names
from samestep.core.session.saver import say
from samestep.core.session.session import Stopped
from samestep.core.training.alike import check_same, is_checked, random_numbers
from samestep.core.training.carried import Carry
from samestep.core.training.meter import Clock
from samestep.core.training.plan import is_recorded, steps_between_records
from samestep.core.training.prepare import share_buffers
from samestep.core.training.stopping import Watch
from samestep.launch.ranks import process_group, watched
from samestep.launch.ranks.process import RankLog, rank_of, report
from samestep.launch.ranks.world import World

Thing = TypeVar("Thing", bound=torch.nn.Module | Tensor)

_EPOCH_BEGINS, _EPOCH_ENDS, _VALIDATED = 1, 2, 3
"""Tags of the seeds for what is drawn around the batches of an epoch."""

BEFORE_EPOCHS = "before the epochs"
BEFORE_BATCHES = "before the batches of an epoch"
IN_BATCHES = "between the batches of an epoch"
AFTER_BATCHES = "after the batches of an epoch"
AFTER_EPOCHS = "after the epochs"


class OwnRun:
    """One run of a training loop that you write, on this rank; open within its `with`.

        with samestep.open_run("runs/mine", resume=True) as run:
            model = run.place(Net())
            optimizer = torch.optim.Adam(model.parameters())
            for epoch in run.epochs(10, state={"model": model, "optimizer": optimizer}):
                for batch in run.batches((x, y), global_batch_size=64):
                    loss = loss_of(model, *batch.data)
                    optimizer.zero_grad()
                    run.backward(loss, model)
                    optimizer.step()
                    run.log(loss=loss)

    What ranks other than 0 print goes to `rank-N.log` in the run directory.
    """

    opened_as: ClassVar[Callable[[Options], "OwnRun"] | None] = None
    """What `open_run` opens in this process instead: `samestep verify` watches a run's steps."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._own: OwnSession | None = None
        self._is_open = False
        self._place = BEFORE_EPOCHS
        """Where the script is; a phrase for messages."""
        self._batch: OwnBatch | None = None
        """The batch that the script has now, in training or validation."""
        self._used = False
        """Whether the script has done anything with it."""
        self._means: dict[str, float] = {}
        self._num_epochs = self._backwards = 0
        self._epoch_ended = False
        self._data: dict[str, OpenedData] = {}
        self._sums: Kept = {}
        self._held: set[int] = set()
        """The ids of what `run.backward` was given and `state` has."""

    def __enter__(self) -> Self:
        """Join the other ranks, open the run directory, seed all ranks alike, catch stop signals.

        Raises:
            SystemExit: 2, after a message, for a mistake of the user.
        """
        self._log = RankLog(rank_of())
        try:
            own = self._own = OwnSession(self._options, self._log)
        except Exception as error:
            process_group.end_failed(
                error, self._log, connected=process_group.current_world().connected
            )
            raise
        self._log_into, self._passes, self._is_open = own.means, Passes(own.world), True
        open_gather(self._where)
        self._log_every = own.options.log_every
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save what is not saved yet, write the result, and leave the other ranks.

        Raises:
            SystemExit: 2, after a message, for a mistake of the user; 128 + its number after a stop
                signal; among several ranks, 1 after any other error.
        """
        own, given, means = self._opened, error, self._means
        if isinstance(error, SystemExit) and not isinstance(error, AlreadyTold):
            error = UserError(
                f"exit({error.code or ''}) was called{raised_at(error)}, within the run: other "
                "ranks would wait for this one.",
                remedy="Leave the loop by break on all ranks, or raise an error.",
            )
            error.__cause__ = given
        try:
            watched.turn_to(watched.END)
            if error is None:
                self._leave()
                own.world.barrier()  # another rank may have failed after its last step
        except Exception as late:
            error = late
        self._is_open, self._means = False, means  # after a break there are none
        close_gather()
        try:
            own.end(error)
        except UserError as late:  # a full disk, say
            error = error or late
        for opened in self._data.values():
            opened.source.close()
        own.close(error)
        if error is None or isinstance(error, Stopped):
            try:
                process_group.cleanup()
            except RuntimeError as late:  # another rank is gone
                error = late
            else:
                watched.end()
                return
        process_group.end_failed(error, self._log, connected=own.world.connected)
        if error is not given:
            raise error

    @property
    def _opened(self) -> OwnSession:
        if self._own is None:
            self._refuse()
        return self._own

    def _refuse(self) -> NoReturn:
        """End the script with a message: this mistake needs no traceback."""
        error = UserError(
            "The run was used outside of `with samestep.open_run(…) as run:`.",
            remedy="Do all of the training within it.",
        )
        process_group.end_reported(report(error))

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._opened.path

    @property
    def rank(self) -> int:
        """The number of this rank among all."""
        return self._opened.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._opened.world.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self._opened.world.is_main

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._opened.world.device

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return self._opened.position.step

    @property
    def means(self) -> dict[str, float]:
        """Means of what was logged, exact over all ranks.

        Once the batches of an epoch are through they are those of the epoch, and after `validation`
        those of its data. There are none after a `break` out of the batches, or if no epoch
        was left to train.
        """
        return self._means

    @property
    def state(self) -> dict[str, Any]:
        """Numbers and texts that checkpoints hold, by name: `run.state["waited"] = 3`.

        Set first values before the epochs: a resumed run then gets those of its checkpoint.
        They must be the same on all ranks.
        """
        return self._opened.values

    def place(self, thing: Thing) -> Thing:
        """Return a module or a tensor on this rank's device."""
        return cast("Thing", thing.to(self.device))

    # --- the epochs

    def epochs(self, num_epochs: int, *, state: Mapping[str, Stateful]) -> Iterator[int]:
        """Yield the epochs that are to be trained, as `range(num_epochs)` does.

        With `resume`, the state is first restored from the newest intact checkpoint, and the epochs
        continue from there. What the script does after the batches of an epoch (a
        validation, `scheduler.step()`) belongs to the epoch: its checkpoint comes afterwards.

        Args:
            num_epochs: passes over the data, those of earlier attempts included.
            state: name → whatever changes in training and has `state_dict` and `load_state_dict`:
                modules, optimizers, schedules. It must be the same on all ranks. The modules are
                made so here, and checkpoints hold what rank 0 has.

        Raises:
            UserError: the checkpoint is of another program, other settings or other data, or
                something in `state` cannot be saved.
        """
        self._check_place("run.epochs", BEFORE_EPOCHS)
        if not isinstance(num_epochs, int) or num_epochs < 1:
            raise UserError(f"run.epochs({num_epochs!r}): it must be a whole number from 1.")
        own = self._opened
        own.track(state, num_epochs)
        self._num_epochs, position = num_epochs, own.position
        own.clock = Clock(position)
        if own.finished and num_epochs > own.finished["epochs"]:
            own.finished = None  # the script asks for more epochs now
        if not self._goes_on:
            self._nothing_to_train()
        while self._goes_on:
            self._place, self._epoch_ended = BEFORE_BATCHES, False
            self._means, own.metric = {}, None
            self._seed(_EPOCH_BEGINS)
            yield position.epoch
            self._check_place("the next epoch", AFTER_BATCHES)
            self._close_epoch()
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
        self._place = AFTER_EPOCHS
        self._seed(_EPOCH_BEGINS)

    @property
    def _goes_on(self) -> bool:
        """Whether an epoch is still to be trained, or to be completed."""
        position, finished = self._opened.position, self._opened.finished is not None
        return position.epoch < self._num_epochs and (not finished or position.step_in_epoch > 0)

    def _nothing_to_train(self) -> None:
        own = self._opened
        result = own.world.on_main(lambda: read_object(own.path / "result.json"))
        ended = result.get("status") == "completed" and result.get("steps") == own.position.step
        if not ended:  # the end of the run is still to be recorded
            sizes = own.order["num_samples"], own.order["global_batch_size"]
            steps = steps_per_epoch(*sizes, drop_last=own.order["drop_last"])
            own.begin(own.order, self._sizes(own.order, steps))
        why = f" ({own.finished['reason']})" if own.finished else ""
        say(own.world, f"{own.path} has its {own.position.epoch} epochs{why}: nothing to train.")

    def finish(self, reason: str = "finished early") -> None:
        """Let this epoch be the last, on all ranks, once any of them has called it.

        The same command does not train a finished run any further. It continues only if the script
        asks for more epochs than before.

        Args:
            reason: for the records.

        Raises:
            UserError: it is called outside of an epoch.
        """
        self._check_place("run.finish", IN_BATCHES, AFTER_BATCHES)
        self._opened.finished = {"reason": str(reason), "epochs": self._num_epochs}

    def best(self, name: str = "loss", *, mode: Literal["min", "max"] = "min") -> bool:
        """Return whether a value of `means` is the best so far, and so is this epoch's checkpoint.

            if run.best("accuracy", mode="max"):
                run.state["waited"] = 0

        Call it in each epoch and on every rank, after the batches or after the validation. The best
        checkpoint is always kept, `load_best` reads it, and `checkpoints/index.json` names it.

        Args:
            name: what was logged; the same in each epoch.
            mode: whether less is better, or more.

        Raises:
            UserError: it is called elsewhere or on some ranks only, or nothing of this name was
                logged.
        """
        self._check_place("run.best", AFTER_BATCHES)
        own, call = self._opened, f"run.best({name!r}, mode={mode!r})"
        watch = own.watch or Watch(metric=name, mode=mode)
        if mode not in ("min", "max"):
            raise UserError(f"{call}: it must be 'min' or 'max'.")
        if (watch.metric, watch.mode) != (name, mode):
            raise UserError(
                f"{call}: the best checkpoint of this run is chosen by {watch.metric!r}, "
                f"{watch.mode!r}. A run has one such measure."
            )
        if name not in self._means:
            raise UserError(
                f"run.best({name!r}): there is no such mean. {did_you_mean(name, self._means)}"
                f"run.means has: {', '.join(self._means) or 'nothing'}. Call it after the batches, "
                "or after run.validation, in which run.log is given the value."
            )
        if own.metric is None:  # the first call of the epoch
            own.metric = self._means[name]
            own.watch = watch.after(own.metric, own.position.epoch + 1, 0.0)
        return own.is_best()

    def load_best(self) -> int:
        """Return the epoch of the best checkpoint, after its weights are in the modules of `state`.

        Call it after the epochs: what follows is not saved.

        Raises:
            UserError: it is called before, or `best` never was.
        """
        if not self._is_open:
            self._refuse()
        self._leave()
        self._check_place("run.load_best", AFTER_EPOCHS)
        return self._opened.load_best()

    def _leave(self) -> None:
        """Save where the script has left its loops, if it is not saved yet; all ranks call it."""
        own = self._opened
        if self._place == AFTER_BATCHES:
            self._close_epoch()
            self._place = AFTER_EPOCHS
            own.is_best_on_all()
            if self._goes_on:
                own.left = f"left after epoch {own.position.epoch} of {self._num_epochs}"
        if self._place != BEFORE_EPOCHS:
            own.save()
            own.settle()

    def _close_epoch(self) -> None:
        self._end_epoch()  # if the script left its batches by break
        position = self._opened.position
        position.epoch, position.step_in_epoch = position.epoch + 1, 0
        position.epoch_started_s = position.seconds
        self._opened.means.clear()

    # --- the batches

    def batches(
        self,
        data: Any,
        global_batch_size: int,
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
        order: OrderName = "shuffled",
        weights: PerSample | None = None,
        carry: Carry | None = None,
    ) -> Iterator[OwnBatch]:
        """Yield this rank's part of the steps of the running epoch, from the exact step on.

        The order depends only on seed and epoch. Each global batch is shared out as evenly as
        possible; the last one of an epoch may be smaller. Between two batches ranks agree on stop
        signals, and checkpoints are written. Before each, all random generators are seeded by
        (seed, rank, step), up to `backward`; what must not depend on the number of ranks is drawn
        from the batch.

        Args:
            data: a tensor, a tuple of tensors, or a map-style `Dataset`.
            global_batch_size: samples of a step over all ranks. Each global batch counts as a step,
                however often the optimizer steps.
            collate: list of samples of a `Dataset` → batch, any tree of tensors.
            num_workers: processes per rank that read a `Dataset`.
            drop_last: whether to leave out the last global batch where it is smaller.
            order: of the samples, as `--order` of a recipe: shuffled, sequential, columns,
                replacement or weighted.
            weights: a number for each sample, or data → these numbers, with order="weighted".
            carry: rows → tensors with a row for each slot of the global batch, or a tree of them,
                for what `run.carry` has of this batch's slots. An epoch begins anew; with a
                parameter `carried` it is given what the epoch before has left, or None. A
                function without rows makes one state for each rank; only the same number of
                ranks can continue from it.

        Raises:
            UserError: it is called outside of an epoch, or twice within one, or the run was begun
                with another order of samples.
        """
        self._check_place("run.batches", BEFORE_BATCHES)
        own = self._opened
        seed, position, world = own.options.seed, own.position, own.world
        num_workers = checked_settings({"num_workers": num_workers}, "run.batches")["num_workers"]
        parts = {"collate": collate, "weights": weights, "carry": carry}
        given: dict[str, Any] = {name: part is not None for name, part in parts.items()}
        given |= {"global_batch_size": global_batch_size, "drop_last": drop_last, "order": order}
        check_same(given, world, "The arguments of run.batches")
        opened = self._open("train", data, collate, num_workers, (order, weights))
        num_steps = opened.steps(global_batch_size, drop_last=drop_last)
        made_of = {
            "seed": seed,
            "num_samples": opened.source.num_samples,
            "global_batch_size": global_batch_size,
            "drop_last": drop_last,
            "data": opened.digest,
            **opened.source.order_record(),
        }
        own.begin(made_of, self._sizes(made_of, num_steps))
        if carry is not None:
            own.carry(carry, global_batch_size)
        self._place = IN_BATCHES
        own.clock.resume(position)
        of_seed, of_rank = mix(seed), mix(seed, world.rank)
        first = position.step_in_epoch
        read = opened.epoch(position.epoch, first, global_batch_size, drop_last=drop_last)
        with closing(read):
            for batch in read:
                batch.step, self._backwards = position.step, 0
                own.passed.clear()
                if own.carried is not None:
                    own.carried.begin(position.step_in_epoch, batch.global_size, batch.step)
                # The script draws other numbers on each rank.
                seed_torch(mix_next(of_rank, batch.step), world.device)
                seed_rank(mix_next(of_seed, batch.step), world.rank)
                torch.clear_autocast_cache()  # a context around the loop would keep older weights
                self._batch, self._used = batch, False
                try:
                    yield batch
                except GeneratorExit:
                    if self._used:  # break after the step, not before
                        self._count(batch)
                    self._place = AFTER_BATCHES
                    raise
                finally:
                    self._batch = None
                self._passes.end(batch.step)
                self._count(batch)
                self._after_step(is_last=position.step_in_epoch == num_steps)
        watched.turn_to(watched.EVALUATION)  # or whatever the script does after the batches
        self._end_epoch()
        self._place = AFTER_BATCHES

    def validation(
        self,
        data: Any,
        batch_size: int,
        *,
        split: Literal["validation", "test"] = "validation",
        collate: Collate | None = None,
        num_workers: int = 0,
    ) -> Iterator[OwnBatch]:
        """Yield this rank's share of all samples, each once; every rank calls it.

        What is logged meanwhile becomes an `evaluation` record, of means over all samples and
        ranks, and afterwards `means` has them. `model.eval()` and `torch.no_grad()` are the
        script's. Within a batch of the training it leaves the random numbers, and with them the
        training, as they were.

        Args:
            data: as in `batches`.
            batch_size: samples per rank and batch.
            split: what the record calls it.
            collate: as in `batches`.
            num_workers: as in `batches`.

        Raises:
            UserError: it is called before the epochs, or within a batch between `backward` and
                the step of an optimizer in `state`.
        """
        places = BEFORE_BATCHES, IN_BATCHES, AFTER_BATCHES, AFTER_EPOCHS
        self._check_place("run.validation", *places)
        if split not in ("validation", "test"):
            raise UserError(f"run.validation(split={split!r}): it is 'validation' or 'test'.")
        num_workers = checked_settings({"num_workers": num_workers}, "run.validation")[
            "num_workers"
        ]
        with self._aside(split) if self._place == IN_BATCHES else nullcontext():
            yield from self._validate(data, batch_size, split, collate, num_workers)

    @contextmanager
    def _aside(self, split: str) -> Iterator[None]:
        """Leave the training, within one of its batches, as if there had been no validation."""
        own, batch, used = self._opened, self._batch, self._used
        if own.is_accumulating():
            raise UserError(
                "run.validation was called between run.backward and the optimizer's step: the "
                "gradients of this batch are only in part in the weights, which belong to no step.",
                remedy="Call it after optimizer.step(), or before run.backward.",
                on_all_ranks=True,
            )
        position, modules = own.position, own.modules().values()
        position.seconds = own.clock.seconds()
        # A validation gives every rank the buffers of rank 0.
        buffers = [] if own.world.is_main else [b for m in modules for b in m.buffers()]
        kept = [buffer.clone() for buffer in buffers]
        drawn = mix(own.options.seed, 0, 0, position.epoch, _VALIDATED, crc32(split.encode()))
        try:
            with random_numbers(mix(drawn, position.step), own.world.device):
                yield
        finally:
            for buffer, before in zip(buffers, kept, strict=True):
                buffer.copy_(before)
            torch.clear_autocast_cache()  # older PyTorch kept casts made without gradients
            self._batch, self._used = batch, used
            own.clock.resume(position)

    def _validate(
        self, data: Any, batch_size: int, split: str, collate: Collate | None, num_workers: int
    ) -> Iterator[OwnBatch]:
        own, before, started = self._opened, self._place, time.perf_counter()
        opened = self._open(split, data, collate, num_workers)
        for module in own.modules().values():
            share_buffers(module, own.world)  # else each rank evaluates a model of its own
        means = self._log_into = Means(own.world)
        self._place = f"in the {split}"
        watched.turn_to(watched.EVALUATION)
        step, epoch = own.position.step, own.position.epoch
        if before == IN_BATCHES and self._backwards:
            step += 1  # the weights have made it
        try:
            for batch in opened.once(batch_size, epoch):
                batch.step, self._batch = step, batch
                watched.alive()
                torch.clear_autocast_cache()
                yield batch
        finally:
            self._place, self._batch, self._log_into = before, None, own.means
            if before != IN_BATCHES:
                # Ranks have drawn unequally often where their shares are unequal.
                self._seed(_VALIDATED, crc32(f"{split} {before}".encode()))
        self._means = means.read()
        own.session.emit(
            {
                "event": "evaluation",
                "split": split,
                "epoch": epoch + (before != AFTER_EPOCHS),
                "step": step,
                **self._means,
                "samples": opened.source.num_samples,
                "seconds": time.perf_counter() - started,
            }
        )

    def _open(
        self,
        split: str,
        data: Any,
        collate: Collate | None,
        workers: int,
        drawn: Drawn = ("shuffled", None),
    ) -> OpenedData:
        """Return the data, opened once."""
        if (before := self._data.get(split)) is not None:
            if before.is_of(data, collate, workers, drawn):
                return before
            before.source.close()
            del before, self._data[split]  # its memory may be needed for the new one
        own = self._opened
        opened = OpenedData(data, own.world, own.options.seed, collate, workers, drawn)
        self._data[split] = opened
        return opened

    def _check_place(self, what: str, *places: str) -> None:
        if not self._is_open:
            self._refuse()
        if self._place not in places:
            held = (
                " After a break, close an iterator that something like tqdm holds: batches = "
                "run.batches(…), then batches.close()."
            )
            raise UserError(
                f"{what} was reached {self._place}; it belongs {' or '.join(places)}: for epoch in "
                "run.epochs(…), and within it, once, for batch in run.batches(…)."
                + (held if self._place == IN_BATCHES else "")
            )

    # --- within a batch

    @property
    def carry(self) -> Any:
        """The carried state of this batch's slots, a row for each of its samples.

            for batch in run.batches(text, 20, order="columns", carry=new_hidden):
                outputs, run.carry = model(batch.data, run.carry)

        What is assigned continues in the next step, without its graph; checkpoints hold it, and
        another number of ranks continues from it.

        Raises:
            UserError: it is used outside of a batch of the training, or `batches` got no `carry`;
                or the assigned state has other rows or another shape.
        """
        return self._carried("run.carry").of(self._current("run.carry"))

    @carry.setter
    def carry(self, state: Any) -> None:
        self._carried("run.carry").leave(self._current("run.carry"), state)

    def _carried(self, what: str) -> SlotState | RankState:
        self._current(what, trains=True)
        carried = self._opened.carried
        if carried is None:
            raise UserError(
                f"{what}: nothing is carried. Give run.batches(…, carry=f) a function f(rows) that "
                "makes the state of that many slots."
            )
        return carried

    def backward(
        self,
        loss: Tensor,
        *trained: Trained,
        terms: float | Tensor | None = None,
        retain_graph: bool = False,
    ) -> Tensor:
        """Add the gradient of the loss over the global batch to what is to be trained.

        Only the gradients of what is named are computed, and added up over all ranks, so a script
        may have several losses and optimizers. Every rank calls it equally often. What is drawn
        after it, until the next batch, is the same on all ranks, since it may change the weights.

        Returns:
            The loss over the global batch, the same on all ranks: what a closure gives to LBFGS.

        Args:
            loss: a scalar, the mean over the samples of this batch.
            trained: modules, optimizers or parameters.
            terms: where the loss is a mean over something else (words, pixels): their number in
                this batch.
            retain_graph: whether another loss goes back through the same outputs.

        Raises:
            UserError: it is called outside of a batch of the training, names what no checkpoint
                would hold, the loss has no gradient, or another rank calls it less often.
        """
        batch, parameters = self._current("run.backward", trains=True), parameters_of(trained)
        own = self._opened
        if not self._held.issuperset(map(id, (*trained, *parameters))):
            self._held |= check_held(own.state, trained)
            named = own.trained
            others = [p for p in parameters if all(p is not known for known in named.values())]
            named |= {f"{len(named) + n} {tuple(p.shape)}": p for n, p in enumerate(others)}
        check_loss(loss)
        world, step = own.world, own.position.step
        self._passes.add(step)
        weight = weight_of(batch.weight, terms, loss, world)
        how: Any = {"step": step, "retain_graph": retain_graph, "kept": self._sums}
        total = backward(loss, parameters, world, weight, **how)
        self._backwards += 1
        own.passed.append(parameters)
        seed_update(own.options.seed, step, world.device, self._backwards)
        return total

    def log(self, *, terms: float | Tensor | None = None, **values: float | Tensor) -> None:
        """Take values of this batch, each its mean; records have the means over all ranks.

        `samestep compare` compares runs by the value called `loss`, and a run ends with a message
        where it is NaN or infinite.

        Args:
            terms: the number of what the values are means over, where that is not samples.
            values: by name; numbers, or tensors of one element.

        Raises:
            UserError: it is called outside of a batch, a value is not a single number, or a name is
                that of another field of the records.
        """
        batch = self._current("run.log")
        check_names(values)
        rows = batch.rows if batch.weight else 0
        self._log_into.add(values, rows if terms is None or not rows else terms)

    def _where(self) -> tuple[World, bool]:
        batch = self._current("samestep.gather", trains=True)
        self._passes.gather(batch.step)
        return self._opened.world, batch.weight > 0

    def _current(self, what: str, *, trains: bool = False) -> OwnBatch:
        """Return the batch that the script has; `trains` refuses one of a validation."""
        if not self._is_open:
            self._refuse()
        if self._batch is None or (trains and self._place != IN_BATCHES):
            raise UserError(
                f"{what} was called {self._place}; it belongs to a batch: call it in the loop over "
                "run.batches."
            )
        self._used = True
        return self._batch

    # --- records, checkpoints, stops

    def _sizes(self, order: dict[str, Any], num_steps: int) -> dict[str, Any]:
        own, total, steps = self._opened, order["global_batch_size"], num_steps * self._num_epochs
        self._log_every = own.options.log_every or steps_between_records(steps)
        return {
            "num_samples": order["num_samples"],
            "global_batch_size": total,
            "micro_batch_size": -(-total // own.world.world_size),
            "accumulate": 1,
            "steps_per_epoch": num_steps,
            "epochs": self._num_epochs,
            "total_steps": steps,
            "log_every": self._log_every,
        }

    def _count(self, batch: OwnBatch) -> None:
        if self._opened.carried is not None:
            self._opened.carried.settle()
        position = self._opened.position
        position.step, position.step_in_epoch = position.step + 1, position.step_in_epoch + 1
        position.samples += batch.global_size

    def _after_step(self, *, is_last: bool) -> None:
        """Record the step; save and stop where that is due within the epoch."""
        own = self._opened
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

    def _end_epoch(self) -> None:
        """Sum up the epoch, once."""
        if self._epoch_ended:
            return
        self._epoch_ended = True
        own = self._opened
        position, order = own.position, own.order
        self._means = own.means.read()
        own.check_loss(self._means)
        position.seconds = own.clock.seconds()
        self._seed(_EPOCH_ENDS)
        if "loss" not in self._means:
            return
        # Those of its steps: the last batch is smaller, and the script may have left by break.
        samples = min(position.step_in_epoch * order["global_batch_size"], order["num_samples"])
        seconds = position.seconds - position.epoch_started_s
        others = {name: value for name, value in self._means.items() if name != "loss"}
        own.session.emit(
            {
                "event": "epoch",
                "epoch": position.epoch + 1,
                "step": position.step,
                "loss": self._means["loss"],
                "samples": samples,
                "train_seconds": seconds,
                "samples_per_s": samples / max(seconds, 1e-9),
                **({"metrics": others} if others else {}),
            }
        )

    def _seed(self, *tags: int) -> None:
        """Seed what the script draws around the batches: the same numbers on each rank.

        The epoch decides: a run resumed within it draws what it had drawn before the batches.
        """
        # Five parts and more, so that no step of a rank is seeded alike.
        own = self._opened
        seed_alike(mix(own.options.seed, 0, 0, own.position.epoch, *tags))
