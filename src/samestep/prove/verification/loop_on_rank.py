"""What a rank does with a script that has a loop of its own: run it, and watch its first steps.

The script stays as it is. `open_run` gives it a run that keeps a trace, uses a few of the samples,
and ends the process once enough steps are taken.
"""

import contextlib
import os
import pickle
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.base.errors import AlreadyTold, UserError
from samestep.base.settings import Device, Precision
from samestep.base.startup import JOB_RUN
from samestep.base.trees import map_tensors, tree_leaves
from samestep.core.data.keyed_random import seed_rank
from samestep.core.data.recipe_data import per_sample
from samestep.core.learner.optimizer_state import parameters_in
from samestep.core.learner.side_effects import ALL_KINDS, Draws, RandomDraws, batch_norms
from samestep.core.loops.gradients import Trained, parameters_of
from samestep.core.loops.kept_state import precision_of
from samestep.core.loops.loop_data import OwnBatch
from samestep.core.loops.loop_session import Options
from samestep.core.loops.run import OwnRun
from samestep.launch.ranks import process_group
from samestep.launch.ranks.process import hand_back, leave_for_parent
from samestep.launch.ranks.world import abandon
from samestep.prove.verification.few_samples import TrainingSize, num_samples, spread, subset
from samestep.prove.verification.harness import failure_of
from samestep.prove.verification.recipe_under_test import Doubles, freeze, nudge
from samestep.prove.verification.rows.data import Changes, dataset_again
from samestep.prove.verification.rows.one_writer import ONE_WRITER, RecipeOutput
from samestep.prove.verification.rows.trainings import Arithmetic, TypesInSteps
from samestep.prove.verification.short_trainings import (
    OPTIMIZER_ROW,
    RankReport,
    ShortTraining,
    Start,
)
from samestep.prove.verification.trace import Trace, sample_hashes, values_by_name, values_of

PASSES = "passes"  # what a rank's report calls its backward passes
STATISTICS = "statistics"
"""… and the means and variances at which batch normalisation is frozen."""
GLOBAL_BATCH = "global batch"
READ_AGAIN = "read again"
GROUPS = "groups"
"""… and the numbers in the groups of the optimizers: step → of each group by name."""
_SCALE = 2.0**10  # where a gradient scaler begins at most


@dataclass(frozen=True, kw_only=True)
class LoopTask:
    """What the ranks of one start are to do."""

    script: Path
    arguments: tuple[str, ...]
    folder: Path
    run: Path
    start: Start
    training: ShortTraining
    most_ranks: int
    device: Device
    doubles: bool  # whether all is computed in float64
    precision: Precision = "fp32"  # what it computes in otherwise, once that is known
    statistics: Mapping[str, list[Tensor]] = field(default_factory=dict)
    """Batch normalisation → the statistics at which it is held."""
    arithmetic: Arithmetic | None = None
    """What the optimizers compute in; for a training that nudges gradients."""


class Pass(NamedTuple):
    """A backward pass, before anything is added up over ranks."""

    loss: float
    terms: float  # by what its loss weighs among those of the ranks
    gradient: NDArray[np.float64]  # all parameters in a row, of large ones some values
    step: int  # counted from 1


def run_script(task: LoopTask, output: RecipeOutput, log: Path) -> NoReturn:
    """Run the script as one rank; hand back a trace and a report, and end this process."""
    trace, report = Trace(training=task.training.name), RankReport()
    report.results[ONE_WRITER.name] = output
    OwnRun.opened_as = partial(WatchedRun, task, trace, report)
    sys.argv[:] = [str(task.script), *task.arguments]
    sys.path.insert(0, str(task.script.parent.resolve()))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.pop(JOB_RUN, None)  # the run of a job that verifies is another
    os.environ |= {
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": f"sqlite:///{task.folder}/mlflow.db",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(task.folder),
    }
    torch.compiler.set_stance("force_eager")  # a compiled model rounds, and is slow to begin
    name = task.script.name
    try:
        runpy.run_path(str(task.script), run_name="__main__")
        raise UserError(f"{name} ended without a run: it never entered samestep.open_run(…).")
    except AlreadyTold:
        raise
    except (Exception, SystemExit) as raised:
        error: Exception = raised if isinstance(raised, Exception) else _exited(name, raised, log)
    if isinstance(error, EOFError):
        error = UserError(f"{name} asks for input, but has no terminal. Pass it as an argument.")
    failure = failure_of(trace, error)
    # Among several ranks, what all of them have found together is a difference.
    agreed = task.start.world_size == 1 or getattr(error, "on_all_ranks", False)
    report.failures.append(replace(failure, mistake=failure.mistake and agreed))
    hand_back(report)
    leave_for_parent(failure.message, 1)
    abandon(1)
    sys.exit(1)


