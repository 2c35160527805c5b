"""Metrics: the same weights give the same loss and metrics on any number of ranks."""

from typing import Any

import torch
from torch import Tensor

from samestep.data.order import share
from samestep.data.trees import narrow
from samestep.ranks.world import World
from samestep.verification.difference import TrainingDifference, evaluations_apart
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, measured
from samestep.verification.recipe_under_test import HeldForward, RecipeUnderTest
from samestep.verification.short_trainings import MAIN

NAME = "metrics"
CAUSE = "metric averaged over ranks"


def _look(tested: RecipeUnderTest) -> dict[str, float]:
    """Return how much each metric of a sample depends on the others of its batch."""
    held, found = tested.held_forward, {}
    if held is None:
        return {}
    rows = held.block.rows
    halves = [range(rows // 2 + 1), range(rows // 2 + 1, rows)]
    for name, metric in tested.recipe.metrics.items():
        try:
            whole, *parts = (_of_rows(metric, held, part) for part in (range(rows), *halves))
            found[name] = float((whole - torch.cat(parts)).abs().max())
        except Exception:  # the evaluation says how it fails
            found[name] = 0.0
    return found


def _look_on_rank(tested: RecipeUnderTest, world: World) -> dict[str, float]:
    """Return how much each metric of this rank's samples depends on the other ranks.

    It measures its samples while the others measure theirs, then all measure the same ones.
    """
    held, found = None if world.world_size == 1 else tested.held_forward, {}
    if held is None:
        return {}
    rows = range(held.block.rows)
    parts = [share(rows, rank, world.world_size) for rank in range(world.world_size)]
    for name, metric in tested.recipe.metrics.items():
        together, *alone = (_of_rows(metric, held, part) for part in (parts[world.rank], *parts))
        found[name] = float((together - alone[world.rank]).abs().max())
    return found


def _of_rows(metric: Any, held: HeldForward, rows: range) -> Tensor:
    """Return a metric of some consecutive samples: (samples,)."""
    trees = (held.outputs, held.block.targets)
    values: Tensor = metric(*(narrow(tree, rows.start, len(rows)) for tree in trees))
    return values.double()


def largest_difference(evidence: Evidence) -> TrainingDifference:
    """Return how far the evaluation before training is apart, and of which metric."""
    one = evidence.reference.evaluations[0]
    traces = [evidence.trace(start.place, MAIN) for start in evidence.several]
    evaluations = [trace.evaluations[0] for trace in traces if trace and 0 in trace.evaluations]
    largest, name = max((evaluations_apart(one, other) for other in evaluations), default=(0.0, ""))
    return TrainingDifference(largest, what=name)


def _answer(evidence: Evidence) -> Check:
    if evidence.not_compared():
        return Check("skipped", evidence.not_compared())
    found = largest_difference(evidence)
    compared = f"{', '.join(evidence.reference.evaluations[0])} before training"
    return measured(compared, found, evidence.exact, _cause(evidence, found.what))


def _cause(evidence: Evidence, name: str) -> Cause | None:
    on_ranks = evidence.found_on_ranks(NAME, dict[str, float])
    across = any(found.get(name, 0.0) > evidence.exact for found in on_ranks)
    in_batch = (evidence.found(NAME, dict[str, float]) or {}).get(name, 0.0) > evidence.exact
    if not (across or in_batch):
        return None
    why = (
        f"{name} of a rank's samples changes with what the other ranks measure at that time: it is "
        "averaged over ranks inside the metric."
        if across
        else f"{name} of a sample depends on the others of its batch: it is made over the batch, "
        "and ranks have other batches."
    )
    return Cause(
        CAUSE,
        why,
        "Return one value per sample, of this rank alone; sums and counts are added up over ranks "
        "and divided once.",
    )


ROW = TableRow(name=NAME, look=_look, look_on_rank=_look_on_rank, answer=_answer)
