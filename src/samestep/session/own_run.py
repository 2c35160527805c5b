"""`samestep.open_run`: a run for a training loop that the user writes."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Never, Self, TypeVar, cast

import torch
from torch import Tensor

from samestep import dist
from samestep.errors import UserError
from samestep.ranks.process import RankLog, rank_of, report
from samestep.recipe import Collate
from samestep.session.gradients import Trained, backward, check_loss, parameters_of, weight_of
from samestep.session.means import check_names
from samestep.session.own_data import OwnBatch
from samestep.session.own_loop import OwnLoop
from samestep.session.own_options import Options, names_of_path, plain_settings, script_name
from samestep.session.own_session import OwnSession
from samestep.session.own_state import Stateful, check_held
from samestep.session.session import Stopped, as_mistake, end_failed, end_reported
from samestep.settings import Backend, Device

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

    def __init__(self, options: Options) -> None:
        self._options = options
        self._own: OwnSession | None = None
        self._loop: OwnLoop | None = None
        self._held: set[int] = set()
        """The ids of what `run.backward` was given and `state` has."""
        self._means: dict[str, float] = {}

    def __enter__(self) -> Self:
        """Join the other ranks, open the run directory, seed all ranks alike, catch stop signals.

        Raises:
            SystemExit: 2, after a message, for a mistake of the user.
        """
        self._log = RankLog(rank_of())
        try:
            self._own = OwnSession(self._options, self._log)
            self._loop = OwnLoop(self._own)
        except Exception as error:
            world = dist.current_world()
            end_failed(error, self._log, connected=world.connected)
            raise
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
        own, loop = self._own, self._loop
        assert own is not None
        assert loop is not None
        self._loop, self._means = None, loop.means
        given, error = error, as_mistake(error)
        try:
            if error is None:
                loop.leave()
                own.world.barrier()  # another rank may have failed after its last step
        except Exception as late:
            error = late
        try:
            own.end(error)
        except UserError as late:  # a full disk, say
            error = error or late
        loop.close()
        own.close(error)
        if error is None or isinstance(error, Stopped):
            try:
                dist.cleanup()
            except RuntimeError as late:  # another rank is gone
                error = late
            else:
                return
        end_failed(error, self._log, connected=own.world.connected)
        if error is not given:
            raise error

    @property
    def _opened(self) -> OwnSession:
        return self._own or self._refuse()

    @property
    def _within(self) -> OwnLoop:
        return self._loop or self._refuse()

    def _refuse(self) -> Never:
        """End the script with a message: this mistake needs no traceback."""
        error = UserError(
            "The run was used outside of `with samestep.open_run(…) as run:`.",
            remedy="Do all of the training within it.",
        )
        end_reported(report(error))

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
        return self._opened.state.position.step

    @property
    def means(self) -> dict[str, float]:
        """Means of what was logged, exact over all ranks.

        Once the batches of an epoch are through they are those of the epoch, and after `validation`
        those of its data. There are none after a `break` out of the batches, or if no epoch
        was left to train.
        """
        return self._means if self._loop is None else self._loop.means

    @property
    def state(self) -> dict[str, Any]:
        """Numbers and texts that checkpoints hold, by name: `run.state["waited"] = 3`.

        Set first values before the epochs: a resumed run then gets those of its checkpoint.
        They must be the same on all ranks.
        """
        return self._opened.state.own

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
        return self._within.best(name, mode)

    def finish(self, reason: str = "finished early") -> None:
        """Let this epoch be the last, on all ranks, once any of them has called it.

        The same command does not train a finished run any further. It goes on only if the script
        asks for more epochs than before.

        Args:
            reason: for the records.

        Raises:
            UserError: it is called outside of an epoch.
        """
        self._within.finish(reason)

    def load_best(self) -> int:
        """Return the epoch of the best checkpoint, after its weights are in the modules of `state`.

        Call it after the epochs: what follows is not saved.

        Raises:
            UserError: it is called before, or `best` never was.
        """
        return self._within.load_best()

    def place(self, thing: Thing) -> Thing:
        """Return a module or a tensor on this rank's device."""
        return cast("Thing", thing.to(self.device))

    def epochs(self, num_epochs: int, *, state: Mapping[str, Stateful]) -> Iterator[int]:
        """Yield the epochs that are to be trained, as `range(num_epochs)` does.

        With `resume`, the state is first restored from the newest whole checkpoint, and the epochs
        go on from there. What the script does after the batches of an epoch (a
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
        return self._within.epochs(num_epochs, state)

    def batches(
        self,
        data: Any,
        global_batch_size: int,
        *,
        collate: Collate | None = None,
        num_workers: int = 0,
        drop_last: bool = False,
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

        Raises:
            UserError: it is called outside of an epoch, or twice within one, or the run was begun
                with another order of samples.
        """
        loop = self._within
        return loop.batches(data, global_batch_size, collate, num_workers, drop_last=drop_last)

    def validation(
        self,
        data: Any,
        batch_size: int,
        *,
        split: Literal["validation", "test"] = "validation",
        collate: Collate | None = None,
        num_workers: int = 0,
    ) -> Iterator[OwnBatch]:
        """Yield this rank's share of all samples, each once.

        What is logged meanwhile becomes an `evaluation` record, of means over all samples and
        ranks, and afterwards `means` has them. `model.eval()` and `torch.no_grad()` are the
        script's.

        Args:
            data: as in `batches`.
            batch_size: samples per rank and batch.
            split: what the record calls it.
            collate: as in `batches`.
            num_workers: as in `batches`.

        Raises:
            UserError: it is called between the batches of an epoch.
        """
        loop = self._within
        return loop.validation(data, batch_size, split, collate, num_workers)

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
        own, loop = self._opened, self._within
        batch, parameters = loop.current("run.backward", trains=True), parameters_of(trained)
        if not self._held.issuperset(map(id, (*trained, *parameters))):
            self._held |= check_held(own.state.state, trained)
            named = own.trained
            others = [p for p in parameters if all(p is not known for known in named.values())]
            named |= {f"{len(named) + n} {tuple(p.shape)}": p for n, p in enumerate(others)}
        check_loss(loss)
        world, step = own.world, own.state.position.step
        loop.passes.add(step)
        weight = weight_of(batch.weight, terms, loss, world)
        total = backward(loss, parameters, world, weight, step=step, retain_graph=retain_graph)
        loop.seed_update()
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
        loop = self._within
        batch = loop.current("run.log")
        check_names(values)
        rows = batch.rows if batch.weight else 0
        loop.log_into.add(values, rows if terms is None or not rows else terms)


