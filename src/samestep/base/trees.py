"""Trees of tensors: a batch may be one tensor, or any nesting of them.

Tuples, lists, mappings and dataclasses are looked into; so are graphs of PyTorch Geometric and what
else has `apply` and `to_dict`. Anything else is a leaf: it goes to a device if it has `to`.
"""

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.base.errors import UserError

_SINGLE = frozenset([Tensor, str, bytes, int, float, bool, type(None)])
"""Types that are leaves without a look at what they offer."""


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree in a fixed order."""
    if type(tree) in _SINGLE or isinstance(tree, Tensor):
        return [tree]
    inside = _inside(tree)
    return [tree] if inside is None else [leaf for part in inside for leaf in tree_leaves(part)]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same form, with what a function makes of each leaf.

    Of a graph only its tensors are leaves.
    """
    if type(tree) in _SINGLE or isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple | list):
        parts = [map_leaves(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    each = partial(map_leaves, function)
    if _is_graph(tree):
        return copy.copy(tree).apply(function)
    if isinstance(tree, dict | UserDict):
        same = copy.copy(tree)  # a subclass, as of tokenizers, has more than its items
        for key, part in tree.items():
            same[key] = each(part)
        return same
    if _is_dataclass(tree):
        same = copy.copy(tree)
        for field in dataclasses.fields(tree):
            object.__setattr__(same, field.name, each(getattr(tree, field.name)))
        return same
    return function(tree)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree of the same form, with what a function makes of each tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def narrow(tree: Any, start: int, length: int) -> Any:
    """Return rows [start, start + length) of each tensor of a tree, as views."""
    return map_leaves(lambda leaf: leaf.narrow(0, start, length), tree)


def split_rows(tree: Any, rows: int) -> Sequence[Any]:
    """Return consecutive pieces of `rows` rows of each tensor of a tree, as views."""
    length = len(tree_leaves(tree)[0])
    return [narrow(tree, start, min(rows, length - start)) for start in range(0, length, rows)]


def num_rows(tree: Any) -> int | None:
    """Return the rows that all tensors of a batch have, or the graphs of one; None if unclear."""
    if isinstance(tree, Tensor):
        return len(tree) if tree.dim() else None
    if type(tree) in _SINGLE:
        return None
    graphs = getattr(tree, "num_graphs", None)
    if isinstance(graphs, int):
        return graphs
    inside = _inside(tree) or ()
    numbers = {rows for part in inside if (rows := num_rows(part)) is not None}
    return numbers.pop() if len(numbers) == 1 else None


def has_packed(tree: Any) -> bool:
    """Whether a batch holds a PackedSequence, whose rows are those of no sample."""
    return isinstance(tree, PackedSequence) or any(map(has_packed, _inside(tree) or ()))


def describe(tree: Any) -> str:
    """Return shapes and types of the tensors of a tree, for a message."""
    groups = groupby(map(_describe_leaf, tree_leaves(tree)))
    counted = [(leaf, len(list(group))) for leaf, group in groups]
    leaves = ", ".join(leaf if number == 1 else f"{number} × {leaf}" for leaf, number in counted)
    return leaves or type(tree).__name__


def check_rows(tree: Any, rows: int) -> None:
    """Check that every tensor of a batch has a row for each sample, so that it can be cut."""
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != rows:
            raise UserError(
                f"A batch of {rows} samples holds {describe(leaf)}, which has no row for each "
                "sample, so it cannot be cut into micro-steps. Give the recipe a collate, which "
                "puts each micro-step together by itself, or choose a --batch-size that takes all "
                "samples of a rank at once, without --accumulate."
            )


def _inside(tree: Any) -> list[Any] | None:
    """Return the direct children of a tree, or None for a leaf."""
    if isinstance(tree, tuple | list):
        return list(tree)
    if isinstance(tree, Mapping):
        return list(tree.values())
    if _is_dataclass(tree):
        return [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    return [tree.to_dict()] if _is_graph(tree) else None


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)


def _is_graph(tree: Any) -> bool:
    """Whether it offers what `Data`, `HeteroData` and `Batch` of PyTorch Geometric do."""
    return all(callable(getattr(tree, name, None)) for name in ("apply", "to_dict", "to"))


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
    return "None" if leaf is None else f"a {type(leaf).__name__}"


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the backward of a loss gives a gradient to."""
    nodes, visited = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]


def real_parts(tensor: Tensor) -> Tensor:
    """Return a complex tensor as its real and imaginary parts, and any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
