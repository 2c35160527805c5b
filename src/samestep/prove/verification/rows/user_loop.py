"""The rows of a script with a loop of its own, and the causes as far as its ranks show them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from samestep.base.errors import listed
from samestep.base.words import count
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import (
    Check,
    Evidence,
    TableRow,
    cause_check,
    left_free_check,
    measured,
)
from samestep.prove.verification.loop_on_rank import GLOBAL_BATCH, GROUPS, PASSES, READ_AGAIN, Pass
from samestep.prove.verification.rows import trainings
from samestep.prove.verification.rows.data import Changes, check_order
from samestep.prove.verification.rows.one_writer import ONE_WRITER
from samestep.prove.verification.short_trainings import MAIN, Start
from samestep.prove.verification.trace import (
    Trace,
    TrainingDifference,
    difference,
    evaluation_differences,
    worst,
)

_BY_SAMPLE = "Draw what belongs to a sample by batch.normal and batch.uniform"
_ADVICE: dict[str | None, str] = {
    causes.BATCHNORM.name: "Use GroupNorm, or accept it: --accept batchnorm.",
    causes.DROPOUT.name: (
        f"{_BY_SAMPLE}. If dropout is intended, accept it: --accept dropout; or compare only "
        "losses, with --tolerance 0.1."
    ),
    causes.OTHER_GENERATORS.name: f"{_BY_SAMPLE}; torch's own is seeded in every step.",
}
OF_BATCH = replace(
    causes.OF_BATCH,
    why="The gradient of the batch is not a weighted sum of its shares' gradients: the loss is "
    "computed over the batch, as a contrastive or Dice loss is, samples see each other in the "
    "model, or something reads the rank.",
    advice="Gather what the loss compares: samestep.gather(outputs) returns the rows of all ranks.",
)
A_SUM = replace(
    causes.A_SUM, advice="Divide by samples: run.backward(losses.sum() / batch.rows, model)."
)
NOT_A_MEAN = replace(
    causes.NOT_A_MEAN,
    why="The gradient of the batch is the mean of its shares' gradients, not weighted by samples: "
    "{shares}. The loss is a mean over something else (words, pixels, class weights).",
    advice="Pass their number: run.backward(loss, model, terms=n), run.log(loss=loss, terms=n).",
)


def _in_loop(row: TableRow) -> TableRow:
    """Return a row of recipes with the advice that a loop can follow."""

    def answer(evidence: Evidence) -> Check | list[Check]:
        check = row.answer(evidence)
        if isinstance(check, list) or not check.cause.advice:
            return check
        advice = _ADVICE.get(check.cause.name, check.cause.advice)
        return replace(check, cause=replace(check.cause, advice=advice))

    return replace(row, experiment=None, answer=answer)


# --- samples


def _explain_order(evidence: Evidence) -> Cause | None:
    sizes = dict(evidence.results_on_ranks(GLOBAL_BATCH, int))
    if len({*sizes.values()}) > 1:
        each = dict.fromkeys(
            f"{count(size, 'sample')} on {count(int(rank.split()[-1]), 'rank')}"
            for rank, size in sizes.items()
        )
        return causes.BATCH_BY_RANKS.of(sizes=listed([*each]))
    if changes := evidence.result(READ_AGAIN, Changes):
        return changes.cause
    for start, traces in evidence.traces_of_several():
        for step, expected in evidence.reference.samples.items():
            marks = dict(mark.split(" ") for mark in expected)
            for rank, trace in enumerate(traces):
                of_rank = [mark.split(" ") for mark in trace.samples.get(step, [])]
                if all(marks.get(place) == mark for place, mark in of_rank):
                    continue
                if rank:  # rank 0 has what one process has
                    return causes.DATA_BY_RANK.of(rank=f"rank {rank} of {start.world_size}")
                return causes.UNKEYED["dataset"].of(when="for a sample in another process")
    return None


def _order(evidence: Evidence) -> Check:
    if skipped := evidence.not_compared():
        return Check("skipped", skipped)
    if cause := _explain_order(evidence):
        return cause_check(evidence, "all ranks together: as in one process", cause)
    return check_order(evidence)


ORDER = TableRow(name="order", answer=_order, explain=_explain_order)


# --- weights and gradients


def _explain_weights(evidence: Evidence) -> Cause | None:
    first = evidence.reference.weights.get(0, {})
    for start, traces in evidence.traces_of_several():
        began = traces[0].weights.get(0, {})
        for name, values in first.items():
            if not np.array_equal(values, began.get(name, values)):
                rank = f"rank 0 of {start.world_size}"
                return causes.INITIAL_WEIGHTS.of(parameter=name, rank=rank, first="one process")
    return None


PROCESSES = TableRow(
    name="processes",
    answer=lambda evidence: cause_check(
        evidence, "weights before the first step", _explain_weights(evidence)
    ),
    explain=_explain_weights,
)


def _gradients(evidence: Evidence) -> Check:
    if skipped := evidence.not_compared():
        return Check("skipped", skipped)
    differences = []
    for _, traces in evidence.traces_of_several():
        first, *others = (
            Trace(losses=dict.fromkeys(trace.gradients, 0.0), gradients=trace.gradients)
            for trace in traces
        )
        differences += [difference(first, other, evidence.exact) for other in others]
    largest = worst(differences)
    cause = None
    if largest.largest > evidence.exact:
        cause = causes.NOT_ADDED_UP.of(
            step=largest.first_step,
            parameter=largest.first_parameter,
            backward="What it steps is not named"
            if _calls_backward(evidence)
            else "run.backward was never called",
        )
    return cause_check(
        evidence,
        "the optimizer's: as on rank 0",
        cause,
        largest.largest,
        first_step=largest.first_step,
        first_parameter=largest.first_parameter,
    )


def _calls_backward(evidence: Evidence) -> bool:
    return any(_passes(evidence, start) for start in evidence.several)


def _explain_settings(evidence: Evidence) -> Cause | None:
    """Return the first number in the optimizer's groups that depends on the ranks."""
    (_, first), *others = evidence.results_on_ranks(GROUPS, dict[int, list[dict[str, float]]])
    for step, groups in first.items():
        for rank, steps in others:
            for group, other in zip(groups, steps.get(step, []), strict=False):
                for name, value in group.items():
                    if other.get(name, value) != value:
                        return causes.OPTIMIZER_SETTINGS.of(
                            step=step, name=name, one=value, other=other[name], rank=rank
                        )
    return None