def _exited(name: str, error: SystemExit, log: Path) -> UserError:
    """Return the error for a script that ended itself, as for a missing argument."""
    sys.stderr.flush()
    printed = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = error.code if isinstance(error.code, str) else (printed or ["it said nothing"])[-1]
    return UserError(
        f"{name} ended itself by exit({error.code if isinstance(error.code, int) else ''}) before "
        f"its steps were taken: {last}. The script's own arguments follow `--`."
    )


class WatchedRun(OwnRun):
    """A run in a scratch directory, of which a trace is kept."""

    def __init__(self, task: LoopTask, trace: Trace, report: RankReport, options: Options) -> None:
        changed: dict[str, Any] = {"checkpoint_every_epochs": 10**9, "checkpoint_every_steps": None}
        changed |= {"path": task.run, "resume": False, "log_every": 1, "timeout_s": 120.0}
        changed["trackers"] = ()
        if options.device == "auto":
            changed["device"] = task.device
        super().__init__(replace(options, **changed))
        self._task, self._trace, self._report = task, trace, report
        self._fixed = ALL_KINDS - task.training.free
        self._seen, self._in_validation = RandomDraws(), RandomDraws()
        self._drawn_before: tuple[object, object] | None = None
        self._size: TrainingSize | None = None
        self._losses: dict[int, float] = {}
        self._autocast: set[torch.dtype] = set()
        self._in_steps = TypesInSteps()
        self._read_again: Callable[[], Changes | None] = lambda: None

    # --- what the script does with its run

    def __enter__(self) -> Self:
        if self._task.doubles:
            torch.set_default_dtype(torch.float64)
            self._doubles = Doubles()  # for the rest of this process
            self._doubles.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()
        emit = self._opened.session.emit

        def keep_and_emit(record: dict[str, Any]) -> None:
            if record["event"] != "step" or "loss" in record:
                self._trace.keep(record)
            emit(record)

        vars(self._opened.session)["emit"] = keep_and_emit
        vars(self._opened)["check_weights"] = lambda: None  # they are compared here, with a cause
        register_optimizer_step_pre_hook(lambda optimizer, *_: self._keep_gradients(optimizer))
        if self._task.arithmetic and self._task.training.nudges_gradient:
            register_optimizer_step_pre_hook(self._task.arithmetic.nudging())
        if not self._task.start.place:  # one process is enough to see what steps compute in
            register_optimizer_step_pre_hook(lambda *_: self._watch_step(begins=True))
            register_optimizer_step_post_hook(lambda *_: self._watch_step(begins=False))
        register_module_forward_pre_hook(lambda *_: self._note_precision())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End this process, unless there is an error, which is reported outside."""
        if error is None:
            self._finish()

    def epochs(self, num_epochs: int, *, state: Mapping[str, Any]) -> Iterator[int]:
        """Yield the epochs, the first two of them at least."""
        for part in state.values():
            if isinstance(part, torch.amp.GradScaler) and "_init_scale" in vars(part):
                # Its search for a scale skips steps, other ones where a rank has less of the loss.
                vars(part)["_init_scale"] = min(vars(part)["_init_scale"], _SCALE)
            if isinstance(part, nn.Module) and self._task.doubles:
                part.double()
            if isinstance(part, torch.optim.Optimizer) and self._task.doubles:
                for parameter in parameters_in(part):
                    parameter.data = parameter.data.double()
        # Where an epoch is all that the script wants, it is cut to a few batches here.
        for epoch in super().epochs(max(num_epochs, 2), state=state):
            if 0 not in self._trace.weights:
                self._prepare()
            yield epoch
        self._finish()

    def batches(
        self, data: Any, global_batch_size: int, *, drop_last: bool = False, **more: Any
    ) -> Iterator[OwnBatch]:
        """Yield the batches of a few samples, and keep each step; end the process after enough."""
        few = data
        places = None
        if isinstance(global_batch_size, int) and global_batch_size > 0:
            size = few_steps(data, global_batch_size, drop_last, self._task.most_ranks)
            self._size = self._size or size
            few, places = _few(data, size.num_samples)
            self._report.num_samples = num_samples(data)
            if places is not None and not isinstance(data, tuple | Tensor):
                self._read_again = partial(dataset_again, few, more.get("collate"))
            self._report.results[GLOBAL_BATCH] = global_batch_size
            if (weights := more.get("weights")) is not None and places is not None:
                more["weights"] = per_sample("weights", weights, data)[torch.as_tensor(places)]
        inner: Any = super().batches(few, global_batch_size, drop_last=drop_last, **more)
        with closing(inner) as batches:
            for batch in batches:
                self._stop_after_enough()
                self._begin(batch, places)
                with Draws(self._seen, hold="dropout" in self._fixed):
                    try:
                        yield batch
                    finally:
                        self._note_draws()
                        self._trace.weights[batch.step + 1] = self._weights()
        self._stop_after_enough()

    def validation(self, data: Any, batch_size: int, **more: Any) -> Iterator[OwnBatch]:
        """Yield a few samples of the validation."""
        few, places = _few(data, 2 * self._task.most_ranks + 1)
        inner: Any = super().validation(few, batch_size, **more)
        with closing(inner) as batches:
            for batch in batches:
                self._convert(batch, places)
                with Draws(self._in_validation, hold=False):
                    yield batch

    def backward(
        self, loss: Tensor, *trained: Trained, terms: float | Tensor | None = None, **more: Any
    ) -> Tensor:
        """Keep the loss and the gradient of this rank's share, then do as asked."""
        self._note_draws()
        batch = self._loop.use_batch("run.backward", trains=True)
        step = self._opened.position.step + 1
        usable = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        if usable:
            parameters = parameters_of(trained)
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            pairs = zip(gradients, parameters, strict=True)
            parts = [values_of(torch.zeros_like(p) if g is None else g)[1:] for g, p in pairs]
            num_terms = batch.rows if terms is None else float(terms)
            mine = Pass(float(loss), num_terms * (batch.weight > 0), np.concatenate(parts), step)
            self._report.results.setdefault(PASSES, []).append(mine)
        total = super().backward(loss, *trained, terms=terms, **more)
        self._losses.setdefault(step, float(total))
        return total

    # --- what is kept of it

    def _prepare(self) -> None:
        """Hold still what is to be held, before anything is computed."""
        task, modules = self._task, self._opened.modules()
        self._norms = {
            f"{name}.{of}": norm
            for name, module in modules.items()
            for of, norm in batch_norms(module).items()
        }
        self._trace.weights[0] = self._weights()
        if "batchnorm" in self._fixed:
            freeze(self._norms.values())
        for name, norm in self._norms.items():
            if "batchnorm" not in self._fixed:
                norm.momentum = 1.0  # the statistics are then those of the last batch
            elif norm.running_mean is not None and name in task.statistics:
                norm.running_mean.copy_(task.statistics[name][0])
                norm.running_var.copy_(task.statistics[name][1])  # type: ignore[union-attr]
        for module in modules.values() if task.training.nudged else ():
            nudge(module, task.precision)

    def _begin(self, batch: OwnBatch, places: Tensor | None) -> None:
        self._trace.begun = step = batch.step + 1
        leaves = tree_leaves(batch.data)
        by_row = all(isinstance(x, Tensor) and x.shape[:1] == (batch.rows,) for x in leaves)
        marks = sample_hashes(batch.data) if by_row else [""] * batch.rows
        self._convert(batch, places)
        if batch.weight:
            pairs = zip(batch.indices.tolist(), marks, strict=True)
            self._trace.samples[step] = [f"{place} {mark}" for place, mark in pairs]
        if "state" in self._fixed:
            seed_rank(0, 0)
        self._drawn_before = _generators()

    def _convert(self, batch: OwnBatch, places: Tensor | None) -> None:
        """Give a batch the places of its samples in all of the data, and wide numbers."""
        if places is not None:
            batch.indices = places[batch.indices]
        if self._task.doubles:
            wide = lambda t: t.double() if t.is_floating_point() else t  # noqa: E731
            batch.data = map_tensors(wide, batch.data)

    def _weights(self) -> dict[str, NDArray[np.float64]]:
        modules = self._opened.modules().items()
        buffers = ((f"{name}.{of}", b) for name, m in modules for of, b in m.named_buffers())
        return values_by_name([*self._opened.trained.items(), *buffers])

    def _keep_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        names = {id(p): name for name, p in self._opened.trained.items()}
        groups = self._report.results.setdefault(GROUPS, {}).setdefault(self._trace.begun, [])
        groups += map(_numbers_of, optimizer.param_groups)
        gradients = (
            (names.get(id(p), "a parameter outside the state"), p.grad)
            for p in parameters_in(optimizer)
        )
        first_gradients = self._trace.gradients.setdefault(self._trace.begun, {})
        first_gradients |= values_by_name(gradients) | first_gradients  # what came first stays

    def _watch_step(self, *, begins: bool) -> None:
        if begins:
            self._in_steps.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._in_steps.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _note_draws(self) -> None:
        """Note whether Python's or NumPy's generator was used; what follows draws alike anyway."""
        before, self._drawn_before = self._drawn_before, None
        names = ("Python's random", "NumPy's random")
        after = _generators()
        drawn = zip(names, before or after, after, strict=True)
        self._seen.generators |= {name for name, then, now in drawn if then != now}

    def _note_precision(self) -> None:
        device = self._opened.world.device.type
        if torch.is_autocast_enabled(device):
            self._autocast.add(torch.get_autocast_dtype(device))

    def _stop_after_enough(self) -> None:
        """End this process after the last step; all that belongs to the step is recorded."""
        if self._size is not None and self._opened.position.step >= self._size.steps:
            self._finish()

    def _finish(self) -> NoReturn:
        taken = self._opened.position.step
        if self._size is None or not taken:
            raise UserError(
                f"{self._task.script.name} took no step: its run ended before a batch of "
                "run.batches(…) was trained."
            )
        for step in range(1, taken + 1):
            self._trace.losses.setdefault(step, self._losses.get(step, float("nan")))
        full = max(0, taken - 1 - (not self._size.drop_last))
        size = self._size if taken == self._size.steps else replace(self._size, full=full)
        means = ((n, m.running_mean, m.running_var) for n, m in self._norms.items())
        weights = {p.dtype for p in self._opened.trained.values()}
        wide = self._task.doubles
        self._report.results |= {
            "size": size,
            "precision": precision_of(self._autocast | weights),
            "BatchNorm": [*self._norms],
            STATISTICS: {name: both for name, *both in means if both[0] is not None},
            "dropout": self._seen.draws,
            "state": self._seen.generators,
            "evaluation": self._in_validation.draws,
            OPTIMIZER_ROW: self._in_steps.arithmetic(
                torch.float64 if wide else torch.float32, wide=wide
            ),
        }
        if not self._task.start.place:
            with contextlib.suppress(Exception):  # of a data set that reads in another way
                self._report.results[READ_AGAIN] = self._read_again()
        self._batches.close()
        hand_back(self._trace)
        hand_back(self._report)
        process_group.cleanup()
        sys.stdout.flush()
        os._exit(0)  # what follows the steps is not run


