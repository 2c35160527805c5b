"""What a training keeps that checkpoints do not hold, or that each rank makes of its own samples.

It is looked for before the first step, on a copy of the model and with a few samples.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.trees import map_tensors, num_rows, tree_leaves
from samestep.core.training.alike import random_numbers
from samestep.core.training.side_effects import (
    batch_norms,
    closure_prints,
    differing,
    forward_prints,
    keep_buffers,
    kept_by,
)
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World

_CALLS = 3
"""The first may fill what later ones only read."""
_ROWS = 8
"""Samples of a batch of the user's that are tried."""


class Unkept(NamedTuple):
    """Names of what was found."""

    loss: tuple[str, ...] = ()
    """What the loss keeps by itself, and changes from call to call."""
    lost: tuple[str, ...] = ()
    """Buffers that training changes and `state_dict` leaves out."""
    of_rank: tuple[str, ...] = ()
    """Buffers, of several ranks, that are made of a rank's own samples."""
    forward: tuple[str, ...] = ()
    """What a model keeps besides parameters and buffers, and its outputs depend on."""

    def refuse(self, loss: object, model: object = None) -> None:
        """Refuse to resume a training with such a loss, or such a model."""
        if self.forward:
            raise UserError(
                f"The recipe's model{defined_at(model)} changes {listed(self.forward, 3)} from "
                "call to call, and no checkpoint holds it: a resumed run would be another "
                "training. Let a buffer or get_extra_state hold it; or, if no weight depends on "
                "it, add --no-self-check.",
                on_all_ranks=True,
            )
        if self.loss:
            raise UserError(
                f"The recipe's loss{defined_at(loss)} changes {listed(self.loss, 3)} from call to "
                "call, and no checkpoint holds it: a resumed run would be another training. Let "
                "the loss name `step` or `epoch` among its arguments, and keep nothing itself; or, "
                "if no weight depends on it, add --no-self-check.",
                on_all_ranks=True,
            )

    def notes(self, remedy: str) -> list[str]:
        """Return what to tell before the first step; `remedy` is for buffers of one rank."""
        names_by_note = {
            f"The loss changes {listed(self.loss, 3)} from call to call, and no checkpoint holds "
            "it: a resume will be refused. Let the loss name `step` or `epoch` among its "
            "arguments.": self.loss,
            f"A forward in training changes {listed(self.forward, 3)}, and no checkpoint holds it: "
            "a resume will be refused. Let a buffer or get_extra_state hold it.": self.forward,
            f"Training changes the model's buffer {listed(self.lost, 3)}, and no checkpoint holds "
            "it: a resumed run begins with its first value. Register it with "
            "persistent=True.": self.lost,
            f"The model's buffer {listed(self.of_rank, 3)} is made of rank 0's own samples, so "
            f"this is another training than on one rank. {remedy}": self.of_rank,
        }
        return [note for note, names in names_by_note.items() if names]


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
    counts = [f"the loss's {n}" for n, value in kept[1].items() if isinstance(value, int | float)]
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
    lost, own = _watched(model, world)
    if not (lost | own):
        return {}
    put_back = keep_buffers(model)
    seen: list[dict[str, Tensor]] = []

    def run(samples: int) -> None:
        forward(samples)
        seen.append({n: b.detach().clone() for n, b in model.named_buffers()})

    with contextlib.suppress(Exception):  # the first step tells how it fails
        run(rows)
        run(rows)
        put_back()
        run(max(1, rows // 2))
    if len(seen) < 2:
        return {}
    first, again, half = seen[0], seen[1], seen[-1]

    def apart(other: dict[str, Tensor], among: set[str]) -> tuple[str, ...]:
        pairs = {n: (first[n], other[n]) for n in first if n in among and n in other}
        return tuple(
            n for n, (a, b) in pairs.items() if a.shape == b.shape and not torch.equal(a, b)
        )

    floats = {n for n in own if n in first and first[n].is_floating_point() and half is not again}
    return {"lost": apart(again, lost), "of_rank": apart(half, floats)}


def of_forward(
    model: nn.Module, function: object, forward: Callable[[int], object], rows: int
) -> tuple[str, ...]:
    """Return what a copy of a model keeps that decides its outputs; `function` is the recipe's."""
    put_back = keep_buffers(model)
    outputs_seen: list[list[Any]] = []
    prints: list[dict[str, str]] = []

    def run() -> None:
        put_back()
        with random_numbers(0):
            outputs = forward(rows)
        outputs_seen.append([t.clone() for t in tree_leaves(outputs) if isinstance(t, Tensor)])
        prints.append(forward_prints(model, function))

    with contextlib.suppress(Exception):  # the first step tells how it fails
        run()
        run()
        if differing(*prints):  # the first call may fill what later ones only read
            run()
    if len(outputs_seen) < 3 or all(map(torch.equal, outputs_seen[1], outputs_seen[2])):
        return ()
    return tuple(n.removeprefix("the model's ") for n in differing(prints[1], prints[2]))


def _watched(model: nn.Module, world: World) -> tuple[set[str], set[str]]:
    """Return the buffers that could be lost, and those that a rank may make of its own samples."""
    names = {n for n, _ in model.named_buffers()}
    several = world.world_size > 1 and not world.virtual_ranks
    norms = tuple(f"{n}." if n else "" for n in batch_norms(model))
    own = {n for n in names if several and not (norms and n.startswith(norms))}
    return names - {*model.state_dict()}, own


def at_first_forward(model: nn.Module, world: World, note: Callable[[Unkept], None]) -> None:
    """Let `note` know what `of_buffers` finds, as soon as a loop of the user's trains a model.

    Every rank does as much then, in case its forward is a collective.
    """
    if not any(_watched(model, world)) or any_sharded(model):
        return

    def at_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        hook.remove()
        rows = num_rows([args, kwargs])
        with contextlib.suppress(Exception), torch.no_grad(), random_numbers(0, world.device):
            twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})

            def forward(samples: int) -> None:
                def cut(tensor: Tensor) -> Tensor:
                    return tensor[:samples] if tensor.dim() and len(tensor) == rows else tensor

                given, named = map_tensors(cut, [args, kwargs])
                twin(*given, **named)

            note(Unkept(**of_buffers(twin, forward, min(rows or 1, _ROWS), world)))
        torch.clear_autocast_cache()  # older PyTorch kept casts made without gradients

    hook = model.register_forward_pre_hook(at_forward, with_kwargs=True)


def count_of_calls(model: nn.Module, note: Callable[[list[str]], None]) -> None:
    """Let `note` know the numbers that the first forwards of a user's loop count in attributes."""
    seen: list[dict[str, Any]] = []
    plain = nn.Module.get_extra_state
    counting = [(n, m) for n, m in model.named_modules() if type(m).get_extra_state is plain]

    def after_forward(*_: Any) -> None:
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
            return
        seen.append(
            {
                f"{name}.{attribute}" if name else attribute: value
                for name, module in counting
                for attribute, value in vars(module).items()
                if isinstance(value, int | float) and attribute[0] != "_"
            }
        )
        if len(seen) == _CALLS:
            hook.remove()
            before, after = seen[-2:]
            if changed := [n for n, value in after.items() if repr(before.get(n)) != repr(value)]:
                note(changed)

    hook = model.register_forward_pre_hook(after_forward)
