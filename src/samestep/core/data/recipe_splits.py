"""Load the data of a recipe on all ranks: download once per node, and share the preparation."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from samestep.core.data.loaders import without_loaders
from samestep.core.recipe import Recipe, Splits
from samestep.launch.ranks.world import World

SPLITS = ("train", "validation", "test")


@runtime_checkable
class PreparedOnRanks(Protocol):
    """A data set whose preparation the ranks share before any of them reads a sample.

    It leaves out samples that cannot be read, so the number of samples is known only afterwards.
    """

    def prepare_on_ranks(self, splits: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Return what replaces some splits, this one among them; every rank calls it.

        In addition to the splits by name: `notes` and `left_out`, to be added to those of `Splits`.
        """


def load_splits(
    recipe: Recipe,
    options: Any,
    world: World,
    *,
    wanted: Collection[str] = SPLITS,
    prepare: bool = True,
) -> Splits:
    """Return the data sets of a recipe by its completed options; every rank calls it.

    Of the splits that need it, those `wanted` are prepared. Without `prepare` none is, and a sample
    that is broken fails when it is read.
    """
    load = partial(recipe.load_data, options)
    if getattr(options, "download", False):  # once per node, then by the rest
        first = world.on_every(lambda: load() if world.local_rank == 0 else None)
        splits = world.on_every(lambda: first or load())
    else:
        splits = world.on_every(load)
    splits = world.on_every(lambda: without_loaders(splits, recipe.collate))
    given = {name: getattr(splits, name) for name in SPLITS if name in wanted}
    if splits.by_name and "validation" in given:
        # Also in the order of their names, so that all ranks prepare them in the same.
        given |= {f"validation/{name}": data for name, data in splits.by_name.items()}
        del given["validation"]
    parts = {name: data for name, data in given.items() if isinstance(data, PreparedOnRanks)}
    if not prepare or not parts:
        return splits
    done = next(iter(parts.values())).prepare_on_ranks(parts, world)
    told = {name: getattr(splits, name) + done.pop(name) for name in ("notes", "left_out")}
    by_name = {n: done.pop(f"validation/{n}", data) for n, data in splits.by_name.items()}
    return replace(splits, **{**done, **told, **({"validation": by_name} if by_name else {})})
