"""The rows about the model: equal in all processes, a sample by itself, all parameters used."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samestep.base.errors import listed
from samestep.base.trees import tree_leaves
from samestep.base.words import count
from samestep.core.learner.side_effects import batch_norms
from samestep.launch.ranks.world import World
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import Check, Evidence, TableRow, cause_check
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.rows.state import (
    ModuleCall,
    ModuleDifference,
    first_at_fault,
    first_difference,
    module_calls,
    restoring,
    state_of,
)
from samestep.prove.verification.short_trainings import RecipeFacts
from samestep.prove.verification.trace import dense, largest_apart, values_of

_UNUSED_MESSAGE = re.compile(
    r"does not depend on|finished reduction in the prior iteration|find_unused_parameters"
)
_VALUES = 32
_LOSS = "the loss"


@dataclass(frozen=True)
class ProcessOutputs:
    """What one process makes of its own model and of some samples."""

    model: str  # its class
    weights: dict[str, Tensor]  # a few values of each, as built
    samples: list[str]
    calls: list[ModuleCall]
    """Of the model's modules and, at last, of the loss, with a few values of each tensor."""


def _compute(tested: RecipeUnderTest, _world: World) -> ProcessOutputs:
    block, model = tested.batch(), tested.held_model()
    weights = {name: _few(p) for name, p in model.named_parameters() if p.numel()}
    held = tested.held_forward
    calls = module_calls(tested, model, block.inputs)
    if held is not None:
        loss = tested.loss(held.outputs, held.block.targets)
        calls.append(ModuleCall(_LOSS, tree_leaves(held.outputs), [loss]))
    in_short = [ModuleCall(c.name, [*map(_few, c.inputs)], [*map(_few, c.outputs)]) for c in calls]
    return ProcessOutputs(type(model).__name__, weights, tested.hashes(), in_short)


def _few(tensor: Tensor) -> Tensor:
    tensor = tensor.detach() if tensor.is_floating_point() else torch.empty(0)
    return torch.from_numpy(values_of(tensor)[:_VALUES])


def _outputs(evidence: Evidence) -> list[tuple[str, ProcessOutputs]]:
    return evidence.results_on_ranks(PROCESSES.name, ProcessOutputs)


def _other_weights(evidence: Evidence) -> Cause | None:
    (first, outputs), *others = _outputs(evidence)
    for rank, other in others:
        for name, values in outputs.weights.items():
            theirs = other.weights.get(name, values[:0])
            if len(theirs) != len(values) or largest_apart(values, theirs) > evidence.exact:
                return causes.INITIAL_WEIGHTS.of(parameter=name, rank=rank, first=first)
    return None


def _other_forward(evidence: Evidence) -> Cause | None:
    (first, outputs), *others = _outputs(evidence)
    for rank, other in others:
        if other.samples != outputs.samples or len(other.calls) != len(outputs.calls):
            continue
        for of_loss in (False, True):
            calls, other_calls = (
                [call for call in process.calls if (call.name == _LOSS) is of_loss]
                for process in (outputs, other)
            )
            if module := first_at_fault(calls, other_calls, evidence.exact, outputs.model):
                asks = [f"{what} in {line}" for what, line in state_of(evidence).asks.items()]
                return causes.FORWARD_BY_RANK.of(
                    module=module.place,
                    rank=rank,
                    difference=module.difference,
                    first=first,
                    lines=f" ({', '.join(asks)})" if asks else "",
                )
    return None


def _explain_processes(evidence: Evidence) -> Cause | None:
    if len(_outputs(evidence)) < 2:
        return None
    state = state_of(evidence)
    # What each process remembers of its own calls differs, too.
    differs = state.remembers or state.loss or state.learned
    return _other_weights(evidence) or (None if differs else _other_forward(evidence))


PROCESSES = TableRow(
    name="processes",
    rank_experiment=_compute,
    answer=lambda evidence: (
        cause_check(evidence, "weights as built, a forward, the loss", _explain_processes(evidence))
        if len(_outputs(evidence)) > 1
        else Check("skipped", "a forward fails in some process")
    ),
    explain=_explain_processes,
)


class BatchInfluence(NamedTuple):
    """What the other samples of a batch change."""

    module: ModuleDifference | None = None
    """The first module whose output for a sample changes without the others."""
    buffers: list[str] = []  # noqa: RUF012 - a tuple's default, never changed
    """Buffers that have other values after a forward of fewer samples."""
    moved: list[str] = []  # noqa: RUF012 - a tuple's default, never changed
    """Other buffers that every forward moves, whatever its samples are."""
    written: list[str] = []  # noqa: RUF012 - a tuple's default, never changed
    """Parameters that a forward sets from its samples."""

    @property
    def depends(self) -> bool:
        """Whether anything depends on the other samples."""
        return bool(self.module or self.buffers or self.written)


