"""What a LightningModule's step returns and logs: a loss, and means over samples."""

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.run.records import TAKEN_NAMES
from samestep.core.learner.device import casting_anew
from samestep.core.learner.model_state import modules_of
from samestep.core.learner.side_effects import differing, keep_buffers, model_prints

_STAGES = ("train_", "training_", "val_", "valid_", "validation_", "test_")
NTH = "dataloader_idx_"
"""As Lightning calls what several validation loaders measure."""

_logged: ContextVar[dict[str, Any] | None] = ContextVar("logged", default=None)
_OF_MEANS = ("mean", "avg", torch.mean)
REDUCTIONS: dict[str, Callable[[Iterator[float]], float]] = {"max": max, "min": min, "sum": sum}


class Reduced(NamedTuple):
    """A logged value of which not the mean is taken over batches, but their maximum or the like."""

    value: Any
    by: str


@dataclass
class Evaluated:
    """An evaluation: what its newest batch has logged, but for metrics of torchmetrics."""

    stage: str = ""
    batches: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    _put_back: Callable[[], None] | None = None

    def buffers(self, module: nn.Module) -> Callable[[], None]:
        """Return what puts back a module's buffers, such as a queue that training_step fills."""
        self._put_back = self._put_back or keep_buffers(module)
        return self._put_back


