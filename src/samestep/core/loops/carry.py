"""`run.carry` in a user's own loop: state of the slots of a batch, or of each rank by itself."""

import inspect
from typing import Any

from torch import Tensor

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.trees import describe, map_tensors, tree_leaves
from samestep.core.data.keyed_random import mix
from samestep.core.learner.agreement import random_numbers
from samestep.core.learner.carried import Carried, Carry
from samestep.core.loops.loop_data import OwnBatch
from samestep.core.session.saver import say
from samestep.launch.ranks.world import World


class SlotState:
    """State with a row for each slot of the global batch, on any number of ranks."""

    def __init__(self, carry: Carry, slots: int, world: World, seed: int) -> None:
        self._carried, self._rank = Carried(carry, slots, world, None, seed), world.rank
        self.begin, self.settle = self._carried.begin, self._carried.settle
        self.state, self.load = self._carried.state, self._carried.load

    def _slots(self, batch: OwnBatch) -> range:
        first = self._carried.first_of(self._rank)
        return range(first, first + batch.rows)

    def of(self, batch: OwnBatch) -> Any:
        """Return the state of a batch's slots; samples that only stand in have one that is lost."""
        if not batch.weight:
            return self._carried.new(batch.rows)
        return self._carried.rows(self._slots(batch))

    def leave(self, batch: OwnBatch, tree: Any) -> None:
        """Take the state that a batch leaves."""
        if batch.weight:
            self._carried.leave(self._slots(batch), tree, lambda: "run.carry was given")


class RankState:
    """State of each rank by itself: another number of ranks cannot continue from it."""

    def __init__(self, carry: Carry, world: World, seed: int) -> None:
        self._carry, self._world, self._seed = carry, world, seed
        self._keeps = "carried" in inspect.signature(carry).parameters
        self._now: Any = None

    def begin(self, first_step: int, _size: int, step: int) -> None:
        """Make new state where an epoch begins, or where there is none."""
        if first_step and self._now is not None:
            return
        more = {"carried": self._now} if self._keeps else {}
        with random_numbers(mix(self._seed, 2, step, self._world.rank)):
            try:
                self._keep(self._carry(**more), f"carry={defined_at(self._carry)} made")
            except Exception as error:
                blame("The function for carried state failed", error, self._carry)

    def of(self, _batch: OwnBatch) -> Any:
        """Return the state of this rank."""
        return self._now

    def leave(self, _batch: OwnBatch, tree: Any) -> None:
        """Take the state that this rank leaves."""
        self._keep(tree, "run.carry was given")

    def _keep(self, tree: Any, who: str) -> None:
        leaves = tree_leaves(tree)
        if not (leaves and all(isinstance(leaf, Tensor) for leaf in leaves)):
            given = describe(tree) if tree is not None else "None (is a `return` missing?)"
            raise UserError(f"{who} {given}; it must be a tree of tensors.")
        device = self._world.device
        self._now = map_tensors(lambda leaf: leaf.detach().to(device, copy=True), tree)

    def settle(self) -> None:
        """Do nothing: what a batch leaves is there at once."""

    def state(self) -> Any:
        """Return the state of every rank, for a checkpoint."""
        return self._world.gather(map_tensors(lambda leaf: leaf.cpu(), self._now))

    def load(self, saved: Any) -> None:
        """Continue from what a checkpoint holds, if it is of as many ranks."""
        if saved is None:
            return
        if len(saved) == self._world.world_size:
            device = self._world.device
            self._now = map_tensors(lambda leaf: leaf.to(device), saved[self._world.rank])
        else:
            text = f"The checkpoint has one state for each of {len(saved)} ranks; "
            say(self._world, f"{text}{self._world.world_size} ranks start with new state.")


def carried_state(carry: Carry, slots: int, world: World, seed: int) -> SlotState | RankState:
    """Return the state that `carry` makes: for these rows, or without rows one for each rank."""
    if not callable(carry):
        raise UserError(f"run.batches(carry=…) takes a function, not {carry!r:.80}.")
    if {*inspect.signature(carry).parameters} <= {"carried"}:
        return RankState(carry, world, seed)
    return SlotState(carry, slots, world, seed)
