"""What a training keeps that checkpoints do not hold, or that each rank makes of its own samples.

It is looked for before the first step, on a copy of the model and with a few samples.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.errors import UserError, defined_at, listed
from samestep.ranks.world import World
from samestep.training.buffers import keep_buffers
from samestep.training.side_effects import batch_norms, closure_prints, differing, kept_by


class Unkept(NamedTuple):
    """Names of what was found."""

    loss: tuple[str, ...] = ()
    """What the loss keeps by itself, and changes from call to call."""
    lost: tuple[str, ...] = ()
    """Buffers that training changes and `state_dict` leaves out."""
    of_rank: tuple[str, ...] = ()
    """Buffers, of several ranks, that are made of a rank's own samples."""

    def refuse(self, loss: object) -> None:
        """Refuse to resume a training with such a loss."""
        if self.loss:
            raise UserError(
                f"The recipe's loss{defined_at(loss)} changes {listed(self.loss, 3)} from call to "
                "call, and no checkpoint holds it: a resumed run would be another training. Let "
                "the loss name `step` or `epoch` among its arguments, and keep nothing itself; or, "
                "if no weight depends on it, add --no-self-check.",
                on_all_ranks=True,
            )

    def notes(self) -> list[str]:
        """Return what to tell before the first step."""
        found = {
            f"The loss changes {listed(self.loss, 3)} from call to call, and no checkpoint holds "
            "it: a resume will be refused. Let the loss name `step` or `epoch` among its "
            "arguments.": self.loss,
            f"Training changes the model's buffer {listed(self.lost, 3)}, and no checkpoint holds "
            "it: a resumed run begins with its first value. Register it with "
            "persistent=True.": self.lost,
            f"The model's buffer {listed(self.of_rank, 3)} is made of rank 0's own samples, so "
            "this is another training than on one rank. --virtual-ranks N makes it the same on "
            "any number of ranks.": self.of_rank,
        }
        return [note for note, names in found.items() if names]


def of_loss(
    loss: object, call: Callable[[Any, Any], Any], outputs: Any, targets: Any
) -> tuple[str, ...]:
    """Return what a loss keeps by itself, if that decides its value or is a number.

    Args:
        loss: the recipe's own.
        call: the same, as it is called.
        outputs: of the model, without a graph.
        targets: theirs.
    """
    values, prints, kept = [], [], []
    with contextlib.suppress(Exception):  # the first step tells how it fails
        for _ in range(2):
            values.append(float(call(outputs, targets)))
            prints.append(closure_prints(loss))
            kept.append(kept_by(loss))
    if len(kept) < 2 or not (changed := differing(*prints)):
        return ()
    counts = [f"the loss's {n}" for n, one in kept[1].items() if isinstance(one, int | float)]
    return tuple(
        name.removeprefix("the loss's ")
        for name in changed
        if values[0] != values[1] or name in counts
    )


def of_buffers(
    model: nn.Module, forward: Callable[[int], object], rows: int, world: World
) -> Mapping[str, tuple[str, ...]]:
    """Return the buffers that are lost, or made of a rank's own samples; `model` is a copy.

    `forward` calls it in training mode with that many samples, of which there are `rows`.
    """
    names = {n for n, _ in model.named_buffers()}
    lost = names - {*model.state_dict()}
    several = world.world_size > 1 and not world.virtual_ranks
    norms = tuple(f"{n}." if n else "" for n in batch_norms(model))
    made = {n for n in names if several and not (norms and n.startswith(norms))}
    if not (lost | made):
        return {}
    put_back = keep_buffers(model)
    seen: list[dict[str, Tensor]] = []

    def look(samples: int) -> None:
        forward(samples)
        seen.append({n: b.detach().clone() for n, b in model.named_buffers()})

    with contextlib.suppress(Exception):  # the first step tells how it fails
        look(rows)
        look(rows)
        put_back()
        look(max(1, rows // 2))
    if len(seen) < 3:
        return {}
    first, again, half = seen

    def apart(other: dict[str, Tensor], among: set[str]) -> tuple[str, ...]:
        pairs = {n: (first[n], other[n]) for n in first if n in among and n in other}
        return tuple(
            n for n, (a, b) in pairs.items() if a.shape == b.shape and not torch.equal(a, b)
        )

    floats = {n for n in made if n in first and first[n].is_floating_point()}
    return {"lost": apart(again, lost), "of_rank": apart(half, floats)}
