"""State that belongs to a place in the batch: a hidden state, a memory bank, a replay buffer.

It has a row for each slot of the global batch. A rank holds the rows of its share; where a step is
smaller than the others, and shares lie elsewhere, ranks gather all rows and take theirs anew.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError, blame, defined_at
from samestep.base.settings import Settings
from samestep.base.trees import describe, map_leaves, map_tensors, narrow, tree_leaves
from samestep.core.data.keyed_random import mix
from samestep.core.data.order import Block, held_parts, part_of
from samestep.core.learner.agreement import check_same_tensors, random_numbers
from samestep.core.learner.device import data_dtype
from samestep.core.learner.gathered import gather_rows
from samestep.core.plan import Plan
from samestep.launch.ranks.world import World

Carry = Callable[..., Any]
"""rows → a tree of tensors with as many rows; `carried` is what the epoch before has left."""


def new_state(
    carry: Carry, rows: int, device: torch.device, dtype: torch.dtype | None, **more: Any
) -> Any:
    """Return the state that a recipe's or script's `carry` makes for `rows` samples."""
    try:
        state = carry(rows, **more)
    except Exception as error:
        remedy = "It is called with the number of rows."
        blame("The function for carried state failed", error, carry, remedy=remedy)
    _check(state, rows, lambda: f"carry={defined_at(carry)} made", "it must make")

    def place(leaf: Tensor) -> Tensor:
        kind = dtype if leaf.is_floating_point() else None
        return leaf.detach().to(device=device, dtype=kind, copy=True)

    return map_tensors(place, state)


def _check(tree: Any, rows: int, who: Callable[[], str], must: str) -> None:
    leaves = tree_leaves(tree)
    if leaves and all(isinstance(x, Tensor) and x.dim() and len(x) == rows for x in leaves):
        return
    description = describe(tree) if tree is not None else "None (is a `return` missing?)"
    raise UserError(
        f"{who()} {description}; {must} tensors with a row for each of {rows} slots, or a list, "
        "tuple or dict of them. A state of another layout, (layers, rows, …), is transposed in "
        "forward."
    )


class Carried:
    """The state of all slots of a training; each rank has the rows of its share of the step."""

    def __init__(
        self, carry: Carry, slots: int, world: World, dtype: torch.dtype | None, seed: int
    ) -> None:
        self._carry, self._slots, self._world, self._dtype = carry, slots, world, dtype
        self._seed = seed
        self._keeps = "carried" in inspect.signature(carry).parameters
        """Whether what an epoch has left continues in the next one."""
        self._size = 0
        """Slots of the step that the rows are laid out for; 0 before there are any."""
        self._first = 0
        """This rank's first slot."""
        self._rows: Any = None
        self._rest: Any = None
        """Rows of the slots that the step has no samples for, on every rank."""
        self._left: dict[int, Any] = {}
        """First slot → what the forward of these samples has left, until the step is over."""

    def alone(self, slots: int) -> "Carried":
        """Return new state for `slots` slots on one rank, to try a step."""
        return Carried(self._carry, slots, World(), self._dtype, self._seed)

    def begin(self, first_step: int, size: int, step: int) -> None:
        """Lay out the rows for a step of `size` samples; all ranks call it.

        `first_step` is its place in the epoch, `step` that in the training.
        """
        if first_step == 0:
            self._begin_epoch(step)
        elif self._size == 0:
            raise UserError(
                "The checkpoint was made within an epoch without the carried state: an earlier "
                "version of the recipe had none. Start a new run instead.",
                on_all_ranks=True,
            )
        if size != self._size:
            self._lay_out(self.all_rows(), size)
        self._left = {}

    def _begin_epoch(self, step: int) -> None:
        more = {"carried": self.all_rows() if self._size else None} if self._keeps else {}
        with random_numbers(mix(self._seed, 2, step)):
            new = new_state(self._carry, self._slots, self._world.device, self._dtype, **more)
        where = defined_at(self._carry).strip(" ()")
        check_same_tensors(tree_leaves(new), self._world, "The first carried states", where=where)
        self._lay_out(new, self._slots)

    def _lay_out(self, whole: Any, size: int) -> None:
        held, world = held_parts(self._world), self._world
        spans = [part_of(range(size), part, world) for part in (held[0], held[-1])]
        self._size, self._first = size, spans[0].start
        number = spans[1].stop - self._first
        self._rows = map_leaves(torch.clone, narrow(whole, self._first, number))
        self._rest = map_leaves(torch.clone, narrow(whole, size, self._slots - size))

    def first_of(self, part: int) -> int:
        """Return the first slot of a rank's, or a virtual rank's, share of the step."""
        return part_of(range(self._size), part, self._world).start

    def new(self, rows: int) -> Any:
        """Return new state for `rows` rows, which is not kept."""
        return new_state(self._carry, rows, self._world.device, self._dtype)

    def rows(self, slots: range) -> Any:
        """Return the rows of some slots of this rank, in memory that a forward may write to."""
        return map_leaves(torch.clone, narrow(self._rows, slots.start - self._first, len(slots)))

    def leave(self, slots: range, tree: Any, who: Callable[[], str]) -> None:
        """Take what a forward has left of some slots, without its graph."""
        _check(tree, len(slots), who, "it must be")
        before, after = tree_leaves(self._rows), tree_leaves(tree)
        forms = [[tuple(leaf.shape[1:]) for leaf in leaves] for leaves in (before, after)]
        if forms[0] != forms[1]:
            raise UserError(
                f"{who()} {describe(tree)}: another shape than {describe(self.rows(slots))}. Each "
                f"row stays as carry={defined_at(self._carry)} made it."
            )
        pairs = zip(before, after, strict=True)
        leaves = iter([new.detach().to(old, copy=True) for old, new in pairs])
        self._left[slots.start] = map_leaves(lambda _: next(leaves), self._rows)

    def call(self, model: Callable[..., Any], part: Block) -> Any:
        """Return a model's outputs for a micro-step; keep the state that it leaves.

        Samples that only stand in begin with new state.
        """
        if not part.weight:
            return model(part.inputs)
        place = part.place if self._world.virtual_ranks else self._world.rank
        first = self.first_of(place) + part.first_row
        slots = range(first, first + part.rows)
        outputs, left = model(part.inputs, self.rows(slots))
        self.leave(slots, left, lambda: "The forward returned as carried state")
        return outputs

    @contextlib.contextmanager
    def around_step(self, block: Block, step: int) -> Iterator[None]:
        """Lay out the rows for a step of the training, and keep what it leaves."""
        self.begin(block.first_step, block.global_size, step)
        yield
        self.settle()

    def settle(self) -> None:
        """Keep what the step's forwards have left."""
        for first, tree in self._left.items():
            for old, new in zip(tree_leaves(self._rows), tree_leaves(tree), strict=True):
                old.narrow(0, first - self._first, len(new)).copy_(new)
        self._left = {}

    def all_rows(self) -> Any:
        """Return the rows of all slots; all ranks call it."""
        own = tree_leaves(self._rows)
        gathered = gather_rows(own, len(own[0]), self._world, "carried state").tensors
        pairs = zip(gathered, tree_leaves(self._rest), strict=True)
        joined = iter([torch.cat(pair) for pair in pairs])
        return map_leaves(lambda _: next(joined), self._rows)

    def state(self) -> Any:
        """Return the carried state for a checkpoint; all ranks call it."""
        return map_tensors(lambda leaf: leaf.cpu(), self.all_rows()) if self._size else None

    def load(self, saved: Any) -> None:
        """Continue from what a checkpoint holds, on any number of ranks."""
        if saved is None:
            return
        more = {"carried": None} if self._keeps else {}
        with random_numbers(0):
            new = new_state(self._carry, self._slots, self._world.device, self._dtype, **more)
        forms = [[tuple(x.shape) for x in tree_leaves(tree)] for tree in (saved, new)]
        if forms[0] != forms[1]:
            raise UserError(
                f"The checkpoint holds carried state {describe(saved)}, and carry="
                f"{defined_at(self._carry)} makes {describe(new)} now. Use the recipe of the run."
            )
        pairs = zip(tree_leaves(saved), tree_leaves(new), strict=True)
        leaves = iter([old.to(fresh) for old, fresh in pairs])
        self._lay_out(map_leaves(lambda _: next(leaves), new), self._slots)


def carried_of(carry: Carry, settings: Settings, plan: Plan, world: World) -> Carried:
    """Return the state that a training carries from step to step.

    Raises:
        UserError: a slot's samples do not follow each other.
    """
    if plan.is_stream:
        raise UserError(
            "Recipe(carry=…) needs training data of a known order, so that a slot's samples follow "
            "each other on any number of ranks; a stream has none. Give tensors or a map-style "
            "Dataset."
        )
    if settings.batch_tokens is not None:
        raise UserError(
            "Recipe(carry=…) does not go with --batch-tokens: a slot's samples follow each other, "
            "and steps have different numbers of samples. Give --batch-size."
        )
    dtype = data_dtype(settings.precision)
    return Carried(carry, plan.global_batch_size, world, dtype, settings.seed)
