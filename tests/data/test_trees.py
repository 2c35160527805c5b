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
CLASSES = ("a dataclass", "a frozen dataclass", "a dataclass with slots")


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_each_tensor_is_found_and_changed_in_a_tree_of_the_same_form(make):
    tree = make()
    assert [tuple(leaf.shape) for leaf in tree_leaves(tree)] == [(6, 2), (6,)]
    doubled = map_leaves(lambda leaf: leaf * 2, tree)
    assert type(doubled) is type(tree)
    for before, after, given in zip(
        tree_leaves(make()), tree_leaves(doubled), tree_leaves(tree), strict=True
    ):
        assert torch.equal(after, before * 2)
        assert torch.equal(given, before), "the tree that was given is as it was"


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_rows_are_cut_as_views_and_together_are_all_of_them(make):
    tree = make()
    for whole, part in zip(tree_leaves(tree), tree_leaves(narrow(tree, 2, 3)), strict=True):
        assert torch.equal(part, whole[2:5])
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    pieces = split_rows(tree, 4)
    assert [num_rows(piece) for piece in pieces] == [4, 2]
    for place, whole in enumerate(tree_leaves(tree)):
        assert torch.equal(torch.cat([tree_leaves(piece)[place] for piece in pieces]), whole)


@pytest.mark.parametrize("make", TREES.values(), ids=TREES)
def test_rows_are_those_that_all_tensors_have(make):
    assert num_rows(make()) == 6
    assert describe(make()) == "(6, 2) float32, (6,) int64"
    check_rows(make(), 6)
    with pytest.raises(UserError, match="collate"):
        check_rows(make(), 5)


@pytest.mark.parametrize("name", DICTS)
def test_a_dict_keeps_its_keys_in_their_order_and_what_else_it_has(name):
    tree = map_leaves(lambda leaf: leaf + 1, TREES[name]())
    assert list(tree) == ["a", "b"]
    assert getattr(tree, "words", ["what", "else"]) == ["what", "else"]
    assert getattr(tree, "default_factory", list) is list


@pytest.mark.parametrize("name", CLASSES)
def test_a_dataclass_keeps_its_names(name):
    tree = map_leaves(lambda leaf: leaf + 1, TREES[name]())
    assert torch.equal(tree.tokens, one() + 1)
    assert torch.equal(tree.lengths, other() + 1)


def test_a_graph_is_not_changed_and_only_its_tensors_are_leaves():
    graph = Graph(x=one(), name="ethanol", num_graphs=3)
    half = map_leaves(lambda leaf: leaf / 2, graph)
    assert half is not graph
    assert torch.equal(graph.parts["x"], one())
    assert torch.equal(half.parts["x"], one() / 2)
    assert half.parts["name"] == "ethanol"
    assert half.num_graphs == 3


def test_rows_of_a_batch_of_graphs_are_its_graphs():
    graphs = Graph(x=one(), num_graphs=3)
    assert num_rows(graphs) == 3
    assert num_rows((graphs, torch.zeros(3))) == 3
    assert num_rows((graphs, other())) is None


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
    same = map_tensors(lambda tensor: tensor + 1, tree)
    assert same["batch"] is moved
    assert same["names"] == ("a", None)
    assert torch.equal(same["x"], one() + 1)
    assert describe(tree) == "a Moves, a str, None, (6, 2) float32"
    with pytest.raises(UserError, match="a Moves"):
        check_rows(tree, 6)


def test_a_class_is_no_tree_of_its_fields():
    assert tree_leaves(Text) == [Text]


def test_a_tensor_is_its_own_leaf():
    tensor = one()
    assert tree_leaves(tensor)[0] is tensor
    assert [len(piece) for piece in split_rows(tensor, 4)] == [4, 2]
    assert num_rows(tensor) == 6