def _explain_gradients(evidence: Evidence) -> Cause | None:
    if (check := _gradients(evidence)).cause.name:
        return check.cause
    if cause := _explain_settings(evidence):
        return cause
    compared = (evidence.compare(traces[0]) for _, traces in evidence.traces_of_several())
    differ = any(difference.largest > evidence.exact for difference in compared)
    return causes.RANKS_AVERAGED if differ and not _calls_backward(evidence) else None


GRADIENTS = TableRow(name="gradients", answer=_gradients, explain=_explain_gradients)


# --- the loss


def _passes(evidence: Evidence, start: Start, step: int = 1) -> list[list[Pass]]:
    """Return the backward passes of a step on each rank of a start, in order."""
    of_ranks = [
        [p for p in report.results[PASSES] if p.step == step]
        for report in evidence.reports.get(start.place, ())
        if PASSES in report.results
    ]
    return [[*passes] for passes in zip(*of_ranks, strict=False)]


def _steps_apart(evidence: Evidence, start: Start) -> list[int]:
    """Return the steps of which passes are comparable: weights are equal before them."""
    trace = evidence.trace(start.place, MAIN)
    difference = evidence.compare(trace) if trace else TrainingDifference()
    later = difference.first_step
    return [1, later] if later and later > 1 and difference.what != "weight" else [1]


