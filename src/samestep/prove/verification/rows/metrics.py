"""The rows about evaluations: equal weights give equal loss and metrics on any number of ranks."""

import contextlib
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from samestep.base.trees import map_leaves, narrow
from samestep.core.data.order import share
from samestep.core.learner.apply import Moment, measure_of, terms_of, timed
from samestep.core.learner.side_effects import ALL_KINDS, RandomDraws
from samestep.core.session.restoring import load_newest
from samestep.core.training.evaluation import Totals, evaluate
from samestep.core.training.metrics import Objects, is_object
from samestep.core.training.snapshot import load_evaluated
from samestep.launch.ranks.world import World
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import Check, Evidence, TableRow, cause_check, measured
from samestep.prove.verification.recipe_under_test import HeldForward, RecipeUnderTest, hold_model
from samestep.prove.verification.short_trainings import MAIN
from samestep.prove.verification.trace import (
    TrainingDifference,
    evaluation_differences,
    evaluations_apart,
    relative,
    worst,
)

_ROUNDING = 1e-5  # relative, of metric objects: most add up in float32


def _dependences(tested: RecipeUnderTest) -> dict[str, float]:
    """Return each metric's dependence on the other samples of a batch.

    An untrained model may give all samples one class, which hides dependences: so outputs vary.
    """
    if (held := tested.unmixed.held_forward) is None:
        return {}
    rows = held.block.rows
    dependences = {}
    parts = (range(rows), range(rows // 2 + 1), range(rows // 2 + 1, rows))
    varied = [held, *(held._replace(outputs=map_leaves(v, held.outputs)) for v in (_roll, _spread))]
    for name, metric in tested.recipe.metrics.items():
        sizes = [0.0]
        for held_outputs in varied:
            # The evaluation says how it fails; varied outputs may be none for it.
            with contextlib.suppress(Exception):
                if is_object(metric):
                    sizes.append(_apart(tested, metric, held_outputs))
                    continue
                whole, *halves = (_of_rows(tested, metric, held_outputs, part) for part in parts)
                sizes.append(float((whole - torch.cat(halves)).abs().max()))
        dependences[name] = max(size for size in sizes if not math.isnan(size))
    return dependences


def _apart(tested: RecipeUnderTest, metric: Any, held: HeldForward) -> float:
    """Return the difference of a metric object's value for all rows from that of single rows."""
    rows = held.block.rows
    values = list[float]()
    for size in (rows, 1):
        objects = Objects({"metric": metric}, tested.world.device)
        for first in range(0, rows, size):
            part = tested.part(held.block, first, size)
            objects.update(narrow(held.outputs, first, size), part.targets)
        values += objects.values(World()).values()
    apart = relative(*values)
    return apart if apart > _ROUNDING else 0.0


def _roll(outputs: Tensor) -> Tensor:
    """Return outputs with those of each sample moved on by its place: other classes, same range."""
    return torch.stack(
        [row.roll(place, -1) if row.dim() else row for place, row in enumerate(outputs)]
    )


def _spread(outputs: Tensor) -> Tensor:
    """Return outputs spread around zero, with both signs in every batch."""
    if not outputs.is_floating_point():
        return outputs
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    return outputs - outputs.mean(0) + noise.to(outputs)


def _measure_with_others(tested: RecipeUnderTest, world: World) -> dict[str, float]:
    """Return each metric's dependence, for this rank's samples, on the other ranks.

    It measures its samples while the others measure theirs, then all measure the same ones.
    """
    if world.world_size == 1 or (held := tested.unmixed.held_forward) is None:
        return {}
    rows = range(held.block.rows)
    differences = {}
    parts = [share(rows, rank, world.world_size) for rank in range(world.world_size)]
    for name, metric in tested.recipe.metrics.items():
        ranges = (parts[world.rank], *parts)
        together, *alone = (_of_rows(tested, metric, held, part) for part in ranges)
        differences[name] = float((together - alone[world.rank]).abs().max())
    return differences


def _of_rows(tested: RecipeUnderTest, metric: Any, held: HeldForward, rows: range) -> Tensor:
    """Return a metric of some consecutive samples: (samples,)."""
    part = tested.part(held.block, rows.start, len(rows))
    values: Tensor = metric(narrow(held.outputs, rows.start, len(rows)), part.targets)
    return values.double()


def largest_difference(evidence: Evidence) -> TrainingDifference:
    """Return the largest difference of evaluations of equal weights, with its metric.

    These are the one before training and, if the ranks train the same, all later ones.
    """
    differences = []
    # Weights are equal but for rounding so small that it turns no prediction around.
    exact = evidence.facts.exact == "fp64" or evidence.bits
    for start in evidence.several:
        if trace := evidence.trace(start.place, MAIN):
            same = exact and evidence.compare(trace).largest <= evidence.exact
            of_steps = evaluation_differences(evidence.reference, trace).items()
            differences += [difference for step, difference in of_steps if same or not step]
    return worst(differences)


def _metrics(evidence: Evidence) -> Check:
    if evidence.not_compared():
        return Check("skipped", evidence.not_compared())
    difference = largest_difference(evidence)
    compared = f"{', '.join(evidence.reference.evaluations[0])} before and after steps"
    if difference.largest > evidence.exact or evidence.bits:
        return measured(compared, difference, evidence.exact, _cause(evidence, difference.what))
    # What these few weights do not show, other outputs do.
    alone = evidence.result(METRICS.name, dict[str, float]) or {}
    name = max(alone, key=lambda name: alone[name], default="")
    cause = _cause(evidence, name) if name else None
    return cause_check(evidence, compared, cause, alone[name] if cause else difference.largest)


def _cause(evidence: Evidence, name: str) -> Cause | None:
    in_process = evidence.result(METRICS.name, dict[str, float]) or {}
    on_ranks = [result for _, result in evidence.results_on_ranks(METRICS.name, dict[str, float])]
    for cause, results in ((causes.OVER_RANKS, on_ranks), (causes.OVER_BATCH, [in_process])):
        if any(result.get(name, 0.0) > evidence.exact for result in results):
            return cause.of(metric=name)
    return None


METRICS = TableRow(
    name="metrics", experiment=_dependences, rank_experiment=_measure_with_others, answer=_metrics
)


def evaluate_checkpoint(tested: RecipeUnderTest, run: Path) -> dict[str, float]:
    """Evaluate the newest checkpoint of a run without any other rank."""
    newest = load_newest(run, World())
    if newest is None or tested.splits.validation is None:
        return {}
    model = tested.build()
    load_evaluated(model, newest.content)
    moment = Moment()
    moment.after(newest.content["position"])
    virtual, evaluated_loss = tested.settings.virtual_ranks, tested.placed_evaluation_loss
    loss = timed(evaluated_loss, moment)
    world = replace(tested.world, virtual_ranks=virtual or 0)
    if virtual is None:
        hold_model(model, RandomDraws(), ALL_KINDS)
        loss = partial(tested.loss, moment=moment, loss=evaluated_loss)
    # A loss over the whole batch is evaluated over batches as they were trained.
    as_trained = replace(tested.settings, batch_size=tested.size.global_batch)
    tested = replace(tested, recipe=replace(tested.recipe, augment=None), settings=as_trained)
    measure = measure_of(tested.recipe, model)
    evaluation = dict[str, float]()
    splits = tested.splits
    sets = [("", splits.validation), *((f"{of}/", data) for of, data in splits.by_name.items())]
    for prefix, data in sets:
        with tested.source(data, world=world) as source:
            totals = Totals(
                loss,
                tested.recipe.metrics,
                world,
                terms=terms_of(tested.recipe),
                reduction=tested.recipe.reduction,
                measure=measure,
            )
            values = evaluate(
                tested.applied(model),
                source,
                totals,
                batch_size=256,
                precision=tested.settings.precision,
                seed=tested.settings.seed,
            )
        evaluation |= {
            f"{prefix}{n}": value for n, value in values.items() if isinstance(value, float)
        }
    return evaluation


def _one_device(evidence: Evidence) -> Check:
    if not evidence.several:
        return Check("skipped", evidence.not_compared())
    largest, stop = evidence.starts[-2], evidence.facts.size.stop
    trace = evidence.trace(largest.place, MAIN)
    on_ranks = evidence.results_on_ranks(ONE_DEVICE.name, dict[str, float])
    loaded = next((evaluation for _, evaluation in on_ranks if evaluation), None)
    if trace is None or loaded is None or stop not in trace.evaluations:
        return Check("skipped", "there is no checkpoint to load")
    difference, metric = evaluations_apart(trace.evaluations[stop], loaded)
    if difference > evidence.exact and largest_difference(evidence).largest > evidence.exact:
        return Check("skipped", "metrics differ by themselves")
    compared = f"a checkpoint of {largest.world_size} ranks, evaluated"
    return measured(compared, TrainingDifference(difference, what=metric), evidence.exact)


ONE_DEVICE = TableRow(name="one device", answer=_one_device, thorough=True)
