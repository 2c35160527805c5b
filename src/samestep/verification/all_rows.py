"""All rows of the table, in its order. A new row is a file in `rows` and its name here."""

from dataclasses import replace

from samestep.ranks.world import World
from samestep.settings import Precision
from samestep.verification.evidence import LEFT_OUT, Cause, Check, Evidence, TableRow
from samestep.verification.exchange import Found, RecipeFacts, Start, encoded
from samestep.verification.recipe_under_test import RecipeUnderTest
from samestep.verification.rows import (
    accumulation,
    augmentation,
    batchnorm,
    dropout,
    evaluation,
    last_batch,
    lightning,
    loss,
    metrics,
    one_device,
    one_process,
    one_writer,
    own_precision,
    processes,
    rounding,
    sample_order,
    samples_apart,
    several_ranks,
    state,
    stop_and_resume,
    unused_parameters,
)
from samestep.verification.short_trainings import MAIN, ShortTraining

ROWS: tuple[TableRow, ...] = (
    *(
        one_process.ROW,
        several_ranks.ROW,
        rounding.ROW,
        own_precision.ROW,
        accumulation.ROW,
        stop_and_resume.ROW,
    ),
    *(lightning.ROW, batchnorm.ROW, dropout.ROW, sample_order.ROW, processes.ROW),
    *(
        augmentation.ROW,
        loss.ROW,
        last_batch.ROW,
        unused_parameters.ROW,
        state.ROW,
        samples_apart.ROW,
        evaluation.ROW,
    ),
    *(metrics.ROW, one_writer.ROW, one_device.ROW),
)
UNKNOWN = "unknown"


def rows_of(facts: RecipeFacts) -> list[TableRow]:
    """Return the rows that a verification has, with virtual ranks or without."""
    return [row for row in ROWS if row.with_virtual_ranks or facts.virtual_ranks is None]


def plan_trainings(
    start: Start, facts: RecipeFacts, chosen: Precision, *, quick: bool = False
) -> list[ShortTraining]:
    """Return what one start trains, the decisive ones first: a failure on several ranks ends it."""
    rows = [row for row in rows_of(facts) if not (quick and row.thorough)]
    trainings = [row.training for row in rows if row.training]
    taken = [training for training in trainings if training.is_taken(start, facts, chosen)]
    return sorted(taken, key=lambda t: (t.lightning, t.own_precision, t.halves or t.resumes))


def look(tested: RecipeUnderTest, facts: RecipeFacts) -> RecipeFacts:
    """Return the facts with what the experiments of all rows found in this process."""
    found = {row.name: row.look(tested) for row in rows_of(facts) if row.look}
    kept = {name: encoded(value) for name, value in found.items() if value is not None}
    # With virtual ranks nothing is held still, whatever there is.
    held = tested.free_step.kinds if facts.virtual_ranks is None else frozenset()
    return replace(facts, present=held, found=kept)


def look_on_rank(tested: RecipeUnderTest, world: World) -> Found:
    """Return what the experiments of all rows found on this rank."""
    found: Found = {}
    for row in ROWS:
        if row.look_on_rank:
            try:
                found[row.name] = encoded(row.look_on_rank(tested, world))
            except Exception:  # noqa: S112 - the short trainings say how it fails
                continue
    return found


def judge(evidence: Evidence) -> list[Check]:
    """Return the checks of all rows; of the first one alone if one process could not train."""
    found = []
    rows = rows_of(evidence.facts)
    for row in rows if evidence.trace(0, MAIN) else rows[:1]:
        left_out = row.thorough and evidence.quick
        answer = Check("skipped", LEFT_OUT) if left_out else row.answer(evidence)
        checks = answer if isinstance(answer, list) else [answer]
        found += [replace(check, name=check.name or row.name) for check in checks]
    return _as_one([_explained(evidence, check) for check in found])


def _explained(evidence: Evidence, check: Check) -> Check:
    """Return a check with its cause, if other rows found it."""
    if failure := check.failure:
        # A message says more than the step, by which the last batch is known: so that comes last.
        rows = sorted(ROWS, key=lambda row: row is last_batch.ROW)
        causes = (row.explain_failure(evidence, failure) for row in rows if row.explain_failure)
        cause = next(filter(None, causes), Cause())
        why = f"It failed: {failure.message.rstrip('.')}. {cause.why}".strip()
        return replace(check, cause=replace(cause, why=why))
    if check.passed or check.cause.name:
        return check
    asked = [*(row.explain for row in ROWS), *(row.suspect for row in ROWS)]
    explanations = (explain(evidence) for explain in asked if explain)
    return replace(check, cause=next(filter(None, explanations), None) or _unknown(check))


def _as_one(checks: list[Check]) -> list[Check]:
    """Let unknown causes of trainings, which likely are one, be told as one: by the first of them.

    What has no step is a value by itself, such as a metric.
    """
    unknown = [check for check in checks if check.cause.name == UNKNOWN and check.first_step]
    if not unknown:
        return checks
    first = min(unknown, key=lambda check: check.first_step or 0)
    return [replace(c, cause=first.cause) if c in unknown else c for c in checks]


def _unknown(check: Check) -> Cause:
    step = f"step {check.first_step}" if check.first_step else None
    first = ", ".join(filter(None, (step, check.what, check.first_parameter)))
    return Cause(
        UNKNOWN,
        f"None of the known causes was found. What differs first: {first}.",
        "Look for what depends on the rank, on how many samples a rank holds, or on what ran "
        "before.",
    )
