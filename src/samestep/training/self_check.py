"""Whether virtual ranks can keep their promise: a rank's first share is computed a second time.

After the others, with the same samples, weights, buffers and random numbers, and as if there were
no other ranks, it has to give the same bits and to leave the same behind. Otherwise something
counts the shares that a rank computes, or asks for the ranks or the clock.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from samestep.data.blocks import Block
from samestep.errors import UserError, defined_at, listed
from samestep.ranks.world import as_if_alone
from samestep.training.alike import bits_of
from samestep.training.hidden_state import (
    Prints,
    closure_prints,
    differing,
    model_prints,
    optimizer_prints,
)
from samestep.training.step import Trainee
from samestep.training.tree_reduce import Tensors

_DEPENDS = "so the weights would depend on the number of ranks"
_OR = "or, if no weight depends on it, add --no-self-check"


class SelfCheck:
    """Check what the first step of a process computes, and how its optimizer goes on.

    Args:
        trainee: what is trained.
        own: whether the optimizer is one of the user's.
    """

    def __init__(self, trainee: Trainee, *, own: bool) -> None:
        self._trainee, self._own = trainee, own
        self._kept: tuple[int, tuple[Block, ...]] | None = None
        self._bits: torch.Tensor | None = None
        self._prints: tuple[Prints, Prints] = ({}, {})
        self._updates: list[Prints] = []

    def keep(self, part: int, micro_steps: Sequence[Block]) -> None:
        """Keep the samples of the first share before it is computed: forward may write to them."""
        if self._kept is None:
            held = copy.deepcopy([(m.inputs, m.targets) for m in micro_steps])
            both = zip(micro_steps, held, strict=True)
            self._kept = part, tuple(replace(m, inputs=i, targets=t) for m, (i, t) in both)

    def take(self, share: Tensors) -> None:
        """Take what the first share gave, before anything is added to it."""
        if self._bits is None:
            self._bits, self._prints = bits_of(share), self._print()

    def repeat(self, compute: Callable[[int, Sequence[Block]], Tensors]) -> None:
        """Compute the first share again and compare.

        Raises:
            UserError: it gives other bits, or leaves other values in plain attributes.
        """
        if self._kept is None or self._bits is None:
            return  # this rank has no samples in this step
        part, micro_steps = self._kept
        with as_if_alone():
            alone = bits_of(compute(part, copy.deepcopy(micro_steps)))
        pairs = zip(self._prints, self._print(), strict=True)
        attributes, closure = (differing(one, other) for one, other in pairs)
        same = torch.equal(alone, self._bits)
        named = attributes if same else attributes + closure
        if named:
            raise UserError(
                f"--virtual-ranks: each forward changes {listed(named, 1)}, and a rank computes as "
                f"many forwards as it has virtual ranks, {_DEPENDS}. Keep it in a buffer that each "
                f"forward of a training step writes (register_buffer), {_OR}."
            )
        if not same:
            again = torch.equal(bits_of(compute(part, micro_steps)), self._bits)
            what = (
                "asks for its rank or for the number of ranks"
                if again
                else "keeps something outside the model (a list, a global variable), reads the "
                "clock, or draws from a generator other than the global ones of torch, Python and "
                "NumPy"
            )
            raise UserError(
                "--virtual-ranks: the same samples, weights and random numbers gave different "
                f"gradients the second time, {_DEPENDS}. Probably the model"
                f"{defined_at(*self._trainee.makers[:1])} or the loss"
                f"{defined_at(self._trainee.loss)} {what}. Remove that, or leave out "
                "--virtual-ranks."
            )
        self._kept, self._prints = None, ({}, {})

    def after_update(self) -> bool:
        """Compare what the optimizer keeps after the first update and after the second.

        Returns:
            Whether there is nothing more to check.

        Raises:
            UserError: it keeps state that no checkpoint holds.
        """
        if not self._own:
            return True
        self._updates.append(optimizer_prints(self._trainee.optimizer))
        if len(self._updates) < 2:
            return False
        if named := differing(*self._updates):
            raise UserError(
                f"--virtual-ranks: each step changes {named[0]}, which checkpoints do not hold: a "
                "run that goes on would have other weights. Keep it in self.state[parameter], "
                f"{_OR}.",
                on_all_ranks=True,
            )
        return True

    def _print(self) -> tuple[Prints, Prints]:
        loss = self._trainee.loss
        return model_prints(self._trainee.model, loss), closure_prints(loss)
