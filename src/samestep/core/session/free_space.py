"""Whether the disk has room for the checkpoints of a training that is about to start."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from samestep.base.trees import tree_leaves
from samestep.base.words import count, size
from samestep.core.training.joint import members_of

_FEW = 4
"""With room for fewer checkpoints a run says so when it starts."""
_COPIES = {"Adagrad": 1, "Adafactor": 0, "Lion": 1, "Muon": 1, "Rprop": 2}
"""How many numbers some optimizers keep for each weight, once they have taken a step."""
_USUAL_COPIES = 2


def state_bytes(
    modules: Iterable[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    more: Iterable[Tensor] = (),
) -> int:
    """Return about how many bytes a checkpoint of these takes, also before the first step.

    An optimizer that has no state yet counts as its class will have it: two numbers per weight
    unless known otherwise.
    """
    total = sum(map(_bytes, more))
    for module in modules:
        kept = {id(one): one for one in module.state_dict(keep_vars=True).values()}
        total += sum(_bytes(one) for one in kept.values() if isinstance(one, Tensor))
    for optimizer in (one for given in optimizers for one in members_of(given)):
        held = [leaf for state in optimizer.state.values() for leaf in tree_leaves(state)]
        total += sum(_bytes(leaf) for leaf in held if isinstance(leaf, Tensor))
        for group in optimizer.param_groups:
            new = [p for p in group["params"] if p.requires_grad and p not in optimizer.state]
            total += _copies(optimizer, group) * sum(map(_bytes, new))
    return total


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # of a sharded one, all parts


def _copies(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> int:
    """Return how many numbers an optimizer will keep for each weight of a group."""
    name = type(optimizer).__name__
    if name == "SGD":
        return int(bool(group["momentum"]))
    if name == "RMSprop":
        return 1 + bool(group["momentum"]) + bool(group["centered"])
    return _COPIES.get(name, _USUAL_COPIES) + bool(group.get("amsgrad"))


def room_notes(folder: Path, checkpoint_bytes: int) -> list[str]:
    """Return a note if few checkpoints of this size fit on the disk of a folder."""
    existing = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
    if existing is None or checkpoint_bytes <= 0:
        return []
    free = shutil.disk_usage(existing).free
    fitting = free // checkpoint_bytes
    if fitting >= _FEW:
        return []
    room = f"room for about {count(fitting, 'checkpoint')}" if fitting else "no room for one"
    sizes = f"A checkpoint takes about {size(checkpoint_bytes)}; {size(free)} are free"
    advice = "Free some space, choose another run directory, or keep fewer checkpoints."
    return [f"{sizes} in {existing}: {room}. {advice}"]
