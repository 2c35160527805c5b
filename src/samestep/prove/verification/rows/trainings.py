"""The rows that compare short trainings: several ranks, rounding, micro-steps, resuming, draws."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.base.errors import listed
from samestep.base.trees import tree_leaves
from samestep.base.words import count
from samestep.core.learner.optimizer_state import parameters_in
from samestep.core.learner.side_effects import batch_norms
from samestep.prove.verification import causes
from samestep.prove.verification.evidence import (
    OPTIMIZER_TIMES,
    Check,
    Evidence,
    TableRow,
    failed_start,
    left_free_check,
    measured,
    training_check,
)
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.rows.model import influence_of
from samestep.prove.verification.rows.state import state_of
from samestep.prove.verification.short_trainings import (
    MAIN,
    NUDGED,
    NUDGED_GRADIENT,
    NUDGED_IN_OWN,
    OPTIMIZER_ROW,
    OWN_PRECISION,
    ShortTraining,
    Start,
    left_free,
)
from samestep.prove.verification.trace import Trace, difference, evaluation_differences, worst

_LONGEST = 160
_OF_RANKS = 8
"""Roundings by which the gradients of ranks differ from those of one process."""


def _one_process(evidence: Evidence) -> Check:
    size = evidence.facts.size
    if not evidence.trace(0, MAIN) or evidence.died(0):
        compared = f"{size.steps} steps of {count(size.global_batch, 'sample')}"
        return failed_start(evidence, compared, 0)
    losses = evidence.reference.losses
    return Check("same", f"{size.steps} steps: loss {losses[1]:.4g} to {losses[size.steps]:.4g}")


ONE_PROCESS = TableRow(name="one process", answer=_one_process)


def _ranks_of(evidence: Evidence, start: Start) -> Check:
    """Compare one number of ranks with one process, and its ranks' weights with each other."""
    size, virtual = evidence.facts.size, evidence.facts.virtual_ranks
    smallest, larger = divmod(virtual or size.global_batch, start.world_size)
    shares = [smallest + (rank < larger) for rank in range(start.world_size)]
    parts = " + ".join(map(str, shares)) if larger else f"{start.world_size} × {smallest}"
    # The weights of ranks are compared with each other even where only losses decide.
    quantities = "losses, ranks' weights" if evidence.losses_only() else "loss, gradients, weights"
    compared = f"{parts} virtual ranks" if virtual else f"{quantities}: {parts}"
    trace = evidence.trace(start.place, MAIN)
    if trace is None or evidence.died(start.place):
        return failed_start(evidence, compared, start.place)
    last = size.steps
    first, *others = (
        Trace(losses={last: 0.0}, weights={last: trace.weights[last]}, bits=trace.bits)
        for trace in evidence.traces[start.place, MAIN]
    )
    between = (difference(first, other, evidence.exact) for other in others)
    largest = worst([evidence.compare(trace), *between])
    return measured(compared, largest, evidence.tolerance_of(MAIN))


SEVERAL_RANKS = TableRow(
    name="ranks",
    answer=lambda evidence: [
        replace(_ranks_of(evidence, start), name=f"{start.world_size} ranks")
        for start in evidence.several
    ],
    training=ShortTraining(name=MAIN, saves=True, evaluates=True),
)


ROUNDING = TableRow(
    name="rounding",
    # How far one rounding of the weights moves the losses: the tolerance of all rows.
    answer=lambda evidence: [
        Check("same", "losses, weights off by one rounding: the measure", moved, evidence.exact)
        for moved in (evidence.nudged(),)
        if moved is not None
    ],
    training=ShortTraining(name=NUDGED, nudged=True),
)


