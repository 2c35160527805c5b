"""All rows of the table, in order: what they train and look at, and how they are judged."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from samestep.base.settings import Precision
from samestep.launch.ranks.world import World
from samestep.prove.verification.causes import NO_CAUSE, UNKNOWN
from samestep.prove.verification.evidence import LEFT_OUT, Check, Evidence, TableRow
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.rows import (
    data,
    loss,
    metrics,
    model,
    one_writer,
    state,
    trainings,
)
from samestep.prove.verification.short_trainings import MAIN, RecipeFacts, ShortTraining, Start

ROWS: tuple[TableRow, ...] = (
    *(trainings.ONE_PROCESS, trainings.SEVERAL_RANKS, trainings.ROUNDING, trainings.PRECISION),
    trainings.OPTIMIZER,
    *(trainings.ACCUMULATION, trainings.STOP_AND_RESUME, trainings.RANK_DIES),
    *(trainings.FSDP, trainings.LIGHTNING),
    *(trainings.BATCHNORM, trainings.DROPOUT),
    *(data.ORDER, model.PROCESSES, data.AUGMENTATION, loss.LOSS, loss.LAST_BATCH),
    *(model.PARAMETERS, state.STATE, model.SAMPLES_APART, data.EVALUATION),
    *(metrics.METRICS, one_writer.ONE_WRITER, metrics.ONE_DEVICE),
)


def rows_of(facts: RecipeFacts) -> list[TableRow]:
    """Return the rows of a verification, with virtual ranks or without."""
    return [row for row in ROWS if row.with_virtual_ranks or facts.virtual_ranks is None]


def plan_trainings(
    start: Start,
    facts: RecipeFacts,
    chosen: Precision,
    *,
    quick: bool = False,
    failed: Collection[str] = (),
) -> list[ShortTraining]:
    """Return a start's trainings, the decisive ones first: a failure on several ranks ends it.

    What has `failed` in one process is not tried again.
    """
    rows = [row for row in rows_of(facts) if not (quick and row.thorough)]
    trainings = [
        training
        for training in (row.training for row in rows)
        if training is not None
        and training.loses_rank is start.loses_rank
        and training.is_taken(start, facts, chosen)
        and training.name not in failed
    ]
    return sorted(
        trainings, key=lambda t: (t.sharded, t.lightning, t.own_precision, t.halves or t.resumes)
    )


def run_experiments(tested: RecipeUnderTest, facts: RecipeFacts) -> RecipeFacts:
    """Return the facts with the results of all rows' experiments in this process."""
    results = {row.name: row.experiment(tested) for row in rows_of(facts) if row.experiment}
    return replace(
        facts,
        # With virtual ranks nothing is fixed.
        present=tested.free_step.kinds if facts.virtual_ranks is None else frozenset(),
        results={name: result for name, result in results.items() if result is not None},
    )


def run_on_rank(tested: RecipeUnderTest, world: World) -> dict[str, Any]:
    """Return the results of all rows' experiments on this rank."""
    results = {}
    for row in ROWS:
        with contextlib.suppress(Exception):  # the short trainings say how it fails
            if row.rank_experiment:
                results[row.name] = row.rank_experiment(tested, world)
    return results


def check_rows(evidence: Evidence, rows: Sequence[TableRow] | None = None) -> list[Check]:
    """Return the checks of all rows, or only the first if one process could not train."""
    checks: list[Check] = []
    all_rows, rows = rows or ROWS, rows or rows_of(evidence.facts)
    for row in rows if evidence.trace(0, MAIN) else rows[:1]:
        left_out = row.thorough and evidence.quick
        answer = Check("skipped", LEFT_OUT) if left_out else row.answer(evidence)
        for check in answer if isinstance(answer, list) else [answer]:
            named = replace(check, name=check.name or row.name)
            checks.append(_with_cause(evidence, all_rows, named))
    # Unknown causes of trainings are likely the same one: all show the first. A check without a
    # step is not of a training but of a single value, such as a metric.
    unknown = [check for check in checks if check.cause.name == UNKNOWN.name and check.first_step]
    first = min(unknown, key=lambda check: check.first_step or 0, default=None)
    return [replace(c, cause=first.cause) if first and c in unknown else c for c in checks]


def _with_cause(evidence: Evidence, all_rows: Sequence[TableRow], check: Check) -> Check:
    if failure := check.failure:
        # A message says more than the step, which only shows that it was the last batch.
        rows = sorted(all_rows, key=lambda row: row is loss.LAST_BATCH)
        causes = (row.explain_failure(evidence, failure) for row in rows if row.explain_failure)
        cause = next(filter(None, causes), NO_CAUSE)
        why = f"It failed: {failure.message.rstrip('.')}. {cause.why}".strip()
        return replace(check, cause=replace(cause, why=why))
    if check.passed or check.cause.name:
        return check
    candidates = [*(row.explain for row in all_rows), *(row.suspect for row in all_rows)]
    explanations = (explain(evidence) for explain in candidates if explain)
    step = f"step {check.first_step}" if check.first_step else None
    first = ", ".join(filter(None, (step, check.what, check.first_parameter)))
    return replace(check, cause=next(filter(None, explanations), UNKNOWN.of(first=first)))
