"""The row about an optimizer of one's own: what it computes in, and what it makes of a rounding."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.base.trees import tree_leaves
from samestep.prove.verification import causes
from samestep.prove.verification.evidence import OPTIMIZER_TIMES, Check, Evidence, TableRow
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.short_trainings import (
    MAIN,
    NUDGED_GRADIENT,
    NUDGED_IN_OWN,
    OPTIMIZER_ROW,
    OWN_PRECISION,
    ShortTraining,
)

_OF_RANKS = 8
"""Roundings by which the gradients of ranks differ from those of one process."""


class Arithmetic(NamedTuple):
    """What an optimizer's step computes in."""

    wide: bool
    """Whether it computes in float64 also where its code asks for a narrower type."""
    kind: str
    """The narrowest type that it computes in."""
    unit: float
    """One rounding in that type, relative."""
    of_weights: float = 2.0**-53
    """… and in the type of the weights."""

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
            for gradient in (p.grad for group in optimizer.param_groups for p in group["params"]):
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
        """Return what was computed in, given the type of the weights; None if nothing was."""
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


def _answer(evidence: Evidence) -> Iterator[Check]:
    in_own = (OWN_PRECISION, NUDGED_IN_OWN, NUDGED_IN_OWN)
    for training, result, nudged in ((MAIN, OPTIMIZER_ROW, NUDGED_GRADIENT), in_own):
        arithmetic = evidence.result(result, Arithmetic) if evidence.trace(0, nudged) else None
        allowed = evidence.by_optimizer(training)
        if arithmetic is None or allowed <= evidence.before_updates(training):
            continue
        what = "losses" if evidence.losses_only(training) else "weights"
        moved, unit = allowed / OPTIMIZER_TIMES, _off(arithmetic)
        cause = causes.OPTIMIZER_ROUNDS.of(
            kind=arithmetic.kind, unit=unit, what=what, moved=moved, allowed=allowed
        )
        if arithmetic.unit <= arithmetic.of_weights:
            cause = replace(cause, advice="")
        yield Check("note", "gradients off by one rounding: the measure", moved, allowed, cause)


OPTIMIZER = TableRow(
    name=OPTIMIZER_ROW,
    experiment=_watch_steps,
    training=ShortTraining(name=NUDGED_GRADIENT, nudges_gradient=True),
    answer=lambda evidence: [*_answer(evidence)],
    with_virtual_ranks=False,
)
