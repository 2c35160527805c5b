"""Samples apart: the model's output for a sample does not depend on the rest of the batch."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.training.side_effects import batch_norms
from samestep.verification.difference import largest_apart
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.fingerprints import dense
from samestep.verification.module_outputs import ModuleDifference, first_difference
from samestep.verification.recipe_under_test import RecipeUnderTest, held_model
from samestep.verification.rows.state import remembers

NAME = "samples apart"
CAUSE = "samples that see each other"
BUFFERS = "buffers made of a rank's samples"


class Company(NamedTuple):
    """What a sample's company in the batch changes."""

    module: ModuleDifference | None
    """The first module that gives a sample something else without the others."""
    buffers: list[str] = []  # noqa: RUF012 - a tuple's default, never changed
    """Buffers that have other values after a forward of fewer samples."""
    moved: list[str] = []  # noqa: RUF012 - a tuple's default, never changed
    """Other buffers that every forward moves, whatever its samples are."""


def _look(tested: RecipeUnderTest) -> Company | None:
    """Compare a forward of a batch with one of its first half, both from the same buffers."""
    held = tested.held_forward
    if held is None or held.block.rows < 2:
        return None
    rows = held.block.rows // 2
    model = held_model(tested, held.block)
    first = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def restore() -> None:
        for name, buffer in model.named_buffers():
            if name in first and first[name].shape == buffer.shape:
                with torch.no_grad():
                    buffer.copy_(first[name])

    halves = held.block.inputs, tested.part(held.block, 0, rows).inputs
    module = first_difference(tested, model, *halves, rows=rows, restore=restore)
    after = [_buffers_after(tested, model, each, restore) for each in halves]
    buffers = [
        name for name in after[0] if largest_apart(*(a[name] for a in after)) > tested.rounding
    ]
    moved = [
        name
        for name, left in after[0].items()
        if name not in buffers and not torch.equal(left, dense(first[name]))
    ]
    return Company(module, buffers, moved) if module or buffers or moved else None


def _buffers_after(
    tested: RecipeUnderTest, model: nn.Module, inputs: Any, restore: Any
) -> dict[str, Tensor]:
    """Return the buffers that a forward has left; those of BatchNorm have a row of their own."""
    norms = tuple(f"{name}." for name in batch_norms(model))
    if all(name.startswith(norms) for name, _ in model.named_buffers()):
        return {}
    restore()
    with torch.no_grad():
        tested.forward(model, inputs)
    named = [(n, b) for n, b in model.named_buffers() if not n.startswith(norms)]
    return {name: dense(b.detach()).clone() for name, b in named if b.numel()}


def _explain(evidence: Evidence) -> Cause | None:
    found = evidence.found(NAME, Company)
    # A module that remembers something gives another output each time, whatever the batch.
    if found is None or remembers(evidence):
        return None
    if found.buffers:
        names = ", ".join(found.buffers[:3])
        return Cause(
            BUFFERS,
            f"Forward updates {names} from the samples of the batch: each rank has others, and "
            "those of rank 0 are kept.",
            "Update it from the samples of all ranks: torch.distributed.all_reduce() in forward, "
            "if torch.distributed.is_initialized().",
        )
    if found.module is None:
        return None
    return Cause(
        CAUSE,
        f"{found.module.place} gives a sample something else ({found.module.difference:.0e}) when "
        "other samples are beside it: it computes over the batch, and each rank has its own.",
        "Compute over a sample's own values (GroupNorm, LayerNorm), or over all ranks.",
    )


def moved_buffers(evidence: Evidence) -> list[str]:
    """Return the buffers that every forward moves, whatever its samples are."""
    found = evidence.found(NAME, Company)
    return found.moved if found else []


def _answer(evidence: Evidence) -> Check:
    found, cause = evidence.found(NAME, Company), _explain(evidence)
    difference = found.module.difference if found and found.module and cause else None
    return cause_check(evidence, "outputs, with others in the batch", cause, difference)


ROW = TableRow(name=NAME, look=_look, answer=_answer, explain=_explain, with_virtual_ranks=False)
