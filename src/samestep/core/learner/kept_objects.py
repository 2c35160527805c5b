"""Objects in an optimizer's state, such as GaLore's projections, as a checkpoint can hold them.

A file that is read with any object in it could run code. So a checkpoint has plain values: of an
object its class and attributes. It is made again, without a call of its code, only if its class is
of the optimizer's package, and is defined where the file says.
"""

import sys
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.trees import map_leaves, map_tensors, tree_leaves

_KIND, _HELD = "object of", "holds"
"""The two entries of a dict that stands for an object."""


def packed(optimizer: torch.optim.Optimizer) -> Any:
    """Return the state of one or several, with plain values in place of their packages' objects.

    One that is at two places, or shares a tensor, stays as it is: it would come back as two.
    """
    state, held = optimizer.state_dict(), [group["params"] for group in optimizer.param_groups]
    packages = _packages(optimizer)
    if not any(_package(type(leaf)) in packages for leaf in tree_leaves(state)):
        return state
    seen = {id(leaf) for leaf in tree_leaves([state, held]) if isinstance(leaf, Tensor)}
    return map_leaves(partial(_packed, packages=packages, seen=seen), state)


def unpacked(state: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return what `packed` began with; tensors in objects are put to where the parameters are."""
    devices = (p.device for group in optimizer.param_groups for p in group["params"])
    return _unpacked(state, _packages(optimizer), next(devices, None))


def _packages(optimizer: torch.optim.Optimizer) -> set[str]:
    members = getattr(optimizer, "optimizers", [optimizer])
    kinds = (kind for one in members for kind in type(one).__mro__[:-1])
    return {*map(_package, kinds)} - {"torch"}


def _packed(value: Any, packages: set[str], seen: set[int]) -> Any:
    kind, again = type(value), partial(_packed, packages=packages, seen=seen)
    if _class_of(f"{kind.__module__}:{kind.__qualname__}", packages) is None:
        return value
    if isinstance(value, Enum):
        inside, new = value.value, set[int]()
    else:
        inside = getattr(value, "__dict__", None)
        new = {id(value), *(id(leaf) for leaf in tree_leaves(inside) if isinstance(leaf, Tensor))}
    if inside is None or seen & new:
        return value
    seen |= new
    return {_KIND: f"{kind.__module__}:{kind.__qualname__}", _HELD: map_leaves(again, inside)}


def _class_of(text: str, packages: set[str]) -> Any:
    """Return a class by its module and name, if these packages define it; else None."""
    module, _, name = text.partition(":")
    if module.partition(".")[0] not in packages:
        return None
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    # An import in that module leads to any class; a finalizer would run with the file's values.
    defined = isinstance(kind, type) and f"{kind.__module__}:{kind.__qualname__}" == text
    plain = defined and (issubclass(kind, Enum) or kind.__new__ is object.__new__)
    return kind if plain and not hasattr(kind, "__del__") else None


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _unpacked(value: Any, packages: set[str], device: torch.device | None) -> Any:
    again = partial(_unpacked, packages=packages, device=device)
    if type(value) in (list, tuple):
        return type(value)(map(again, value))
    if type(value) is not dict:
        return value
    parts = {key: again(part) for key, part in value.items()}
    if parts.keys() != {_KIND, _HELD}:
        return parts
    kind, held = _class_of(str(value[_KIND]), packages), parts[_HELD]
    if kind is None or not (issubclass(kind, Enum) or isinstance(held, dict)):
        raise UserError(f"it holds an object of {value[_KIND]}, of another package")
    if issubclass(kind, Enum):
        return kind(held)
    made = object.__new__(kind)
    vars(made).update(map_tensors(lambda tensor: tensor.to(device), held))
    return made