class Arithmetic(NamedTuple):
    """What an optimizer's step computes in."""

    wide: bool
    """Whether it computes in float64 also where its code asks for a narrower type."""
    kind: str  # the narrowest type that it computes in
    unit: float  # one rounding in that type, relative
    of_weights: float = 2.0**-53  # … and in the type of the weights

    def hold(self, tested: RecipeUnderTest, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer compute in float64 throughout, if it can and that is compared."""
        if self.wide:
            step = tested.exactly(optimizer.step)

            @functools.wraps(step)
            def exact(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
                return step(*args, **kwargs)

            # A method of it, as PyTorch's schedulers need.
            vars(optimizer).update({"step": MethodType(exact, optimizer)})

    def nudging(self) -> Callable[..., None]:
        """Return a hook by which each step takes gradients that are off by a rounding."""
        generator = torch.Generator().manual_seed(0)
        size = _off(self)

        def move(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for gradient in (p.grad for p in parameters_in(optimizer)):
                if gradient is not None and gradient.layout == torch.strided:
                    signs = torch.randint(0, 2, gradient.shape, generator=generator) * 2 - 1
                    gradient.mul_(1 + size * signs.to(gradient))

        return move


class TypesInSteps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note the types of the numbers that operations take and return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.types: set[torch.dtype] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves([args, kwargs, result]):
            if isinstance(leaf, Tensor) and leaf.numel() > 1:  # a single one counts steps
                self.types.add(leaf.dtype)
        return result

    def arithmetic(self, weights: torch.dtype, *, wide: bool) -> Arithmetic | None:
        """Return the arithmetic used, given the type of the weights; None if none was."""
        kind = max(self.types, key=_unit, default=None)
        name = str(kind).removeprefix("torch.")
        return None if kind is None else Arithmetic(wide, name, _unit(kind), _unit(weights))


def _off(arithmetic: Arithmetic) -> float:
    """Return by how much gradients may be off: by what ranks round, and what the optimizer does."""
    return max(arithmetic.unit, _OF_RANKS * arithmetic.of_weights)


def _unit(kind: torch.dtype) -> float:
    """Return one rounding of a type, relative; 0 of a type that holds no rounded numbers."""
    if kind.is_floating_point:
        return torch.finfo(kind).eps / 2
    return 2.0**-8 if kind in (torch.int8, torch.uint8) else 0.0  # as quantised state is


def _watch_steps(tested: RecipeUnderTest) -> Arithmetic | None:
    """Take a few steps with a recipe's own optimizer, in float64 throughout if it can."""
    if tested.recipe.optimizer is None:
        return None
    for wide in (True, False):
        types = TypesInSteps()
        with contextlib.suppress(Exception):  # the short trainings say how it fails
            for optimizer in tested.steps_of_optimizer():
                step: Callable[..., Any] = optimizer.step
                step = tested.exactly(step) if wide else step
                with types:
                    step()
            return types.arithmetic(tested.dtype, wide=wide)
    return None


def _optimizer(evidence: Evidence) -> Iterator[Check]:
    in_own = (OWN_PRECISION, NUDGED_IN_OWN, NUDGED_IN_OWN)
    for training, result, nudged in ((MAIN, OPTIMIZER_ROW, NUDGED_GRADIENT), in_own):
        arithmetic = evidence.result(result, Arithmetic) if evidence.trace(0, nudged) else None
        allowed = evidence.by_optimizer(training)
        if arithmetic is None or allowed <= evidence.before_updates(training):
            continue
        compared = "losses" if evidence.losses_only(training) else "weights"
        moved, unit = allowed / OPTIMIZER_TIMES, _off(arithmetic)
        cause = causes.OPTIMIZER_ROUNDS.of(
            kind=arithmetic.kind, unit=unit, what=compared, moved=moved, allowed=allowed
        )
        if arithmetic.unit <= arithmetic.of_weights:
            cause = replace(cause, advice="")
        yield Check("note", "gradients off by one rounding: the measure", moved, allowed, cause)


OPTIMIZER = TableRow(
    name=OPTIMIZER_ROW,
    experiment=_watch_steps,
    training=ShortTraining(name=NUDGED_GRADIENT, nudges_gradient=True),
    answer=lambda evidence: [*_optimizer(evidence)],
    with_virtual_ranks=False,
)


def _precision(evidence: Evidence) -> list[Check]:
    alone = evidence.trace(0, OWN_PRECISION)
    compared = evidence.compare_starts(OWN_PRECISION, reference=alone)
    differences = {s: d for s, d in compared.items() if alone and s.world_size > 1}
    trained = alone is not None and not evidence.failures(training=OWN_PRECISION)
    if evidence.chosen == evidence.facts.exact or (trained and not differences):
        return []
    check = training_check(evidence, OWN_PRECISION, "losses", differences)
    return [replace(check, name=evidence.chosen)]


PRECISION = TableRow(
    name=OWN_PRECISION,
    answer=_precision,
    thorough=True,
    training=ShortTraining(name=OWN_PRECISION, own_precision=True),
)
_HALVES = ShortTraining(name="accumulated", halves=True, short=True)


def _accumulation(evidence: Evidence) -> Check:
    name = _HALVES.name
    alone = evidence.trace(0, name)
    if evidence.bits and alone is None and not evidence.failures(training=name):
        return Check("skipped", "a virtual rank has too few samples")
    if evidence.bits:
        # BatchNorm and dropout depend on micro-steps, so the reference takes them, too.
        differences = evidence.compare_starts(name, reference=alone)
        return training_check(evidence, name, "2 micro-steps each", differences)
    check = training_check(evidence, name, "2 micro-steps per step")
    influence, trained = influence_of(evidence), evidence.compare_starts(MAIN).values()
    moved = [*influence.moved, *state_of(evidence).counted]
    apart = any(d.largest > evidence.tolerance_of(MAIN) for d in trained)
    if check.passed or check.failure or apart or influence.depends or not moved:
        return check
    # Everything else agrees.
    return replace(check, cause=causes.MOVED_BUFFER.of(names=", ".join(moved[:3])))


ACCUMULATION = TableRow(name="accumulation", answer=_accumulation, thorough=True, training=_HALVES)
_RESUMED = ShortTraining(name="resumed", resumes=True)


def _stop_and_resume(evidence: Evidence) -> Check:
    compared, closing = f"after step {evidence.facts.size.stop}", evidence.starts[-1].place
    if evidence.died(closing):
        return failed_start(evidence, compared, closing)
    differences = evidence.compare_starts(_RESUMED.name)
    pairs = [f"{evidence.starts[s.place - 1].world_size}→{s.world_size}" for s in differences]
    sizes = f"rank{'s' if evidence.several else ''} {', '.join(pairs)}"
    return training_check(evidence, _RESUMED.name, compared, differences, sizes)


STOP_AND_RESUME = TableRow(
    name="stop and resume", answer=_stop_and_resume, thorough=True, training=_RESUMED
)
_LOSES_RANK = ShortTraining(name="a rank dies", loses_rank=True)


def _rank_dies(evidence: Evidence) -> list[Check]:
    start, name = evidence.with_death, _LOSES_RANK.name
    if start is None:
        return []
    compared = f"rank 0 killed in step {evidence.facts.size.stop}"
    if start.place in evidence.ended and not evidence.failures(training=name):
        return [failed_start(evidence, compared, start.place)]
    trace, whole = evidence.trace(start.place, name), evidence.reference
    # What the dead rank had gathered for metrics over the training epoch is lost, and said to be.
    whole = replace(whole, epochs={step: {"loss": e["loss"]} for step, e in whole.epochs.items()})
    differences = {} if trace is None else {start: evidence.compare(trace, name, reference=whole)}
    sizes = f"{start.world_size}→{start.world_size - 1} ranks"
    return [training_check(evidence, name, compared, differences, sizes)]


RANK_DIES = TableRow(name=_LOSES_RANK.name, answer=_rank_dies, thorough=True, training=_LOSES_RANK)
_SHARDED = ShortTraining(name="fsdp", evaluates=True, sharded=True)


def _fsdp(evidence: Evidence) -> Check:
    if evidence.facts.allows_unused:
        return Check("skipped", "it cannot train steps that leave parameters unused")
    failures = evidence.failures(training=_SHARDED.name)
    if failures and failures[0].mistake:  # refused before the first step
        return Check("skipped", f"it cannot: {failures[0].message}"[:_LONGEST])
    if why := evidence.not_compared():
        return Check("skipped", why)
    return training_check(evidence, _SHARDED.name, "sharded model")


FSDP = TableRow(
    name=_SHARDED.name, answer=_fsdp, thorough=True, training=_SHARDED, with_virtual_ranks=False
)
_IN_LIGHTNING = ShortTraining(name="lightning", evaluates=True, lightning=True)


def _lightning(evidence: Evidence) -> Check:
    name = _IN_LIGHTNING.name
    if not evidence.facts.lightning:
        return Check("skipped", "not installed, or the recipe needs samestep's loop")
    one_process = evidence.failures(training=name, place=0)
    if one_process:  # it cannot train this at all, which says nothing of the training
        return Check("skipped", f"its Trainer cannot: {one_process[0].message}"[:_LONGEST])
    differences = evidence.compare_starts(name)
    for start, steps in differences.items():
        trace = evidence.traces[start.place, name][0]
        evaluations = evaluation_differences(evidence.reference, trace).values()
        differences[start] = worst([steps, *(replace(d, first_step=None) for d in evaluations)])
    return training_check(evidence, name, "its Trainer", differences)


LIGHTNING = TableRow(
    name=_IN_LIGHTNING.name,
    answer=_lightning,
    thorough=True,
    training=_IN_LIGHTNING,
    with_virtual_ranks=False,
)


def _batchnorm(evidence: Evidence) -> Check:
    if not (names := evidence.result(BATCHNORM.name, list[str])):
        return Check("same", "the model has none")
    cause = causes.BATCHNORM.of(layers=listed(names, 1))
    compared = f"{len(names)} layers as they are" if len(names) > 1 else "1 layer as it is"
    return left_free_check(evidence, "batchnorm", compared, cause)


BATCHNORM = TableRow(
    name="BatchNorm",
    experiment=lambda tested: list(batch_norms(tested.free_step.model)),
    training=left_free("batchnorm"),
    answer=_batchnorm,
    with_virtual_ranks=False,
)


def _dropout(evidence: Evidence) -> Check:
    if not (draws := evidence.result(DROPOUT.name, dict[str, str])):
        return Check("same", "the model draws nothing from torch")
    lines = sorted({line for line in draws.values() if line})
    cause = causes.DROPOUT.of(lines=f" ({', '.join(lines[:3])})" if lines else "")
    return left_free_check(evidence, "dropout", "draws as they are", cause)


DROPOUT = TableRow(
    name="dropout",
    experiment=lambda tested: tested.free_step.seen.draws,  # operation of torch → the user's line
    training=left_free("dropout"),
    answer=_dropout,
    with_virtual_ranks=False,
)
