"""Find the phases of any training script's steps from its calls into PyTorch.

The script is not changed. While it runs, a few functions of PyTorch that its loop calls (the
loader's `__iter__` and `__next__`, the call of a model, `backward`, `Optimizer.zero_grad` and
`step`, `torch.save`, `train` and `eval` of a model) also note the time.
"""

import itertools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile, record_function
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from samestep.base.phases import Phases, make_phases, tell_end_of_autograd
from samestep.base.trees import leaves_of, own_part
from samestep.scripts import probes
from samestep.scripts.measuring.trace_digest import COLLATE
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

# To prepare one already spoils a trace that runs, in PyTorch 2.11.
_PROFILER = Probe((profile, "_prepare_trace"), (profile, "_start_trace"))
_SURE = 3  # after this many updates without an optimizer, a script counts as making its own
_NEXT_TRAINING = 8  # steps of another optimizer without one of the first
_FEW, _VALUES = 8, 64


class Hooks:
    """One rank's script, as seen by its calls into PyTorch."""

    def __init__(self, phases: Phases, *, several: bool) -> None:
        self.phases = phases
        self.on_step: Callable[[int], None] = lambda _step: None
        self.on_gradients: Callable[[Optimizer], None] = lambda _optimizer: None
        """Called before an optimizer changes the weights; of a closure, after its first call."""
        self.on_epoch: Callable[[int], None] = lambda _epoch: None
        self.on_profiler: Callable[[], None] = lambda: None
        """Called when the script prepares a profiler, and when it starts one."""
        self.on_own_updates: Callable[[], object] = lambda: None
        """Called when the script turns out to change its weights itself."""
        self.trained: list[Tensor] = []  # the weights of the optimizer; without one, of the loss
        self._own_updates: int | None = 0
        """How often weights changed between two backward passes; None once an optimizer steps."""
        self._some_weights: list[Tensor] = []
        """A few values of a few weights at the last backward pass."""
        self.steps = 0
        self._optimizer: weakref.ref[Optimizer] | None = None
        """The first that took a step: its steps count, until another training begins."""
        self._others = 0  # steps in a row of other optimizers
        self.loader: DataLoader[Any] | None = None  # the loader that the training reads from
        self.batches = 0  # batches that the training has read
        self._several = several
        self.epochs = 0  # how often the training began to read from its loader
        self._epoch_step = 0
        self._latest: DataLoader[Any] | None = None
        self._evaluating = False
        self._eval_mode = False
        self._between = False  # whether an optimizer has stepped and the next step has not begun
        self._has_gradients = False  # whether a backward has run since the last optimizer step
        self.closure = 0  # which call of the closure that a step was given is under way, from 1

    @property
    def evaluating(self) -> bool:
        """Whether the script evaluates, as far as its calls show."""
        return self._evaluating or self._eval_mode or not torch.is_grad_enabled()

    @property
    def counted(self) -> Optimizer | None:
        """The optimizer whose steps count; None before its first."""
        return self._optimizer() if self._optimizer is not None else None

    def installed(self) -> AbstractContextManager[None]:
        """Note the time in PyTorch's functions while inside."""
        return listening(
            (probes.BEFORE_STEP, self._before_step),
            (probes.AFTER_STEP, self._after_step),
            (probes.LOADER_ITER, self._on_iter),
            (probes.NEXT_BATCH, self._on_batch),
            (probes.BACKWARD, self._on_backward),
            (probes.SAVE, lambda _: self._timed("checkpoint")),
            (probes.TRAIN_OR_EVAL, self._on_train_or_eval),
            (probes.MODULE_CALL, self._on_module_call),
            (probes.ZERO_GRAD, self._on_zero_grad),
            (_PROFILER, lambda _: self.on_profiler()),
        )

    def _on_module_call(self, _call: ProbedCall) -> None:
        """End the time between two steps."""
        if self._between and torch.is_grad_enabled() and not self._eval_mode:
            self._lap_or_evaluation()
            self._between = self._evaluating = False

    def _lap_or_evaluation(self, phase: str = "other") -> None:
        self.phases.lap("evaluation" if self._evaluating else phase)

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Let the time around the closure, if there is one, count as the optimizer's own.

        What lies before the step is clipping if there are gradients, else the script's own Python.
        """
        self._own_updates = None
        if self._has_gradients:
            self.phases.lap("optimizer")
        else:
            self._lap_or_evaluation()
        if (given := step_closure(args, kwargs)) is None:
            self.on_gradients(optimizer)
            return None
        calls = itertools.count(1)

        def closure() -> Any:
            self.phases.lap("optimizer")
            self._between, self.closure = True, next(calls)
            first = self.closure == 1
            try:
                value = given()
            finally:
                self.closure = 0
            self._lap_or_evaluation()
            if first:
                self.on_gradients(optimizer)
            return value

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.phases.lap("optimizer")
        self._between, self._has_gradients = True, False
        if self._optimizer is None:
            self._begin(tensors_of(optimizer))
        counted = self.counted
        self._others = 0 if counted is optimizer else self._others + 1
        if counted is None or self._others == _NEXT_TRAINING:
            self._optimizer = weakref.ref(optimizer)
            self._others = 0
        if self._others == 0:
            self.steps += 1
            self.on_step(self.steps)

    def _begin(self, trained: list[Tensor]) -> None:
        self.trained = trained
        if trained[0].device.type == "cuda":
            self.phases = make_phases(trained[0].device)
            self.phases.begin()

    def _count_own_update(self, updates: int, loss: Tensor) -> None:
        """Count a step if the script has changed the weights of its loss without an optimizer."""
        # FSDP frees weights between the passes: they have no storage to look at.
        with_storage = (leaf for leaf in leaves_of(loss) if leaf.untyped_storage().size())
        few = itertools.islice(with_storage, _FEW)
        now = [own_part(leaf.detach()).reshape(-1)[:_VALUES].clone() for leaf in few]
        pairs = zip(self._some_weights, now, strict=False)
        changed = any(a.shape != b.shape or not torch.equal(a, b) for a, b in pairs)
        self._some_weights, self._own_updates = now, updates + changed
        if not changed or self._own_updates < _SURE:
            return
        if not self.trained:
            self._begin(list(leaves_of(loss)))
            self.on_own_updates()
        self.steps += 1
        self.on_step(self.steps)

    def _on_iter(self, call: ProbedCall) -> Around:
        (loader,) = call.args
        self._begin_reading()
        trains = self.loader is not None and torch.is_grad_enabled()
        # From the same loader, or from one that a new epoch has made anew.
        if trains and (
            loader is self.loader or (not self._evaluating and _same_data(loader, self.loader))
        ):
            self.loader = loader
            if self.steps > self._epoch_step:  # else it reads from two at once
                self._begin_epoch()
        starts = loader.num_workers > 0 and loader._iterator is None  # noqa: SLF001 - as it asks
        iterator = yield
        self._lap_or_evaluation("workers" if starts else "data")
        iterator._samestep = (loader, starts)  # noqa: SLF001 - our own mark
        fetcher = getattr(iterator, "_dataset_fetcher", None)  # where this process reads itself
        if fetcher is not None:
            fetcher.collate_fn = record_function(COLLATE)(fetcher.collate_fn)

    def _begin_epoch(self) -> None:
        self.epochs += 1
        self._epoch_step = self.steps
        self.on_epoch(self.epochs)

    def _on_batch(self, call: ProbedCall) -> Around:
        (iterator,) = call.args
        self._begin_reading()
        loader, starts = getattr(iterator, "_samestep", (None, False))
        iterator._samestep = (loader, False)  # noqa: SLF001 - our own mark
        try:
            yield
        finally:
            # The first batch of new workers includes their start.
            self._lap_or_evaluation("workers" if starts else "data")
        if not self._evaluating:
            self._between = False
            self._latest = loader
            self.batches += loader is self.loader

    def _begin_reading(self) -> None:
        self._lap_or_evaluation()
        self._evaluating = self._eval_mode or not torch.is_grad_enabled()

    def _on_backward(self, call: ProbedCall) -> Around:
        self.phases.lap("forward")
        self._evaluating = self._eval_mode = False  # also where a frozen part stays in eval()
        self._between, self._has_gradients = False, True
        if self.loader is None and self._latest is not None:
            self.loader = self._latest
            self.batches = 1
            self._begin_epoch()
        loss = loss_of(call)
        ends = "backward"
        if self._several and loss.requires_grad:
            tell_end_of_autograd(loss, lambda: self.phases.lap("backward"))
            ends = "all_reduce"
        if self._own_updates is not None:
            self._count_own_update(self._own_updates, loss)
        try:
            yield
        finally:
            self.phases.lap(ends)
            # Without an optimizer the update follows, and ends with the next call.
            self._between = self._own_updates is not None and bool(self.trained)

    def _on_zero_grad(self, _call: ProbedCall) -> Around:
        if self._between:
            yield from self._timed("optimizer")

    def _timed(self, phase: str) -> Around:
        self._lap_or_evaluation()
        try:
            yield
        finally:
            self.phases.lap(phase)

    def _on_train_or_eval(self, call: ProbedCall) -> None:
        mode = call.argument(1, "mode", default=True)
        if mode == self._eval_mode:
            self._lap_or_evaluation()
            self._evaluating = self._eval_mode = not mode


def loss_of(backward: ProbedCall) -> Tensor:
    """Return the tensor that a backward pass begins with, the first of several."""
    tensors: Any = backward.argument(0, "tensors")
    return tensors if isinstance(tensors, Tensor) else next(iter(tensors))


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Return an optimizer's parameters."""
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def step_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Return the closure that a hook's optimizer calls within its step, if any."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def _same_data(loader: Any, other: Any) -> bool:
    """Whether two loaders seem to read the same data."""

    def shape(loader: Any) -> tuple[Any, ...]:
        data = loader.dataset
        return type(data), loader.batch_size, len(data) if hasattr(data, "__len__") else None

    # A data set that is the same need not be asked for its length, which it may refuse to tell.
    return loader.dataset is other.dataset or shape(loader) == shape(other)
