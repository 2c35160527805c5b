"""Processes: each builds the same model, and computes the same of the same samples."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.data.trees import tree_leaves
from samestep.ranks.world import World
from samestep.verification.difference import largest_apart
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.exchange import decoded
from samestep.verification.fingerprints import values_of
from samestep.verification.module_outputs import (
    ModuleCall,
    ModuleDifference,
    first_at_fault,
    module_calls,
)
from samestep.verification.recipe_under_test import RecipeUnderTest, held_model
from samestep.verification.rows.state import change_of_loss, hidden_of, remembers

NAME = "processes"
WEIGHTS = "initial weights that differ per process"
RANK = "forward or loss that depends on the rank"
_COMPARED = "weights as built, a forward, the loss"
_VALUES = 32
_LOSS = "the loss"


@dataclass(frozen=True)
class Kept:
    """A module's call, of each tensor a few values."""

    name: str
    inputs: list[list[float]]
    outputs: list[list[float]]


@dataclass(frozen=True)
class Computed:
    """What one process makes of its own model and of some samples."""

    model: str
    """Its class."""
    weights: dict[str, list[float]]
    """As they are built."""
    samples: list[str]
    calls: list[Kept]
    """Of the model's modules and, at last, of the loss."""


def _look(tested: RecipeUnderTest, _world: World) -> Computed:
    block = tested.batch()
    model = held_model(tested, block)
    weights = {name: _few(p) for name, p in model.named_parameters() if p.numel()}
    held = tested.held_forward
    calls = module_calls(tested, model, block.inputs)
    kept = [Kept(c.name, list(map(_few, c.inputs)), list(map(_few, c.outputs))) for c in calls]
    if held is not None:
        loss = tested.loss(held.outputs, held.block.targets)
        outputs = [_few(leaf) for leaf in tree_leaves(held.outputs)]
        kept.append(Kept(_LOSS, outputs, [_few(loss)]))
    marks = tested.marks()
    return Computed(type(model).__name__, weights, marks, kept)


def _few(tensor: Tensor) -> list[float]:
    return values_of(tensor)[:_VALUES].tolist() if tensor.is_floating_point() else []


def _found(evidence: Evidence) -> Iterable[tuple[str, Computed]]:
    """Yield each process in words, and what it computed."""
    for start in evidence.starts:
        for rank, report in enumerate(evidence.reports.get(start.place, ())):
            found = decoded(report.found, NAME, Computed)
            if found is not None:
                yield f"rank {rank} of {start.world_size}", found


def _other_weights(evidence: Evidence) -> Cause | None:
    found = list(_found(evidence))
    for who, one in found[1:]:
        for name, values in found[0][1].weights.items():
            other = one.weights.get(name)
            if other is None or _apart(values, other) > evidence.exact:
                return Cause(
                    WEIGHTS,
                    f"{name} begins with other values in {who} than in {found[0][0]}, though all "
                    "processes are seeded alike before they build the model. (DDP gives all ranks "
                    "those of rank 0; the next start of the training has others again.)",
                    "Draw initial weights from torch, random or NumPy as they are seeded: not from "
                    "os.urandom, the time, the process, or a generator without a fixed seed.",
                )
    return None


def _apart(one: list[float], other: list[float]) -> float:
    if len(one) != len(other):
        return float("inf")
    return largest_apart(*(torch.tensor(values, dtype=torch.float64) for values in (one, other)))


def _other_forward(evidence: Evidence) -> Cause | None:
    first: tuple[str, Computed] | None = None
    for who, one in _found(evidence):
        if first is None:
            first = who, one
        if one.samples != first[1].samples or len(one.calls) != len(first[1].calls):
            continue
        found = _first_at_fault(first[1], one, evidence.exact)
        if found is not None:
            return Cause(
                RANK,
                f"{found.place} gives {who} something else ({found.difference:.0e}) than "
                f"{first[0]}, with equal weights and inputs: it reads the rank, the number of "
                f"ranks, or something else of its process{_asks(evidence)}.",
                "Leave the rank out of forward and loss: what a sample gives must not depend on "
                "the rank that holds it.",
            )
    return None


def _asks(evidence: Evidence) -> str:
    """Return what forward or loss asks its process for, with the lines, if any was seen."""
    asks = hidden_of(evidence).asks
    return f" ({', '.join(f'{what} in {line}' for what, line in asks.items())})" if asks else ""


def _first_at_fault(one: Computed, other: Computed, rounding: float) -> ModuleDifference | None:
    """Return the first module of the model, else the loss, that computed something else."""
    for of_loss in (False, True):
        mine, others = (
            [_call(kept) for kept in each.calls if (kept.name == _LOSS) is of_loss]
            for each in (one, other)
        )
        if found := first_at_fault(mine, others, rounding, one.model):
            return found
    return None


def _call(kept: Kept) -> ModuleCall:
    """Return a module's call as it can be compared."""
    inputs, outputs = (
        [torch.tensor(values, dtype=torch.float64) for values in tree]
        for tree in (kept.inputs, kept.outputs)
    )
    return ModuleCall(kept.name, inputs, outputs)


def _explain(evidence: Evidence) -> Cause | None:
    if cause := _other_weights(evidence):
        return cause
    # What each process remembers of its own calls differs, too.
    if remembers(evidence) or change_of_loss(evidence) or hidden_of(evidence).learned:
        return None
    return _other_forward(evidence)


def _answer(evidence: Evidence) -> Check:
    if len(list(_found(evidence))) < 2:
        return Check("skipped", "a forward fails in some process")
    return cause_check(evidence, _COMPARED, _explain(evidence))


ROW = TableRow(name=NAME, look_on_rank=_look, answer=_answer, explain=_explain)
