"""What one rank keeps of one short training, the engine that keeps it, and how far two differ."""

import hashlib
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from samestep.base.run.records import Record
from samestep.base.settings import Precision
from samestep.base.trees import real_parts, tree_leaves
from samestep.core.data.source import Batch, Source
from samestep.core.session.training_run import Engine, Task, engine_named
from samestep.core.training.loop import evaluate_now, evaluate_work, rehearse
from samestep.core.training.meter import Meter, epoch_record
from samestep.core.training.work import Learner, close_epoch, epoch_is_full
from samestep.launch.ranks.mesh import whole
from samestep.prove.verification.short_trainings import ShortTraining

Values = NDArray[np.float64]
"""A tensor's norm, followed by all or some of its values: see `values_of`."""
_MOST_VALUES = 1024


@dataclass(kw_only=True)
class Trace:
    """The steps of one rank in one short training. Steps count from 1."""

    training: str = ""
    losses: dict[int, float] = field(default_factory=dict)
    """Mean over the global batch; on rank 0 only."""
    norms: dict[int, float] = field(default_factory=dict)  # of the gradient, before clipping
    gradients: dict[int, dict[str, Values]] = field(default_factory=dict)
    weights: dict[int, dict[str, Values]] = field(default_factory=dict)
    """After each step; with Lightning only after the last."""
    bits: dict[int, dict[str, str]] = field(default_factory=dict)
    """With virtual ranks: step → gradient, parameter or buffer → a hash of all its bits."""
    samples: dict[int, list[str]] = field(default_factory=dict)
    """A hash of each sample of this rank, in order."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step → loss and metrics over all samples; 0 is before training."""
    epochs: dict[int, dict[str, float]] = field(default_factory=dict)
    """With virtual ranks: last step of an epoch → loss and metrics over the training samples."""
    evaluated: list[str] = field(default_factory=list)
    """A hash of each sample that this rank evaluated before training."""
    begun: int = 0  # the step that was begun last; 0 before the first

    def keep(self, record: Record) -> None:
        """Keep the numbers of one of the run's records."""
        if record["event"] == "step":
            self.losses[record["step"]] = record["loss"]
            if record.get("grad_norm") is not None:
                self.norms[record["step"]] = record["grad_norm"]
        elif record["event"] == "epoch":
            self.epochs[record["step"]] = {"loss": record["loss"], **record.get("metrics", {})}
        elif record["event"] == "evaluation":
            self.evaluations[record["step"]] = _numbers(record)


def _numbers(record: Record) -> dict[str, float]:
    words = ("event", "split", "epoch", "step", "samples", "seconds")
    return {k: v for k, v in record.items() if k not in words and isinstance(v, float)}


def sample_hashes(*trees: Any) -> list[str]:
    """Hash each sample of inputs and targets, tensors (batch, …) or trees of them."""
    every = [leaf for tree in trees for leaf in tree_leaves(tree)]
    leaves = [x.detach().cpu().contiguous() for x in every if isinstance(x, Tensor) and x.dim()]
    return [hash_of(*(leaf[row] for leaf in leaves)) for row in range(len(leaves[0]))]


def hash_of(*trees: Any) -> str:
    """Hash any trees of tensors and other values as one."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in (leaf for tree in trees for leaf in tree_leaves(tree)):
        if isinstance(leaf, Tensor):
            values = dense(leaf.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(repr(tuple(leaf.shape)).encode() + values.numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def dense(tensor: Tensor) -> Tensor:
    """Return a sparse tensor as a dense one, and any other as it is."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def values_of(tensor: Tensor) -> Values:
    """Return a tensor's norm, followed by its values, or evenly spaced ones of a large tensor."""
    flat = real_parts(dense(tensor.detach())).reshape(-1)
    dtype = None if flat.device.type == "mps" else torch.float64  # Apple GPUs have no float64
    norm = torch.linalg.vector_norm(flat, dtype=dtype)
    if len(flat) > _MOST_VALUES:
        flat = flat[torch.linspace(0, len(flat) - 1, _MOST_VALUES).long().to(flat.device)]
    values: Values = torch.cat([norm.reshape(1).cpu().double(), flat.cpu().double()]).numpy()
    return values


