"""Trees of tensors: a batch may be one tensor, or tuples, lists and dicts of several.

PyTorch's own trees are used, which are private; this is the one module that asks for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from samestep.errors import UserError


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


def describe(tree: Any) -> str:
    """Return shapes and types of the tensors of a tree, for a message."""
    return ", ".join(map(_describe_leaf, tree_leaves(tree))) or type(tree).__name__


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"


def check_rows(tree: Any, rows: int) -> None:
    """Check that every tensor of a batch has a row for each sample, so that it can be cut.

    Raises:
        UserError: one has not.
    """
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != rows:
            raise UserError(
                f"A batch of {rows} samples holds {describe(leaf)}, which has no row for each "
                "sample, so it cannot be cut into micro-steps. Choose a --batch-size that takes "
                "all samples of a rank at once, without --accumulate."
            )