def _numbers_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of an optimizer's group, such as its learning rate."""
    single = {k: v for k, v in group.items() if not isinstance(v, Tensor) or v.numel() == 1}
    return {k: float(v) for k, v in single.items() if isinstance(v, int | float | Tensor)}


def _generators() -> tuple[object, object]:
    return random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002


def few_steps(data: Any, batch: int, drop_last: bool, most_ranks: int) -> TrainingSize:
    """Return the smallest training that has an uneven last batch, and continues after it."""
    total = num_samples(data)
    full = min(total // batch, 3 if drop_last else 2)
    rest = min(total - full * batch, batch - 1) * (not drop_last)
    if not rest and not drop_last and full > 1:
        full, rest = full - 1, batch - 1
    return TrainingSize(
        num_samples=full * batch + rest or total,
        global_batch=batch,
        rest=rest,
        full=full,
        drop_last=drop_last or not rest,
        num_evaluated=0,
        ranks=most_ranks,
    )


def _few(data: Any, number: int) -> tuple[Any, Tensor | None]:
    """Return a few of the samples and their places; of what is not data, that itself."""
    parts = data if isinstance(data, tuple) else (data,)
    if not all(isinstance(part, Tensor) for part in parts) and isinstance(data, tuple):
        return data, None
    if not (hasattr(parts[0], "__len__") and hasattr(parts[0], "__getitem__")):
        return data, None
    places = spread(num_samples(data), number)
    return subset(data, places), torch.tensor(places, dtype=torch.int64)