def open_run(
    path: str | Path | None = None,
    *,
    seed: int = 0,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    may_change: Collection[str] = (),
    name: str | None = None,
    log_every: int | None = None,
    checkpoint_every_epochs: int = 1,
    checkpoint_every_steps: int | None = None,
    keep_newest: int | None = None,
    device: Device = "auto",
    backend: Backend = "auto",
    timeout_s: float = 600.0,
    keep_checkpoints: int | None = None,
) -> OwnRun:
    """Return a run for a training loop of your own, alone or as one of the ranks of a launcher.

    Open it by `with`; `OwnRun` has an example.

    Args:
        path: the run directory, which all nodes share; by default that of the job of `samestep
            slurm submit`, or a new one in runs/.
        seed: of the order, of the initial weights, and of all random numbers.
        resume: whether to go on with the run that is there; where there is none, it begins.
        settings: the script's own, by name, kept with the run: numbers, texts, lists and dicts. A
            value equal to `path` is left out.
        may_change: names of settings that may differ when the run goes on.
        name: of the program, for `samestep compare`; by default that of the script.
        log_every: steps between two `step` records; by default the length decides: 200 to 500
            records, and in long runs one every 50 steps.
        checkpoint_every_epochs: epochs between two checkpoints; there is always one at the end.
        checkpoint_every_steps: steps between two checkpoints, besides those after epochs.
        keep_newest: how many of the newest checkpoints are kept, beside the best; by default all.
        device: where to train; "auto" takes the best device here.
        backend: what connects the ranks; "auto" chooses by platform and device.
        timeout_s: seconds that ranks wait for the slowest of them.
        keep_checkpoints: the old name of `keep_newest`.

    Raises:
        SystemExit: at the `with`; 2, after a message, for a mistake of the user; 128 + its number
            after a stop signal, with a checkpoint.
    """
    arguments = locals()
    if arguments.pop("keep_checkpoints") is not None:
        warnings.warn("open_run(keep_checkpoints=…) is keep_newest=… now.", DeprecationWarning, 2)
        arguments["keep_newest"] = keep_checkpoints
    is_path = names_of_path(settings or {}, path)
    kept = {name: value for name, value in (settings or {}).items() if name not in is_path}
    arguments |= {"settings": plain_settings(kept), "name": name or script_name()}
    if not isinstance(may_change, str):
        arguments["may_change"] = {*may_change, *is_path}
    return OwnRun(Options(**arguments))