def called(
    module: Any, name: str, batch: Any, *numbers: int, kept: bool = False, seen: Any = None
) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Call a step; return what it returns by name, and what it logs, if that is kept."""
    function = getattr(module, name)
    given = (batch, *numbers)[: _num_taken(module.__class__, name)]
    put_back = seen and name == "training_step" and seen.buffers(module)  # in an evaluation
    with casting_anew():
        returned, logged = noted(function, *given, kept=kept, of_batch=True)
    if put_back:
        put_back()
    outputs = returned if isinstance(returned, Mapping) else {"loss": returned}
    if name == "training_step":
        if outputs.get("loss") is None:
            raise UserError(
                f"training_step{defined_at(function)} returned no loss. A skipped batch makes the "
                "training depend on the number of ranks. Return a loss of 0 instead."
            )
        if seen is None:  # steps begin anew
            reset_metrics(module)
    return outputs, logged


def noted(
    function: Callable[..., Any], *given: Any, kept: bool = True, of_batch: bool = False
) -> tuple[Any, dict[str, Any]]:
    """Call a function; return what it returns, and what it logs, if that is kept."""
    logged: dict[str, Any] = {}
    token = _logged.set(logged if kept else None)
    try:
        returned = function(*given)
    finally:
        _logged.reset(token)
    if not of_batch:
        logged = {n: v.value if isinstance(v, Reduced) else v for n, v in logged.items()}
    return returned, logged


@contextmanager
def gathering_nothing(module: Any, step: str) -> Iterator[None]:
    """Refuse a step of a training that gathers what `on_train_epoch_end` reads, as a list."""
    hook, before = inspect.unwrap(type(module).on_train_epoch_end), model_prints(module)
    sets = {at.argval for at in dis.get_instructions(hook) if at.opname == "STORE_ATTR"}
    yield
    changed = {*differing(before, model_prints(module))}
    # A number may be one of the step's, such as a weight of the loss; a sum is set to 0 at the end.
    held = [
        f"the model's {name}"
        for name, value in vars(module).items()
        if name in (hook.__code__.co_names if not isinstance(value, int | float | str) else sets)
    ]
    if held := [name for name in held if name in changed]:
        raise UserError(
            f"{step} changes {listed(held)}. In on_train_epoch_end that would hold the samples of "
            "one rank only, and after a resume only those since then.",
            remedy="Leave it out: each epoch's record has the mean loss over all samples.",
        )


@cache
def _num_taken(kind: type, name: str) -> int:
    """Return how many arguments a step takes by position, besides the module."""
    takes = inspect.getfullargspec(inspect.unwrap(getattr(kind, name)))
    return sys.maxsize if takes.varargs else len(takes.args) - 1


def log(name: str, value: Any, *_: Any, reduce_fx: Any = "mean", **__: Any) -> None:
    """Stand in for `LightningModule.log`."""
    if (logged := _logged.get()) is None:
        return
    value = value.detach() if isinstance(value, Tensor) else value
    if reduce_fx not in _OF_MEANS and not isinstance(value, nn.Module):
        by = getattr(reduce_fx, "__name__", reduce_fx)
        if by not in REDUCTIONS:
            raise UserError(
                f"{name!r} is logged with reduce_fx={by}; samestep knows mean, max, min and sum.",
                remedy="Log a mean over the samples of the batch, or leave it out.",
            )
        value = Reduced(value, by)
    logged[name] = value


def mean_of(value: Any, samples: int) -> float:
    """Return a mean over samples in float64: of counts, as of right answers, without rounding."""
    if isinstance(value, Tensor) and value.dtype == torch.float64:
        return float(value)
    total = float(value) * samples
    rounded = round(total)  # 0 for a small value that counts nothing
    return rounded / samples if abs(total - rounded) < abs(rounded) * 2**-22 else float(value)


def plain_name(name: str, nth: int | None = None) -> str:
    """Return a logged name without the stage: val_accuracy, val/accuracy → accuracy.

    Also without the number of its loader, of several: val_accuracy_1, val_1_accuracy → accuracy.
    A name that records have already keeps its stage: val_epoch.
    """
    name = name if nth is None else name.removesuffix(f"_{nth}").removesuffix(f"/{nth}")
    given = name
    low = name.replace("/", "_", 1).lower()
    stage = next((stage for stage in _STAGES if low.startswith(stage)), "")
    name = name[len(stage) :]
    name = name if nth is None else name.removeprefix(f"{nth}_").removeprefix(f"{nth}/")
    return name if name == "loss" else free_name(name, given)


def free_name(name: str, given: str = "") -> str:
    """Return a name, or if records have it already, as it was given, or with “own_” before it."""
    return next(n for n in (name, given or name, f"own_{name}") if n not in TAKEN_NAMES)


def metrics_of(module: nn.Module) -> list[Any]:
    """Return the metrics of torchmetrics in a module."""
    known = sys.modules.get("torchmetrics")
    return [m for m in modules_of(module) if isinstance(m, known.Metric)] if known else []


_KEPT = "_samestep_count"


def prepare_metrics(module: nn.Module) -> None:
    """Let metrics of a module leave it to samestep to add up, and to keep the best values so far.

    Checkpoints hold these.
    """
    for metric in metrics_of(module):
        metric.sync_on_compute = metric._to_sync = False  # noqa: SLF001
        if not torch.backends.mps.is_available():  # which has no float64
            metric.set_dtype(torch.float64)
        if type(metric).__name__ in ("MaxMetric", "MinMetric"):
            metric.persistent(True)
            vars(metric)[_KEPT] = 0  # how often it was updated, by hooks after evaluations


def is_kept(metric: Any) -> bool:
    """Whether a metric has not been updated by a step, and lasts beyond an evaluation."""
    return bool(vars(metric).get(_KEPT, -1) == metric._update_count)  # noqa: SLF001


def reset_metrics(module: nn.Module) -> None:
    """Reset the metrics of a module that steps update."""
    for metric in metrics_of(module):
        if not is_kept(metric):
            metric.reset()
            if _KEPT in vars(metric):
                vars(metric)[_KEPT] = 0


def recall_best(module: nn.Module) -> None:
    """Let metrics that a checkpoint has restored count as updated, before a hook asks them."""
    for metric in metrics_of(module):
        restored = not metric._update_count and _KEPT in vars(metric)  # noqa: SLF001
        if restored and all(getattr(metric, n).isfinite() for n in metric._defaults):  # noqa: SLF001
            metric._update_count = vars(metric)[_KEPT] = 1  # noqa: SLF001


def keep_best(module: nn.Module) -> None:
    """Keep what a hook after an evaluation has updated, if it is to last."""
    for metric in metrics_of(module):
        if _KEPT in vars(metric):
            vars(metric)[_KEPT] = metric._update_count  # noqa: SLF001


def all_gather(*_: Any, **__: Any) -> NoReturn:
    """Stand in for `LightningModule.all_gather`."""
    raise UserError(
        "samestep has no all_gather of a LightningModule: what its steps log is already the mean "
        "over all samples of all ranks.",
        remedy='For a loss over the whole batch, write a Recipe with loss_over="batch".',
    )
