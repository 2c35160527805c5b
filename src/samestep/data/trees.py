"""Trees of tensors: a batch may be one tensor, or tuples, lists and dicts of several.

PyTorch's own trees are used, which are private; this is the one module that asks for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree


def tree_leaves(tree: Any) -> list[Any]:
    """Return what is in a tree, in a fixed order."""
    return [tree] if isinstance(tree, Tensor) else _pytree.tree_leaves(tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same form, with what a function makes of each leaf."""
    return function(tree) if isinstance(tree, Tensor) else _pytree.tree_map(function, tree)


def narrow(tree: Any, start: int, length: int) -> Any:
    """Return rows [start, start + length) of each tensor of a tree, as views."""
    return map_leaves(lambda leaf: leaf.narrow(0, start, length), tree)


def split_rows(tree: Any, rows: int) -> Sequence[Any]:
    """Return consecutive pieces of so many rows of each tensor of a tree, as views."""
    if isinstance(tree, Tensor):
        return torch.split(tree, rows)
    tensors, form = _pytree.tree_flatten(tree)
    pieces = zip(*(torch.split(leaf, rows) for leaf in tensors), strict=True)
    return [_pytree.tree_unflatten(piece, form) for piece in pieces]
