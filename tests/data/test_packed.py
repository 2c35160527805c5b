"""A batch from a loader worker is what was collated, whatever tensors and objects are in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samestep.data.collating import Packed, Packing
from tests import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass
class Held:
    numbers: Any
    name: str = "a name"


def trees() -> dict[str, Any]:
    padded = torch.arange(12.0).view(3, 4)
    return {
        "types": [torch.ones(3, dtype=d) for d in (torch.bool, torch.int8, torch.complex64)],
        "forms": (torch.tensor(7), torch.zeros(0, 3), torch.tensor(float("nan"))),
        "views": {"words": padded[:, :-1], "following": padded[:, 1:], "whole": padded},
        "other layouts": Held([padded.T, nn.Parameter(padded)], "b"),
        "twice": [padded, padded],
        "none": (None, 3, "text"),
    }


@pytest.mark.parametrize("name", trees())
def test_a_packed_batch_is_the_same_batch(name):
    tree = trees()[name]
    found = Packed(tree).batch()
    same(found, tree)
    if name == "twice":
        assert found[0] is found[1]


def same(found: Any, tree: Any) -> None:
    assert type(found) is type(tree)
    if isinstance(tree, torch.Tensor):
        assert (found.dtype, found.stride()) == (tree.dtype, tree.stride())
        torch.testing.assert_close(found, tree, rtol=0, atol=0, equal_nan=True)
    elif isinstance(tree, dict):
        assert list(found) == list(tree)
        for key in tree:
            same(found[key], tree[key])
    elif isinstance(tree, list | tuple):
        assert len(found) == len(tree)
        for one, other in zip(found, tree, strict=True):
            same(one, other)
    elif isinstance(tree, Held):
        same(found.numbers, tree.numbers)
        assert found.name == tree.name
    else:
        assert found == tree


def test_all_dense_tensors_of_a_batch_are_in_one_piece_of_memory():
    first, second = Packed([torch.arange(3), torch.ones(5)]).batch()
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.is_shared()


@pytest.mark.parametrize(
    ("example", "size"), [("padded_text", "--num-sentences"), ("graphs", "--num-graphs")]
)
def test_what_workers_collate_trains_the_same(tmp_path, example, size):
    flags = (size, "61", "--width", "4", "--epochs", "1", "--log-every", "1", "--precision", "fp64")
    for workers in ("0", "2"):
        flags_now = (*flags, "--num-workers", workers, "--run-dir", str(tmp_path / workers))
        tiny.train(EXAMPLES / f"{example}.py", *flags_now, folder=tmp_path)
    tiny.assert_same_training(tmp_path / "2", tmp_path / "0", 0.0)


def test_nothing_is_packed_where_nothing_is_sent():
    batch = Packing(torch.stack)([torch.ones(2), torch.zeros(2)])
    assert batch.tolist() == [[1, 1], [0, 0]]