def _halve_batch(tested: RecipeUnderTest) -> BatchInfluence | None:
    """Compare a forward of a batch with one of its first half, both from the same buffers."""
    block, packed = tested.batch(), tested.held_outputs is None
    if block.rows < 2 or (tested.recipe.collate is None if packed else tested.held_forward is None):
        return None
    rows, model = block.rows // 2, tested.held_model()
    restore = restoring(model, checkpointed=False)
    # BatchNorm's have a row of their own.
    norms = tuple(f"{name}." for name in batch_norms(model))

    def tensors() -> dict[str, Tensor]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {
            name: dense(tensor.detach()).clone()
            for name, tensor in named
            if tensor.numel() and not name.startswith(norms)
        }

    def tensors_after(inputs: Any) -> dict[str, Tensor]:
        restore()
        with torch.no_grad():
            tested.forward(model, inputs)
        return tensors()

    first, parameters = tensors(), dict(model.named_parameters())

    halves = block.inputs, tested.part(block, 0, rows).inputs
    if packed:  # the first ones do not see those that follow, where attention is causal
        last = tested.part(block, rows, block.rows - rows).inputs
        pair = block.inputs, last
        module = first_difference(tested, model, *pair, packed=True, restore=restore)
    else:
        module = first_difference(tested, model, *halves, rows=rows, restore=restore)
    whole, half = map(tensors_after, halves)
    apart = [
        name
        for name in whole
        if name not in half
        or whole[name].shape != half[name].shape
        or largest_apart(whole[name], half[name]) > tested.rounding
    ]
    moved = [
        name
        for name, left in whole.items()
        if name in first and name not in (*apart, *parameters)
        if not torch.equal(left, first[name])
    ]
    written = [name for name in apart if name in parameters]
    buffers = [name for name in apart if name not in parameters]
    if not (module or apart or moved):
        return None
    return BatchInfluence(module, buffers, moved, written)


def _explain_samples_apart(evidence: Evidence) -> Cause | None:
    influence = influence_of(evidence)
    # A module that remembers something gives another output each time, whatever the batch.
    if state_of(evidence).remembers:
        return None
    if influence.written:
        return causes.WRITTEN.of(names=", ".join(influence.written[:3]))
    if influence.buffers:
        return causes.BUFFERS.of(names=", ".join(influence.buffers[:3]))
    module = influence.module
    return module and causes.MIXED.of(module=module.place, difference=module.difference)


def influence_of(evidence: Evidence) -> BatchInfluence:
    """Return the influence of the other samples in a batch; empty if that was not tried."""
    return evidence.result(SAMPLES_APART.name, BatchInfluence) or BatchInfluence()


def _samples_apart(evidence: Evidence) -> Check:
    module, cause = influence_of(evidence).module, _explain_samples_apart(evidence)
    difference = module.difference if module and cause else None
    return cause_check(evidence, "outputs, in different batches", cause, difference)


SAMPLES_APART = TableRow(
    name="samples apart",
    experiment=_halve_batch,
    answer=_samples_apart,
    explain=_explain_samples_apart,
    explain_failure=lambda evidence, failure: (
        _explain_samples_apart(evidence)
        if "drifted apart" in failure.message and influence_of(evidence).written
        else None
    ),
    with_virtual_ranks=False,
)


def unused_parameters(facts: RecipeFacts) -> list[str]:
    """Return the parameters without a gradient: ranks would wait for it forever."""
    return list(facts.results.get(PARAMETERS.name, ()))


def _unused_cause(names: list[str]) -> Cause:
    none, some = "The loss does not depend on", "In some steps the loss does not depend on all"
    return causes.UNUSED.of(loss=f"{none} {listed(names)}" if names else f"{some} parameters")


def _parameters(evidence: Evidence) -> Check:
    names = unused_parameters(evidence.facts)
    compared = "every parameter gets a gradient"
    # With --find-unused or --static-graph ranks do not wait; other rows compare the trainings.
    if names and evidence.facts.allows_unused:
        return Check("same", f"{count(len(names), 'parameter')} unused in a step, as you allow")
    if not names:
        return Check("same", compared)
    return cause_check(evidence, compared, _unused_cause(names), first_parameter=names[0])


PARAMETERS = TableRow(
    name="parameters",
    experiment=lambda tested: [
        name
        for name, p in tested.free_step.model.named_parameters()
        if p.requires_grad and p.grad is None
    ],
    answer=_parameters,
    explain_failure=lambda evidence, failure: (
        _unused_cause(unused_parameters(evidence.facts))
        if _UNUSED_MESSAGE.search(failure.message)
        else None
    ),
)
