"""`samestep.open_run`: what a training loop that the user writes sees of its run."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeVar, cast

import torch
from torch import Tensor

from samestep.base.errors import AlreadyTold, UserError, raised_at
from samestep.base.settings import OrderName
from samestep.core.data.keyed_random import seed_update
from samestep.core.learner.carried import Carry
from samestep.core.loops.batches import LoopBatches
from samestep.core.loops.carry import RankState, SlotState
from samestep.core.loops.epochs import LoopEpochs
from samestep.core.loops.gather import close_gather, open_gather
from samestep.core.loops.gradients import (
    Kept,
    Trained,
    backward,
    check_loss,
    is_sum,
    parameters_of,
    weight_of,
)
from samestep.core.loops.kept_state import Stateful, check_names
from samestep.core.loops.left_out import check_held
from samestep.core.loops.loop_data import OwnBatch
from samestep.core.loops.loop_session import LoopSession, Options
from samestep.core.loops.place import (
    AFTER_BATCHES,
    AFTER_EPOCHS,
    BEFORE_BATCHES,
    BEFORE_EPOCHS,
    IN_BATCHES,
    LoopState,
)
from samestep.core.recipe import Collate, PerSample
from samestep.core.session.session import Stopped
from samestep.launch.ranks import process_group, watched
from samestep.launch.ranks.process import RankLog, rank_of
from samestep.launch.ranks.world import World

Thing = TypeVar("Thing", bound=torch.nn.Module | Tensor)


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
        self._loop_session: LoopSession | None = None
        self._loop = LoopState()
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
            opened = self._loop_session = LoopSession(self._options, self._log)
        except Exception as error:
            process_group.end_failed(
                error, self._log, connected=process_group.current_world().connected
            )
            raise
        self._epochs = LoopEpochs(opened, self._loop)
        self._batches = LoopBatches(opened, self._loop, self._epochs)
        self._loop.is_open = True
        open_gather(self._world_of_step)
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
        opened, given, means = self._opened, error, self._loop.means
        if isinstance(error, SystemExit) and not isinstance(error, AlreadyTold):
            error = UserError(
                f"exit({error.code or ''}) was called{raised_at(error)} during the run: other "
                "ranks would wait for this one.",
                remedy="Leave the loop with break on all ranks, or raise an error.",
            )
            error.__cause__ = given
        try:
            watched.turn_to(watched.END)
            if error is None:
                self._epochs.leave()
                opened.world.barrier()  # another rank may have failed after its last step
        except Exception as late:
            error = late
        self._loop.is_open = False
        self._loop.means = means  # after a break there are none
        close_gather()
        try:
            opened.end(error)
        except UserError as late:  # a full disk, say
            error = error or late
        self._batches.close()
        opened.close(error)
        if error is None or isinstance(error, Stopped):
            try:
                process_group.cleanup()
            except RuntimeError as late:  # another rank is gone
                error = late
            else:
                watched.end()
                return
        process_group.end_failed(error, self._log, connected=opened.world.connected)
        if error is not given:
            raise error

    @property
    def _opened(self) -> LoopSession:
        if self._loop_session is None:
            self._loop.refuse_closed()
        return self._loop_session

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
        return self._loop.means

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
        self._loop.check_place("run.epochs", BEFORE_EPOCHS)
        yield from self._epochs.train(num_epochs, state)

    def finish(self, reason: str = "finished early") -> None:
        """Let this epoch be the last, on all ranks, once any of them has called it.

        The same command does not train a finished run any further. It continues only if the script
        asks for more epochs than before.

        Args:
            reason: for the records.

        Raises:
            UserError: it is called outside of an epoch.
        """
        self._loop.check_place("run.finish", IN_BATCHES, AFTER_BATCHES)
        self._epochs.finish(str(reason))

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
        self._loop.check_place("run.best", AFTER_BATCHES)
        return self._epochs.best(name, mode)

    def load_best(self) -> int:
        """Return the epoch of the best checkpoint, after its weights are in the modules of `state`.

        Call it after the epochs: what follows is not saved.

        Raises:
            UserError: it is called before, or `best` never was.
        """
        if not self._loop.is_open:
            self._loop.refuse_closed()
        self._epochs.leave("run.load_best")
        self._loop.check_place("run.load_best", AFTER_EPOCHS)
        return self._opened.load_best()

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
        self._loop.check_place("run.batches", BEFORE_BATCHES)
        yield from self._batches.of_epoch(
            data,
            global_batch_size,
            collate=collate,
            num_workers=num_workers,
            drop_last=drop_last,
            drawn=(order, weights),
            carry=carry,
        )

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
        self._loop.check_place("run.validation", *places)
        yield from self._batches.validation(data, batch_size, split, collate, num_workers)

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
        return self._carried("run.carry").of(self._loop.use_batch("run.carry"))

    @carry.setter
    def carry(self, state: Any) -> None:
        self._carried("run.carry").leave(self._loop.use_batch("run.carry"), state)

    def _carried(self, what: str) -> SlotState | RankState:
        self._loop.use_batch(what, trains=True)
        carried = self._opened.carried
        if carried is None:
            raise UserError(
                f"{what}: nothing is carried. Pass a function to run.batches(…, carry=f): f(rows) "
                "returns the initial state of that many slots."
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
        batch, parameters = (
            self._loop.use_batch("run.backward", trains=True),
            parameters_of(trained),
        )
        opened = self._opened
        if not self._held.issuperset(map(id, (*trained, *parameters))):
            self._held |= check_held(opened.state, trained)
            named = opened.trained
            others = [p for p in parameters if all(p is not known for known in named.values())]
            named |= {f"{len(named) + n} {tuple(p.shape)}": p for n, p in enumerate(others)}
        check_loss(loss)
        world, step = opened.world, opened.position.step
        if world.connected and terms is None and is_sum(loss, batch.rows):
            opened.left_out.say(
                "note: run.backward and run.log expect a mean over the samples of batch.data, but "
                "were given a sum: the training depends on the number of ranks. Pass loss / "
                "batch.rows to both, or, to keep the sum, loss / batch.rows * batch.global_size."
            )
        self._batches.passes.add(step)
        weight = weight_of(batch.weight, terms, loss, world)
        options: Any = {"step": step, "retain_graph": retain_graph, "kept": self._sums}
        total = backward(loss, parameters, world, weight, **options)
        self._loop.backwards += 1
        opened.left_out.passed.append(parameters)
        seed_update(opened.options.seed, step, world.device, self._loop.backwards)
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
        batch = self._loop.use_batch("run.log")
        check_names(values)
        rows = batch.rows if batch.weight else 0
        self._batches.log_into.add(values, rows if terms is None or not rows else terms)

    def _world_of_step(self) -> tuple[World, bool]:
        batch = self._loop.use_batch("samestep.gather", trains=True)
        self._batches.passes.call("samestep.gather", batch.step)
        return self._opened.world, batch.weight > 0
