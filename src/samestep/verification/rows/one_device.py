"""One device: a single process loads and evaluates a checkpoint of several ranks."""

from dataclasses import replace
from pathlib import Path

from samestep.run import checkpoints
from samestep.training.apply import terms_of
from samestep.training.evaluation import evaluate
from samestep.training.side_effects import ALL_KINDS, RandomDraws
from samestep.training.snapshot import load_evaluated
from samestep.verification.difference import TrainingDifference, evaluations_apart
from samestep.verification.evidence import Check, Evidence, TableRow, measured
from samestep.verification.randomness import hold_model
from samestep.verification.recipe_under_test import RecipeUnderTest
from samestep.verification.rows import metrics
from samestep.verification.short_trainings import MAIN

NAME = "one device"


def evaluate_checkpoint(tested: RecipeUnderTest, run: Path) -> dict[str, float]:
    """Evaluate the newest checkpoint of a run without any other rank."""
    newest = checkpoints.load_newest(run / "checkpoints")
    if newest is None or tested.splits.validation is None:
        return {}
    model = tested.build()
    load_evaluated(model, newest[1])
    virtual, loss = tested.settings.virtual_ranks, tested.placed_loss
    world = replace(tested.world, virtual_ranks=virtual or 0)
    if virtual is None:
        hold_model(model, RandomDraws(), ALL_KINDS)
        loss = tested.loss
    recipe = replace(tested.recipe, augment=None)
    with tested.source(tested.splits.validation, recipe, world) as source:
        values = evaluate(
            tested.applied(model),
            source,
            loss,
            tested.recipe.metrics,
            world=world,
            batch_size=256,
            precision=tested.settings.precision,
            seed=tested.settings.seed,
            terms=terms_of(tested.recipe),
        )
    return {name: value for name, value in values.items() if isinstance(value, float)}


def _answer(evidence: Evidence) -> Check:
    if not evidence.several:
        return Check("skipped", evidence.not_compared())
    largest, stop = evidence.starts[-2], evidence.facts.size.stop
    trace = evidence.trace(largest.place, MAIN)
    loaded = next(filter(None, evidence.found_on_ranks(NAME, dict[str, float])), None)
    if trace is None or loaded is None or stop not in trace.evaluations:
        return Check("skipped", "there is no checkpoint to load")
    found, what = evaluations_apart(trace.evaluations[stop], loaded)
    if found > evidence.exact and metrics.largest_difference(evidence).largest > evidence.exact:
        return Check("skipped", "metrics differ by themselves")
    compared = f"a checkpoint of {largest.world_size} ranks, evaluated"
    return measured(compared, TrainingDifference(found, what=what), evidence.exact)


ROW = TableRow(name=NAME, answer=_answer, thorough=True)
