"""A recipe's collate holds each sample once; a worker sends the batch as it was collated."""

import importlib
import re
from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samestep.base import trees
from samestep.base.errors import UserError
from samestep.core.data.collating import Collating, Packed, name_of
from samestep.core.data.recipe_data import open_source
from samestep.core.recipe import find_recipe
from samestep.launch.ranks.world import World

EXAMPLES = Path(__file__).parents[2] / "examples"


def texts(*lengths):
    return [(torch.full((length,), place), place) for place, length in enumerate(lengths)]


TEXTS = texts(3, 1, 4, 2, 5)
WRAPPERS = {
    "torch": "core.data.recipe_data.Unpacked",
    "transformers": "bridges.huggingface.trainer_recipe._MapStyle",
    "lightning": "bridges.lightning.brought._Data",
}


class Own(list):  # a data set with another one inside, as of Hugging Face
    dataset = ()

    def __init__(self):
        super().__init__(range(2))


def padded(samples):
    words, classes = zip(*samples, strict=True)
    return pad_sequence(words, batch_first=True), torch.tensor(classes)


def padded_by_column(samples):
    words, _classes = zip(*samples, strict=True)
    return pad_sequence(words), pad_sequence([word.flip(0) for word in words])


def packed(samples):
    words, _classes = zip(*samples, strict=True)
    return torch.cat(words), torch.cat(words)


def packed_in_blocks(samples):
    words = torch.cat([words for words, _ in samples])
    block = torch.nn.functional.pad(words, (0, -len(words) % 8))
    return block, block


def collate(function, samples, *, whole=True):
    return Collating(samples, function, whole=whole)(samples)


WHOLE = [padded, padded_by_column, packed, packed_in_blocks]
# Of single words a batch may have as many rows as samples, though they are put behind each other.
LENGTHS = [(3, 1, 4, 2, 5), (1, 3, 4, 2), (1, 1, 1, 2, 1), (1, 2), (2, 2), (7,), (1,)]


@pytest.mark.parametrize("package", WRAPPERS)
def test_a_data_set_that_is_wrapped_here_is_named_as_the_user_s(package):
    pytest.importorskip(package)
    module, _, name = f"samestep.{WRAPPERS[package]}".rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    own, wrapped = Own(), kind.__new__(kind)
    object.__setattr__(wrapped, "dataset", own)
    assert (name_of(wrapped), len(wrapped)) == (name_of(own), 2)
    assert "data set Own (" in name_of(own)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("function", WHOLE)
def test_a_batch_of_all_samples_is_taken_in_whatever_form(function, lengths):
    samples = texts(*lengths)
    collating = Collating(samples, function, whole=True)
    for _ in range(2):
        batch, nothing = collating(samples)
        assert nothing is None
        torch.testing.assert_close(batch, function(samples))


def without_long_ones(samples):
    return padded([sample for sample in samples if len(sample[0]) < 4])


WRONG = [
    (without_long_ones, "leaves out 2 of 5"),
    (lambda some: padded([*some, some[0]]), "adds 1 of 5"),
]


@pytest.mark.parametrize(("function", "told"), WRONG)
def test_samples_that_are_dropped_or_come_twice_are_counted(function, told):
    with pytest.raises(UserError) as raised:
        collate(function, TEXTS)
    message = str(raised.value)
    assert told in message
    assert f"{__file__}:{function.__code__.co_firstlineno}" in message


