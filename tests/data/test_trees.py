"""Batches of any form: what is found in them, moved with them, and cut from them."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from samestep import UserError
from samestep.data.trees import (
    check_rows,
    describe,
    map_leaves,
    map_tensors,
    narrow,
    num_rows,
    split_rows,
    tree_leaves,
)

Pair = namedtuple("Pair", ("inputs", "targets"))  # noqa: PYI024 - as users write it


class Encoding(UserDict):
    """As the batches of Hugging Face's tokenizers: a dict with more, and with `to`."""

    def __init__(self, data=None, words=None):
        super().__init__(data)
        self.words = words

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device):
        self.data = {name: part.to(device) for name, part in self.data.items()}
        return self


@dataclass
class Text:
    tokens: Any
    lengths: Any


@dataclass(frozen=True)
class Frozen:
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


def one():
    return torch.arange(12.0).view(6, 2)


def other():
    return torch.arange(6)


TREES = {
    "tensors": lambda: (one(), other()),
    "a list": lambda: [one(), other()],
    "a named tuple": lambda: Pair(one(), other()),
    "a dict": lambda: {"a": one(), "b": other()},
    "an ordered dict": lambda: OrderedDict(a=one(), b=other()),
    "a dict with a default": lambda: defaultdict(list, a=one(), b=other()),
    "an encoding": lambda: Encoding({"a": one(), "b": other()}, words=["what", "else"]),
    "a dataclass": lambda: Text(one(), other()),
    "a frozen dataclass": lambda: Frozen(one(), other()),
    "a dataclass with slots": lambda: Slotted(one(), other()),
    "nested": lambda: {"a": (Frozen([one()], Pair(other(), {})), ())},
    "a graph": lambda: Graph(x=one(), y=other()),
    "graphs beside tensors": lambda: (Graph(x=one()), other()),
}
DICTS = ("a dict", "an ordered dict", "a dict with a default", "an encoding")


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_each_tensor_is_found_and_changed_in_a_tree_of_the_same_form(make):
    tree = make()
    assert describe(tree) == "(6, 2) float32, (6,) int64"
    doubled = map_leaves(lambda leaf: leaf * 2, tree)
    assert type(doubled) is type(tree)
    for before, after, given in zip(
        tree_leaves(make()), tree_leaves(doubled), tree_leaves(tree), strict=True
    ):
        assert torch.equal(after, before * 2)
        assert torch.equal(given, before), "the tree that was given is as it was"


@pytest.mark.parametrize("make", [*TREES.values(), one], ids=[*TREES, "a tensor"])
def test_rows_that_all_tensors_have_are_cut_as_views(make):
    tree = make()
    assert num_rows(tree) == 6
    check_rows(tree, 6)
    with pytest.raises(UserError, match="collate"):
        check_rows(tree, 5)
    for whole, part in zip(tree_leaves(tree), tree_leaves(narrow(tree, 2, 3)), strict=True):
        assert torch.equal(part, whole[2:5])
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    pieces = split_rows(tree, 4)
    assert [num_rows(piece) for piece in pieces] == [4, 2]
    for place, whole in enumerate(tree_leaves(tree)):
        assert torch.equal(torch.cat([tree_leaves(piece)[place] for piece in pieces]), whole)


@pytest.mark.parametrize("name", DICTS)
def test_a_dict_keeps_its_keys_in_their_order_and_what_else_it_has(name):
    tree = map_leaves(lambda leaf: leaf + 1, TREES[name]())
    assert list(tree) == ["a", "b"]
    assert getattr(tree, "words", ["what", "else"]) == ["what", "else"]
    assert getattr(tree, "default_factory", list) is list


def test_of_a_graph_only_its_tensors_are_changed_and_its_graphs_are_its_rows():
    graph = Graph(x=one(), name="ethanol", num_graphs=3)
    half = map_leaves(lambda leaf: leaf / 2, graph)
    assert half is not graph
    assert torch.equal(graph.parts["x"], one())
    assert torch.equal(half.parts["x"], one() / 2)
    assert (half.parts["name"], half.num_graphs) == ("ethanol", 3)
    assert num_rows(graph) == num_rows((graph, torch.zeros(3))) == 3
    assert num_rows((graph, other())) is None


@pytest.mark.parametrize(
    "tree",
    [(one(), torch.zeros(5)), torch.zeros(()), {}, (), None, "text", {"a": "text"}, Moves(one())],
    ids=["unequal", "a number", "an empty dict", "nothing", "None", "text", "texts", "only to"],
)
def test_where_tensors_disagree_or_there_is_none_the_rows_are_not_known(tree):
    assert num_rows(tree) is None


def test_what_is_not_looked_into_is_a_leaf():
    moved = Moves(one())
    tree = {"batch": moved, "names": ("a", None), "x": one()}
    assert tree_leaves(tree)[:3] == [moved, "a", None]
    assert tree_leaves(Text) == [Text], "a class is no tree of its fields"
    same = map_tensors(lambda tensor: tensor + 1, tree)
    assert same["batch"] is moved
    assert same["names"] == ("a", None)
    assert torch.equal(same["x"], one() + 1)
    assert describe(tree) == "a Moves, a str, None, (6, 2) float32"
    with pytest.raises(UserError, match="a Moves"):
        check_rows(tree, 6)
