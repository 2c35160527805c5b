"""The rows about samples: the same in every process, unchanged when read again, all counted."""

from collections import Counter
from dataclasses import replace
from typing import Any

from samestep.base.words import count
from samestep.core.recipe import Recipe
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import Check, Evidence, TableRow, cause_check
from samestep.prove.verification.read_again import Changes, Reader, collated_again
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.short_trainings import MAIN

_SHOWN = 4


def _explain_order(evidence: Evidence) -> Cause | None:
    lengths: dict[int, str] = {}  # each number of samples, with the first process that has it
    for start in sorted(evidence.starts, key=lambda start: -start.world_size):
        for rank, report in enumerate(evidence.reports.get(start.place, ())):
            lengths.setdefault(report.num_samples, f"rank {rank} of {start.world_size}")
    lengths.pop(0, None)
    if len(lengths) > 1:
        each = [f"{rank} holds {number:,}" for number, rank in lengths.items()]
        return causes.LENGTHS.of(lengths=", ".join(each[:_SHOWN]))
    found = evidence.results_on_ranks(ORDER.name, list[str])
    others = [rank for rank, hashes in found if hashes != found[0][1]]
    if not others or changing_part(evidence) == "dataset":
        return None
    if any(rank.startswith("rank 0 ") for rank in others):
        return causes.OTHER_ORDER
    return causes.DATA_BY_RANK.of(rank=others[0])


def _order(evidence: Evidence) -> Check:
    if cause := _explain_order(evidence):
        return cause_check(evidence, "the same data in every process", cause)
    changing = "samples change when they are read" if changing_part(evidence) else ""
    if skipped := changing or evidence.not_compared():
        return Check("skipped", skipped)
    compared = "on all ranks that of one process"
    for start in evidence.several:
        traces = evidence.traces.get((start.place, MAIN), [])
        for step, hashes in evidence.reference.samples.items() if traces else ():
            if [h for trace in traces for h in trace.samples.get(step, [])] != hashes:
                return cause_check(evidence, compared, causes.OTHER_ORDER, first_step=step)
    return Check("same", compared)


ORDER = TableRow(
    name="order",
    rank_experiment=lambda tested, _world: tested.hashes(
        replace(tested.recipe, augment=None, transform=None)
    ),
    answer=_order,
    explain=_explain_order,
    explain_failure=lambda evidence, failure: (
        _explain_order(evidence) or causes.OTHER_ORDER
        if "loaded data of different sizes" in failure.message
        else None
    ),
)


def _read_again(tested: RecipeUnderTest) -> Changes | None:
    """Read the same samples twice, and in another batch."""
    if tested.recipe.collate is not None and (changes := _collate_again(tested)):
        return changes

    def same_twice(recipe: Recipe) -> bool:
        return tested.hashes(recipe, 1) == tested.hashes(recipe, 2)

    def same_in_parts(recipe: Recipe) -> bool:
        halves = [replace(tested.world, rank=rank, world_size=2) for rank in range(2)]
        parts = [mark for half in halves for mark in tested.hashes(recipe, 1, half)]
        return parts == tested.hashes(recipe, 1)

    batchwise = same_twice(tested.recipe)
    is_same = same_in_parts if batchwise else same_twice
    if batchwise and is_same(tested.recipe):
        return None
    part: Reader = "dataset"
    if is_same(replace(tested.recipe, augment=None, transform=None)):
        part = "augment" if is_same(replace(tested.recipe, augment=None)) else "transform"
    return Changes(part, batchwise)


def _collate_again(tested: RecipeUnderTest) -> Changes | None:
    """See what a recipe's collate makes of the samples of a batch when it is called again."""
    collate: Any = tested.recipe.collate
    found: list[Changes | None] = []

    def again(rows: Any) -> Any:
        if not found:
            found.append(collated_again(collate, rows))
        return collate(rows)

    tested.batch(recipe=replace(tested.recipe, collate=again))
    return found[0]


def changing_part(evidence: Evidence) -> Reader | None:
    """Return what changes a sample when it is read twice, if anything does."""
    changes = evidence.result(AUGMENTATION.name, Changes)
    return changes.part if changes else None


def _explain_augmentation(evidence: Evidence) -> Cause | None:
    changes = evidence.result(AUGMENTATION.name, Changes)
    # A virtual rank always reads the same samples together.
    if changes is None or (changes.batchwise and evidence.bits):
        return None
    return changes.cause


AUGMENTATION = TableRow(
    name="augmentation",
    experiment=_read_again,
    answer=lambda evidence: cause_check(
        evidence,
        f"a sample read again{'' if evidence.bits else ', in other batches'}",
        _explain_augmentation(evidence),
    ),
    explain=_explain_augmentation,
)


def _evaluation(evidence: Evidence) -> Check:
    """Judge whether every sample is evaluated exactly once."""
    expected = Counter(evidence.reference.evaluated)
    samples = count(expected.total(), f"{evidence.facts.evaluates} sample")
    compared = f"each of {samples} once"
    changing = "samples change when read" if changing_part(evidence) == "dataset" else ""
    if skipped := changing or evidence.not_compared():
        return Check("skipped", skipped)
    for start in evidence.several:
        traces = evidence.traces.get((start.place, MAIN), [])
        if traces and Counter(mark for trace in traces for mark in trace.evaluated) != expected:
            return Check("different", compared, cause=causes.OTHER_ORDER)
    return Check("same", compared)


EVALUATION = TableRow(name="evaluation", answer=_evaluation)