def test_a_collate_is_called_once_for_a_batch_with_a_row_a_sample_or_of_graphs():
    calls = []

    def counted(samples):
        calls.append(len(samples))
        return without_long_ones(samples)

    collating = Collating(TEXTS, counted, whole=True)
    for _ in range(3):
        collating(texts(3, 1, 2))
    assert calls == [3, 3, 3]
    with pytest.raises(UserError, match="leaves out 2 of 5"):  # also of a later batch
        collating(TEXTS)

    class Batch:
        def __init__(self, samples):
            self.words = padded(samples)

        def to(self, device):
            return self

    class Graphs(Batch):
        def __init__(self, samples):
            super().__init__(samples)
            self.num_graphs = len(samples)

    batch, nothing = collate(Batch, TEXTS)
    assert (type(batch), nothing, trees.num_rows(batch)) == (Batch, None, None)
    assert collate(Graphs, TEXTS)[0].num_graphs == 5
    with pytest.raises(UserError, match="leaves out 1 of 5"):
        collate(lambda samples: Graphs(samples[1:]), TEXTS)


def test_what_collate_can_make_no_batch_of_or_fails_at_is_told():
    with pytest.raises(UserError, match="no tensor") as raised:
        collate(lambda samples: ([words.tolist() for words, _ in samples], None), TEXTS)
    assert __file__ in str(raised.value)
    with pytest.raises(UserError, match="collate"):
        collate(None, TEXTS, whole=False)
    x, reading = torch.zeros(4, 2), {"seed": 1, "dtype": torch.float32, "num_workers": 0}
    with pytest.raises(UserError):
        open_source((x, x), World(), collate=list, **reading)
    with pytest.raises(UserError) as raised:
        collate(failing, TEXTS)
    message = str(raised.value)
    assert f"{__file__}:{failing.__code__.co_firstlineno + 1}" in message
    assert "5 samples" in message
    assert "(3,) int64" in message


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (lambda samples: padded(samples)[0], "(5, 5) int64"),
        (lambda samples: {"words": padded(samples)[0]}, "'words'"),
        (lambda samples: (*padded(samples), None), "3 values"),
    ],
    ids=["a tensor", "a dict", "three"],
)
def test_without_a_forward_a_batch_has_to_be_a_pair(function, shown):
    with pytest.raises(UserError, match=re.escape(shown)) as raised:
        collate(function, TEXTS, whole=False)
    assert "forward" in str(raised.value)
    batch, _ = collate(function, TEXTS, whole=True)
    torch.testing.assert_close(batch, function(TEXTS))


def failing(samples):
    return torch.stack([words for words, _ in samples])


@dataclass
class Text:
    tokens: Any
    lengths: Any


def all_kinds() -> dict[str, Any]:
    padded = torch.arange(12.0).view(3, 4)
    return {
        "types": [torch.ones(3, dtype=d) for d in (torch.bool, torch.int8, torch.complex64)],
        "forms": (torch.tensor(7), torch.zeros(0, 3), torch.tensor(float("nan"))),
        "views": {"words": padded[:, :-1], "following": padded[:, 1:], "whole": padded},
        "other layouts": Text([padded.T, nn.Parameter(padded)], "b"),
        "twice": [padded, padded],
        "none": (None, 3, "text"),
    }


def same_tensors(found: Any, tree: Any) -> None:
    for one, other in zip(trees.tree_leaves(found), trees.tree_leaves(tree), strict=True):
        if isinstance(other, torch.Tensor):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("example", ["padded_text", "graphs"])
def test_what_workers_collate_is_what_one_process_collates(example):
    recipe = find_recipe(str(EXAMPLES / f"{example}.py"))
    data = recipe.load_data(recipe.make_options()).train
    how = {"seed": 1, "dtype": torch.float64, "collate": recipe.collate, "whole": True}
    read = []
    for num_workers in (0, 2):
        source = open_source(data, World(), num_workers=num_workers, **how)
        blocks = source.blocks(0, 0, global_batch=61, drop_last=False)
        read.append([part.inputs for block in blocks for part in block.parts])
        source.close()
    same_tensors(*read)


Pair = namedtuple("Pair", ("inputs", "targets"))  # noqa: PYI024 - as users write it


class Encoding(UserDict):  # as the batches of Hugging Face's tokenizers: a dict with more
    def __init__(self, data=None, words=None):
        super().__init__(data)
        self.words = words

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True, slots=True)
class Slotted:
    tokens: Any
    lengths: Any


