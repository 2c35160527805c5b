"""Augmentation: a sample that is read again, or in another batch, is the same sample."""

from dataclasses import replace
from typing import Literal, NamedTuple

from samestep.ranks.world import World
from samestep.recipe import Recipe
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.recipe_under_test import RecipeUnderTest

NAME = "augmentation"
CAUSE = "unkeyed augmentation"
Part = Literal["dataset", "transform", "augment"]
_READERS = {"dataset": "The data set", "transform": "transform()", "augment": "augment()"}
_ADVICE: dict[Part, str] = {
    "dataset": "Draw in __getitem__ from torch, random or np.random themselves, not from a "
    "generator of your own: samestep seeds those by (seed, epoch, sample).",
    "transform": "transform() must not draw; move what is random to augment() and draw from its "
    "keys: samestep.uniform(keys, draws).",
    "augment": "Draw from the keys that augment() is given: samestep.uniform(keys, draws), one "
    "row per sample.",
}


class Changes(NamedTuple):
    """What changes a sample when it is read twice."""

    part: Part
    batchwise: bool
    """Whether it does so only when the sample is read in another batch."""


def _look(tested: RecipeUnderTest) -> Changes | None:
    """Read the same samples twice, and in another batch."""

    def marks(recipe: Recipe, seed: int = 1, world: World | None = None) -> list[str]:
        return tested.marks(recipe, seed, world)

    def same_twice(recipe: Recipe) -> bool:
        return marks(recipe, 1) == marks(recipe, 2)

    def same_in_parts(recipe: Recipe) -> bool:
        halves = [replace(tested.world, rank=rank, world_size=2) for rank in range(2)]
        return [mark for half in halves for mark in marks(recipe, world=half)] == marks(recipe)

    is_same = same_in_parts if same_twice(tested.recipe) else same_twice
    if is_same is same_in_parts and is_same(tested.recipe):
        return None
    part: Part = "dataset"
    if is_same(replace(tested.recipe, augment=None, transform=None)):
        part = "augment" if is_same(replace(tested.recipe, augment=None)) else "transform"
    return Changes(part, batchwise=is_same is same_in_parts)


def changing_part(evidence: Evidence) -> Part | None:
    """Return what changes a sample when it is read twice, if anything does."""
    changes = evidence.found(NAME, Changes)
    return changes.part if changes else None


def _explain(evidence: Evidence) -> Cause | None:
    changes = evidence.found(NAME, Changes)
    # A virtual rank always reads the same samples together.
    if changes is None or (changes.batchwise and evidence.bits):
        return None
    when = "each time the same sample is read in the same epoch"
    if changes.batchwise:
        when = "for a sample when other samples are beside it"
    why = f"{_READERS[changes.part]} gives something else {when}."
    return Cause(CAUSE, why, _ADVICE[changes.part])


def _answer(evidence: Evidence) -> Check:
    compared = f"a sample read again{'' if evidence.bits else ', in other batches'}"
    return cause_check(evidence, compared, _explain(evidence))


ROW = TableRow(name=NAME, look=_look, answer=_answer, explain=_explain)
