"""The rows about samples: the same in every process, unchanged when read again, all counted."""

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from samestep.base.errors import listed
from samestep.base.words import count
from samestep.core.data.keyed_random import seed_reading
from samestep.core.learner.side_effects import RandomDraws, watched
from samestep.core.recipe import Recipe
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import Check, Evidence, TableRow, cause_check
from samestep.prove.verification.recipe_under_test import RecipeUnderTest, draws_in_words
from samestep.prove.verification.trace import hash_of, sample_hashes

_SHOWN = 4
_SAMPLES = 8
"""Samples that are read again; and how often one is put into a batch, where all rows are equal."""
Reader = Literal["dataset", "transform", "augment", "collate"]


class Changes(NamedTuple):
    """What changes a sample when it is read twice."""

    part: Reader
    batchwise: bool
    """Whether it does so only when the sample is read in another batch."""
    draws: str = ""  # what collate draws from, with the line

    @property
    def cause(self) -> Cause:
        """The cause in words."""
        if self.part == "collate":
            return causes.COLLATE_DRAWS.of(draws=self.draws or "a generator of its own")
        other = "for a sample when the batch has other samples"
        again = "each time it reads the same sample in the same epoch"
        return causes.UNKEYED[self.part].of(when=other if self.batchwise else again)


def collated_again(collate: Callable[[Any], Any], rows: list[Any]) -> Changes | None:
    """Put samples together again: what a collate draws, it draws for all of them together."""
    watched_draws = RandomDraws()
    repeated = list[str]()

    def batch(seed: int, rows: list[Any]) -> Any:
        seed_reading(seed)
        return watched(collate, watched_draws)(rows)

    first, second, other = (hash_of(batch(seed, rows)) for seed in (1, 1, 2))
    with contextlib.suppress(Exception):  # a batch without a row for each sample
        repeated = sample_hashes(batch(1, [rows[0]] * _SAMPLES))
    draws = draws_in_words(watched_draws)
    # It may seed anew for each batch: one sample in several places shows that.
    by_place = bool(draws) and len(repeated) == _SAMPLES and len({*repeated}) > 1
    if first == second == other and not by_place:
        return None
    return Changes("collate", first == second, listed(draws))


def dataset_again(data: Any, collate: Callable[[Any], Any] | None) -> Changes | None:
    """Read samples of a data set again, each seeded as in a training, and put them together."""

    def read() -> list[Any]:
        rows = []
        for place in range(min(_SAMPLES, len(data))):
            seed_reading(place)
            rows.append(data[place])
        return rows

    rows = read()
    if hash_of(rows) != hash_of(read()):
        return Changes("dataset", batchwise=False)
    return None if collate is None else collated_again(collate, rows)


def _explain_order(evidence: Evidence) -> Cause | None:
    lengths: dict[int, str] = {}  # each number of samples, with the first process that has it
    for start in sorted(evidence.starts, key=lambda start: -start.world_size):
        for rank, report in enumerate(evidence.reports.get(start.place, ())):
            lengths.setdefault(report.num_samples, f"rank {rank} of {start.world_size}")
    lengths.pop(0, None)
    if len(lengths) > 1:
        each = [f"{rank} holds {number:,}" for number, rank in lengths.items()]
        return causes.LENGTHS.of(lengths=", ".join(each[:_SHOWN]))
    on_ranks = evidence.results_on_ranks(ORDER.name, list[str])
    others = [rank for rank, hashes in on_ranks if hashes != on_ranks[0][1]]
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
    return check_order(evidence)


def check_order(evidence: Evidence) -> Check:
    """Return whether the ranks together train the samples of one process in its order."""
    compared = "all ranks together: as in one process"
    for _, traces in evidence.traces_of_several():
        for step, hashes in evidence.reference.samples.items():
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
    changes: list[Changes | None] = []

    def again(rows: Any) -> Any:
        if not changes:
            changes.append(collated_again(collate, rows))
        return collate(rows)

    tested.batch(recipe=replace(tested.recipe, collate=again))
    return changes[0]


def changing_part(evidence: Evidence) -> Reader | None:
    """Return the part that changes a sample when it is read twice, if any does."""
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
    for _, traces in evidence.traces_of_several():
        if Counter(mark for trace in traces for mark in trace.evaluated) != expected:
            return Check("different", compared, cause=causes.OTHER_ORDER)
    return Check("same", compared)


EVALUATION = TableRow(name="evaluation", answer=_evaluation)
