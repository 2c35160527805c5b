"""Load the data of a recipe on all ranks: download once a node, and do together what they share."""

from collections.abc import Collection
from typing import Any

from samestep.ranks.world import World
from samestep.recipe import Recipe, Splits

SPLITS = ("train", "validation", "test")


def load_splits(
    recipe: Recipe, options: Any, world: World, *, wanted: Collection[str] = SPLITS
) -> Splits:
    """Return the data sets of a recipe, ready to be opened; every rank calls it.

    Args:
        recipe: what loads them.
        options: its options, completed.
        world: this rank among the others.
        wanted: the splits that will be opened.

    Raises:
        UserError: on every rank, what any of them met.
    """

    def load() -> Splits:
        return recipe.load_data(options)

    if getattr(options, "download", False):  # once a node, then by the rest
        first = world.on_every(lambda: load() if world.local_rank == 0 else None)
        splits = world.on_every(lambda: first or load())
    else:
        splits = world.on_every(load)
    return splits.together(world, wanted) if splits.together is not None else splits