class Graph:  # as `Data` and `Batch` of PyTorch Geometric: `apply` changes the graph itself
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


class Moves:  # nothing but `to`
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
    assert trees.describe(tree) == "(6, 2) float32, (6,) int64"
    changed = trees.map_leaves(lambda leaf: leaf + 1, tree)
    assert type(changed) is type(tree)
    assert [leaf.sum() for leaf in trees.tree_leaves(changed)] == [ONE.sum() + 12, OTHER.sum() + 6]
    leaves = trees.tree_leaves(tree)
    assert all(a is b for a, b in zip(leaves, (ONE, OTHER), strict=True)), "unchanged"
    if isinstance(tree, dict | UserDict):
        assert list(changed) == list(tree)
    for more in ("words", "default_factory"):
        assert getattr(changed, more, None) == getattr(tree, more, None)


@pytest.mark.parametrize("tree", [*TREES.values(), ONE], ids=[*TREES, "a tensor"])
def test_rows_that_all_tensors_have_are_cut_as_views(tree):
    assert trees.num_rows(tree) == 6
    trees.check_rows(tree, 6)
    with pytest.raises(UserError, match="collate"):
        trees.check_rows(tree, 5)
    parts = trees.tree_leaves(trees.narrow(tree, 2, 3))
    for whole, part in zip(trees.tree_leaves(tree), parts, strict=True):
        assert torch.equal(part, whole[2:5])
        assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    pieces = trees.split_rows(tree, 4)
    assert [trees.num_rows(piece) for piece in pieces] == [4, 2]
    for place, whole in enumerate(trees.tree_leaves(tree)):
        assert torch.equal(torch.cat([trees.tree_leaves(piece)[place] for piece in pieces]), whole)


def test_of_a_graph_tensors_are_changed_and_a_packed_batch_is_the_same_in_one_memory():
    graph = Graph(x=ONE, name="ethanol", num_graphs=3)
    half = trees.map_leaves(lambda leaf: leaf / 2, graph)
    assert graph.parts["x"] is ONE
    assert torch.equal(half.parts["x"], ONE / 2)
    assert (half.parts["name"], half.num_graphs) == ("ethanol", 3)
    assert trees.num_rows(graph) == trees.num_rows((graph, torch.zeros(3))) == 3
    assert trees.num_rows((graph, OTHER)) is None
    moved = Moves(ONE)
    tree = {"batch": moved, "names": ("a", None), "x": ONE}
    assert trees.tree_leaves(tree)[:3] == [moved, "a", None]
    assert trees.tree_leaves(Text) == [Text], "a class is no tree of its fields"
    same = trees.map_tensors(lambda tensor: tensor + 1, tree)
    assert same["batch"] is moved
    assert same["names"] == ("a", None)
    assert torch.equal(same["x"], ONE + 1)
    assert trees.describe(tree) == "a Moves, a str, None, (6, 2) float32"
    with pytest.raises(UserError, match="a Moves"):
        trees.check_rows(tree, 6)
    found = Packed(all_kinds()).batch()
    assert repr(found) == repr(all_kinds())
    same_tensors(found, all_kinds())
    assert found["twice"][0] is found["twice"][1]
    first, second = Packed([torch.arange(3), torch.ones(5)]).batch()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.is_shared()
    here = Collating([], torch.stack, whole=True, packed=True)
    assert here([torch.ones(2), torch.zeros(2)])[0].tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    "tree",
    [(ONE, torch.zeros(5)), torch.zeros(()), {}, "text", {"a": "text"}, Moves(ONE)],
    ids=["unequal", "a number", "nothing", "text", "texts", "only to"],
)
def test_where_tensors_disagree_or_there_is_none_the_rows_are_not_known(tree):
    assert trees.num_rows(tree) is None
