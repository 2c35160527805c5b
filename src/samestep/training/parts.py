"""Sums over the parts of all ranks: each rank's own samples, or those of virtual ranks."""

from torch import Tensor

from samestep.data.blocks import held_parts
from samestep.ranks.world import World
from samestep.training.tree import add_up


def sum_over_parts(rows: Tensor, world: World) -> Tensor:
    """Return the sums over all parts, on every rank; every rank calls it.

    Args:
        rows: (parts of this rank, values).
        world: this rank among the others.

    Returns:
        (values,). Of virtual ranks they are added up along the tree.
    """
    if not world.virtual_ranks:
        return world.reduce(rows.sum(dim=0))
    held = held_parts(world)
    table = rows.new_zeros(world.num_parts, rows.shape[1])
    table[held.start : held.stop] = rows
    return add_up(world.reduce(table).unbind(), lambda left, right: left + right)