def values_by_name(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Values]:
    """Return the values of those tensors that have any, and can have rounding.

    All ranks call it: those of a sharded tensor are put together.
    """
    whole_tensors = ((name, whole(t)) for name, t in named if t is not None)
    return {name: values_of(t) for name, t in whole_tensors if _rounds(t)}


def _rounds(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _weights_of(model: nn.Module) -> dict[str, Values]:
    return values_by_name([*model.named_parameters(), *model.named_buffers()])


def recording(
    training: ShortTraining, stop: int, trace: Trace, prepare: Callable[[Learner], None]
) -> Engine:
    """Return an engine that fills a trace; Lightning's own steps are not looked into.

    A short training ends with step `stop`, the only one to save a checkpoint. `prepare` gets what
    is trained before anything is computed.
    """
    inner = engine_named("lightning" if training.lightning else "native")

    def drive(task: Task) -> None:
        work, state = task.work, task.state
        prepare(work.learner)
        if training.loses_rank and not state.position.step and work.world.is_main:
            work.learner.model.register_forward_pre_hook(_death_in(stop, work.learner))
        if training.lightning:
            inner.drive(replace(task, write=lambda *_: None))
        else:
            if training.evaluates:
                source = work.validation if work.validation is not None else work.train
                collates = task.request.recipe.collate is not None
                observed = _ObservedSource(source, trace, collates=collates)
                trace.evaluations[0] = _numbers(evaluate_work(work, observed))
            _record_steps(task, trace, training, stop)
        trace.weights[state.position.step] = _weights_of(work.learner.model)

    return Engine(wrap=inner.wrap, drive=drive, holds_norms=True)


def _death_in(step: int, learner: Learner) -> Callable[..., None]:
    """Return a hook of the forward that kills this rank in a step, counted from 1."""

    def hook(*_: Any) -> None:
        if learner.moment.step + 1 == step and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def _record_steps(task: Task, trace: Trace, training: ShortTraining, stop: int) -> None:
    work, state = task.work, task.state
    meter, model, virtual = Meter(work, state), work.learner.model, work.settings.virtual_ranks
    every = work.settings.eval_every_steps
    trace.begun = state.position.step + 1
    for taken in rehearse(work, state):
        step, block = state.position.step, taken.block
        if block is not None and block.weight:
            # A collated batch names its samples by their index in the data.
            trees = (block.inputs,) if block.parts else (block.inputs, block.targets)
            trace.samples[step] = sample_hashes(*trees)
        # A frozen parameter may keep a gradient of its pretraining.
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        gradients = [(name, p.grad) for name, p in trained]
        trace.gradients[step], trace.weights[step] = values_by_name(gradients), _weights_of(model)
        if virtual:
            named = [(f"gradient {name}", gradient) for name, gradient in gradients]
            named += [(f"weight {name}", p) for name, p in model.named_parameters()]
            named += [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
            trace.bits[step] = {name: hash_of(t) for name, t in named if t is not None}
        for record in meter.count(taken):
            task.session.emit(record)
        ends_epoch = epoch_is_full(work, state)
        if virtual and ends_epoch:
            meter.settle()
            task.session.emit(epoch_record(work, state))
        # As in a run: as the settings say, after an epoch, at the end.
        due = ends_epoch or step == work.plan.total_steps or (every and step % every == 0)
        if work.validation is not None and due:
            task.session.emit(evaluate_now(work, state)[0])
        if step == stop and training.saves:
            meter.settle()
            if epoch_is_full(work, state):
                close_epoch(work, state)
            task.control.save(None)
        if step == stop and training.short:
            break
        trace.begun = step + 1
    state.stop_reason = "enough is known"


class _ObservedSource:
    """A source that notes in a trace which samples are evaluated."""

    def __init__(self, source: Source, trace: Trace, *, collates: bool) -> None:
        self._source, self._trace, self._collates = source, trace, collates

    def evaluation(self, batch_size: int) -> Iterator[Batch]:
        for batch in self._source.evaluation(batch_size):
            if self._collates:
                self._trace.evaluated += map(str, range(batch.first, batch.first + batch.samples))
            else:
                self._trace.evaluated += sample_hashes(batch.inputs, batch.targets)
            yield batch

    def peek(self, samples: int) -> Batch:
        return self._source.peek(samples)


# Relative differences that rounding may cause in a few steps. Measured on the built-in recipes:
# 3e-16 to 1e-14 in float64, 2e-7 to 5e-4 of the loss in fp32. Gradients differ more in fp32: in a
# flat image many units lie within rounding of ReLU's kink, and change sides together.
ROUNDING: Mapping[Precision, float] = {"fp64": 1e-10, "fp32": 1e-2, "bf16": 1e-1, "fp16": 1e-1}

LEAST: Mapping[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
"""The smallest tolerance of a loss, even if a rounding of the weights moves it less."""

_NOISE = 1e-13
"""At most rounding in a float64 gradient, relative to the largest entry of all gradients."""

_LAST_BIT = 2.0**-52
"""Reported for a difference in bits of which the values were not kept."""


@dataclass(frozen=True)
class TrainingDifference:
    """How two trainings differ."""

    largest: float = 0.0
    """Relative, over everything compared; infinite where only one of them has a value."""
    first_step: int | None = None  # the first step with a difference beyond the tolerance
    first_parameter: str | None = None
    """The first parameter, in the model's order, beyond the tolerance in that step."""
    what: str = ""
    """What differs in that step: the loss, the gradient norm, a gradient, a weight."""
    allowed: float | None = None
    """The tolerance of what differs before the first update, if anything does beyond it."""


def worst(differences: Iterable[TrainingDifference]) -> TrainingDifference:
    """Return the largest of some differences; one that is there before any update counts most."""
    key = lambda d: (d.allowed is not None, d.largest)  # noqa: E731
    return max(differences, key=key, default=TrainingDifference())


def difference(
    reference: Trace,
    trace: Trace,
    tolerance: float,
    *,
    losses_only: bool = False,
    before_updates: float | None = None,
) -> TrainingDifference:
    """Compare two trainings step by step, over the steps that the second one took.

    Losses and norms are relative to the larger of both; each gradient or weight to the largest
    entry of all, as one that is zero but for rounding has no scale of its own. Weights with such a
    gradient are not compared: Adam makes steps of its noise. The first parameter beyond the
    tolerance is named also where only losses decide. `before_updates` is a tolerance of its own for
    what no update has touched: the loss and the gradients of step 1.
    """
    largest, idle = 0.0, _moved_by_rounding(reference)
    first = TrainingDifference()
    strict = tolerance if before_updates is None else before_updates

    def limit(step: int, what: str) -> float:
        return strict if step == 1 and what != "weight" else tolerance

    for step in sorted(trace.losses):
        differences = _in_step(reference, trace, step, idle)
        decisive = differences[:1] if losses_only else differences
        largest = max(largest, *(size for _, _, size in decisive))
        if first.first_step is None and any(size > limit(step, what) for what, _, size in decisive):
            beyond = [(what, name) for what, name, size in differences if size > limit(step, what)]
            what = beyond[0][0]
            first = TrainingDifference(
                first_step=step,
                first_parameter=next((name for _, name in beyond if name), None),
                what=what,
                allowed=strict if limit(step, what) < tolerance else None,
            )
    return replace(first, largest=largest)


def _moved_by_rounding(trace: Trace) -> dict[str, NDArray[np.bool_]]:
    """Mark the weights whose gradient is never more than rounding, though not always 0.

    A softmax over keys cancels the bias of all keys; Cox's loss cancels the last bias.
    """
    largest: dict[str, Values] = {}
    for gradients in trace.gradients.values():
        unit = max((float(np.abs(v[1:]).max()) for v in gradients.values()), default=0.0) or 1.0
        for name, values in gradients.items():
            with np.errstate(invalid="ignore"):
                relative_to_all = np.abs(values) / unit
            largest[name] = np.maximum(relative_to_all, largest.get(name, relative_to_all))
    marks = {name: (values > 0) & (values < _NOISE) for name, values in largest.items()}
    for of_tensor in marks.values():
        of_tensor[0] = of_tensor[1:].any()  # then its norm is nothing to compare, either
    return marks


def _in_step(
    reference: Trace, trace: Trace, step: int, idle: Mapping[str, NDArray[np.bool_]]
) -> list[tuple[str, str, float]]:
    """Return each difference with its kind, parameter and size: the loss first."""
    loss = relative(reference.losses.get(step, math.nan), trace.losses[step])
    differences = [("loss", "", loss)]
    if step in reference.norms and step in trace.norms:
        norm = relative(reference.norms[step], trace.norms[step])
        differences.append(("gradient norm", "", norm))
    gradients = reference.gradients.get(step), trace.gradients.get(step)
    differences += _tensors("gradient", *gradients, {})
    weights = reference.weights.get(step), trace.weights.get(step)
    differences += _tensors("weight", *weights, idle)
    if step in trace.bits:
        for name, bits in reference.bits.get(step, {}).items():
            if bits != trace.bits[step].get(name):
                what, _, parameter = name.partition(" ")
                differences.append((what, parameter, _LAST_BIT))
    epoch = trace.epochs.get(step, {})
    for name, value in reference.epochs.get(step, {}).items():
        of_epoch = relative(value, epoch.get(name, math.nan))
        differences.append((f"{name} of the epoch", "", of_epoch))
    return differences


def _tensors(
    what: str,
    first: Mapping[str, Values] | None,
    second: Mapping[str, Values] | None,
    left_out: Mapping[str, NDArray[np.bool_]],
) -> list[tuple[str, str, float]]:
    if first is None or second is None:
        return []  # Lightning's steps are not looked into
    largest = max((float(np.abs(v[1:]).max()) for v in first.values()), default=0.0)
    norm = math.hypot(*(float(v[0]) for v in first.values()))
    return [
        (what, name, _apart(first.get(name), second.get(name), norm, largest, left_out.get(name)))
        for name in {**first, **second}
    ]


def _apart(
    first: Values | None,
    second: Values | None,
    norm: float,
    largest: float,
    left_out: NDArray[np.bool_] | None,
) -> float:
    """Compare two tensors' norms and values, relative to those of all tensors."""
    if first is None or second is None or first.shape != second.shape:
        return math.inf
    differs = (first != second) & ~(np.isnan(first) & np.isnan(second))
    if left_out is not None:
        differs &= ~left_out
    if not differs.any():
        return 0.0
    scale = np.full_like(first, largest or 1.0)
    scale[0] = norm or 1.0
    with np.errstate(invalid="ignore", over="ignore"):
        apart = float((np.abs(first - second) / scale)[differs].max())
    return apart if math.isfinite(apart) else math.inf


def relative(a: float, b: float) -> float:
    """Return the difference of two numbers relative to the larger; infinite if one of them is."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    # Below 1e-12 both are zero but for rounding, and have no scale of their own.
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


def largest_apart(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the first's largest entry."""
    if not _rounds(first):
        return 0.0
    first, second = real_parts(dense(first)).double(), real_parts(dense(second)).double()
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-12))


def evaluations_apart(
    reference: Mapping[str, float], evaluation: Mapping[str, float]
) -> tuple[float, str]:
    """Return the largest relative difference of two evaluations, and the name of that value."""
    differences = (
        (relative(value, evaluation.get(name, math.nan)), name) for name, value in reference.items()
    )
    return max(differences, default=(0.0, ""))


def evaluation_differences(reference: Trace, trace: Trace) -> dict[int, TrainingDifference]:
    """Compare the evaluations that two trainings share: step → the largest of their differences."""
    differences = {}
    for step in sorted(reference.evaluations.keys() & trace.evaluations.keys()):
        largest, name = evaluations_apart(reference.evaluations[step], trace.evaluations[step])
        differences[step] = TrainingDifference(largest, first_step=step or None, what=name)
    return differences