def _explain_loss(evidence: Evidence) -> Cause | None:
    """Find the weights by which the shares' losses and gradients make those of the whole batch.

    All are taken at equal weights. A mean over samples, or over terms that were named, has the
    weights that `run.backward` gives; another mean has others; a loss over the batch has none.
    """
    rounding, alone = max(1e-7, evidence.exact), evidence.starts[0]
    for start in reversed(evidence.several):  # the shares of many ranks are uneven more often
        pairs = [
            pair
            for step in _steps_apart(evidence, start)
            for pair in zip(
                _passes(evidence, alone, step), _passes(evidence, start, step), strict=False
            )
        ]
        for (whole,), parts in pairs:
            shares = [part for part in parts if part.terms]
            columns = np.stack([np.append(p.gradient, p.loss) for p in shares], axis=1)
            target = np.append(whole.gradient, whole.loss)
            terms = np.array([part.terms for part in shares])
            usual = terms / terms.sum()
            comparable = (
                len(columns) == len(target) and np.isfinite(np.append(columns, target)).all()
            )
            if not comparable or _apart(columns @ usual, target) <= rounding:
                continue
            weights = np.linalg.lstsq(columns, target, rcond=None)[0]
            return _by_weights(weights, usual, _apart(columns @ weights, target), rounding)
    return None


def _apart(values: Any, target: Any) -> float:
    return float(np.abs(values - target).max() / max(np.abs(target).max(), 1e-12))


def _by_weights(weights: Any, usual: Any, left: float, rounding: float) -> Cause:
    exactly, factors = 100 * rounding, weights / usual
    if left > exactly:
        return OF_BATCH
    if np.abs(factors - len(usual)).max() < exactly and np.ptp(usual) > 0:
        return causes.BY_NUM_RANKS.of(factor=factors[0])
    if np.abs(weights - 1).max() < exactly:
        return A_SUM
    pairs = zip(weights, usual, strict=True)
    shares = listed([f"{weight:.3f} in place of {share:.3f}" for weight, share in pairs], 4)
    cause = NOT_A_MEAN if abs(weights.sum() - 1) < 0.01 else causes.SCALED
    return cause.of(shares=shares)


def _loss(evidence: Evidence) -> Check:
    samples = "the ranks have other samples" if _explain_order(evidence) else ""
    if skipped := evidence.not_compared() or samples:
        return Check("skipped", skipped)
    return cause_check(evidence, "of a batch and of its shares", _explain_loss(evidence))


LOSS = TableRow(name="loss", answer=_loss, explain=_explain_loss)


# --- what differs by itself, and validation


def _state(evidence: Evidence) -> Check:
    if not (names := evidence.result("state", set[str])):
        return Check("same", "the steps draw nothing from Python or NumPy")
    cause = causes.OTHER_GENERATORS.of(names=" and ".join(sorted(names)))
    return left_free_check(evidence, "state", "draws as they are", cause)


STATE = TableRow(name="state", answer=_state)


def _evaluation(evidence: Evidence) -> Check:
    reference = evidence.reference.evaluations
    if not reference:
        return Check("skipped", "nothing was validated in these steps")
    if skipped := evidence.not_compared():
        return Check("skipped", skipped)
    differences = [
        difference
        for _, traces in evidence.traces_of_several()
        for difference in evaluation_differences(evidence.reference, traces[0]).values()
    ]
    compared = f"means of {', '.join(next(iter(reference.values())))}"
    cause = None
    if draws := evidence.result("evaluation", dict[str, str]):
        lines = ", ".join(sorted({line for line in draws.values() if line})[:3])
        cause = causes.DRAWN_IN_VALIDATION.of(lines=f" ({lines})" if lines else "")
    return measured(compared, worst(differences), evidence.tolerance_of(MAIN), cause)


EVALUATION = TableRow(name="evaluation", answer=_evaluation)


def _one_writer(evidence: Evidence) -> Check | list[Check]:
    check = ONE_WRITER.answer(evidence)
    # A loop prints its epochs, and the run sends what other ranks print to their logs.
    printed = isinstance(check, Check) and check.status == "note"
    return Check("same", "what ranks write") if printed else check


LOOP_ROWS: Sequence[TableRow] = (
    *(trainings.ONE_PROCESS, trainings.SEVERAL_RANKS, trainings.ROUNDING, trainings.PRECISION),
    trainings.OPTIMIZER,
    *(_in_loop(trainings.BATCHNORM), _in_loop(trainings.DROPOUT), _in_loop(STATE)),
    *(ORDER, PROCESSES, GRADIENTS, LOSS, EVALUATION),
    replace(ONE_WRITER, answer=_one_writer),
)
"""Explanations are tried in this order: other samples explain other gradients, and so on."""
