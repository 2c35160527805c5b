"""Batches of any form: what is found in them, moved with them, and cut from them."""

from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep import UserError
from samestep.data import trees
from samestep.data.trees import check_rows, describe, map_leaves, narrow, num_rows, tree_leaves

Pair = namedtuple("Pair", ("inputs", "targets"))  # noqa: PYI024 - as users write it


class Encoding(UserDict):
    """As the batches of Hugging Face's tokenizers: a dict with more."""

    def __init__(self, data=None, words=None):
        super().__init__(data)
        self.words = words

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Text:
    tokens: Any
    lengths: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    tokens: Any
    lengths: Any


class Graph:
    """As `Data` and `Batch` of PyTorch Geometric: `apply` changes the graph itself."""

    def __init__(self, num_graphs=None, **parts):
        self.parts = parts
        if num_graphs is not None:
            self.num_graphs = num_graphs

    def __copy__(self):
        return Graph(getattr(self, "num_graphs", None), **self.parts)

    def apply(self, function):
        self.parts = {n: function(p) if isinstance(p, Tensor) else p for n, p in self.parts.items()}
        return self

    def to_dict(self):
        return self.parts

    def to(self, device):
        return self.apply(lambda tensor: tensor.to(device))


class Moves:
    """Nothing but `to`."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        return Moves(self.tensor.to(device))


ONE, OTHER = torch.arange(12.0).view(6, 2), torch.arange(6)
TREES = {
    "a list": [ONE, OTHER],
    "a named tuple": Pair(ONE, OTHER),
    "a dict with a default": defaultdict(list, a=ONE, b=OTHER),
    "an encoding": Encoding({"a": ONE, "b": OTHER}, words=["what", "else"]),
    "a dataclass": Text(ONE, OTHER),
    "a frozen dataclass with slots": Slotted(ONE, OTHER),
    "nested": {"a": (Slotted([ONE], Pair(OTHER, {})), ())},
    "a graph": Graph(x=ONE, y=OTHER),
    "graphs beside tensors": (Graph(x=ONE), OTHER),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_each_tensor_is_found_and_changed_in_a_tree_of_the_same_form(tree):
    assert describe(tree) == "(6, 2) float32, (6,) int64"
    changed = map_leaves(lambda leaf: leaf + 1, tree)
    assert type(changed) is type(tree)
    assert [leaf.sum() for leaf in tree_leaves(changed)] == [ONE.sum() + 12, OTHER.sum() + 6]
    assert all(a is b for a, b in zip(tree_leaves(tree), (ONE, OTHER), strict=True)), "unchanged"
    if isinstance(tree, dict | UserDict):
        assert list(changed) == list(tree)
    for more in ("words", "default_factory"):
        assert getattr(changed, more, None) == getattr(tree, more, None)


@pytest.mark.parametrize("tree", [*TREES.values(), ONE], ids=[*TREES, "a tensor"])
def test_rows_that_all_tensors_have_are_cut_as_views(tree):
    assert num_rows(tree) == 6
    check_rows(tree, 6)
    with pytest.raises(UserError, match="collate"):
        check_rows(tree, 5)
    for whole, part in zip(tree_leaves(tree), tree_leaves(narrow(tree, 2, 3)), strict=True):
        assert torch.equal(part, whole[2:5])
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    pieces = trees.split_rows(tree, 4)
    assert [num_rows(piece) for piece in pieces] == [4, 2]
    for place, whole in enumerate(tree_leaves(tree)):
        assert torch.equal(torch.cat([tree_leaves(piece)[place] for piece in pieces]), whole)


def test_of_a_graph_only_its_tensors_are_changed_and_its_graphs_are_its_rows():
    graph = Graph(x=ONE, name="ethanol", num_graphs=3)
    half = map_leaves(lambda leaf: leaf / 2, graph)
    assert graph.parts["x"] is ONE
    assert torch.equal(half.parts["x"], ONE / 2)
    assert (half.parts["name"], half.num_graphs) == ("ethanol", 3)
    assert num_rows(graph) == num_rows((graph, torch.zeros(3))) == 3
    assert num_rows((graph, OTHER)) is None


@pytest.mark.parametrize(
    "tree",
    [(ONE, torch.zeros(5)), torch.zeros(()), {}, "text", {"a": "text"}, Moves(ONE)],
    ids=["unequal", "a number", "nothing", "text", "texts", "only to"],
)
def test_where_tensors_disagree_or_there_is_none_the_rows_are_not_known(tree):
    assert num_rows(tree) is None


def test_what_is_not_looked_into_is_a_leaf():
    moved = Moves(ONE)
    tree = {"batch": moved, "names": ("a", None), "x": ONE}
    assert tree_leaves(tree)[:3] == [moved, "a", None]
    assert tree_leaves(Text) == [Text], "a class is no tree of its fields"
    same = trees.map_tensors(lambda tensor: tensor + 1, tree)
    assert same["batch"] is moved
    assert same["names"] == ("a", None)
    assert torch.equal(same["x"], ONE + 1)
    assert describe(tree) == "a Moves, a str, None, (6, 2) float32"
    with pytest.raises(UserError, match="a Moves"):
        check_rows(tree, 6)
