"""Orders of the samples in whole trainings: the same on any ranks, and through a stop."""

from itertools import pairwise
from pathlib import Path

import pytest

from samestep.base.run.records import read_records
from tests import tiny
from tests.command_line import call, refusal
from tests.tiny import last_state, trained

pytestmark = pytest.mark.xdist_group("orders")  # the runs are shared

RECIPE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from samestep import Recipe, Splits
class Texts(Dataset):
    def __init__(self, number, seed):
        generator = torch.Generator().manual_seed(seed)
        self.lengths = torch.randint(2, 20, (number,), generator=generator)
        self.texts = [torch.randint(1, 9, (int(n),), generator=generator) for n in self.lengths]
    def __len__(self): return len(self.texts)
    def __getitem__(self, place): return self.texts[place]
class Next(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 9)
    def forward(self, texts): return self.out(self.embed(texts).cumsum(1))
def loss(outputs, texts):
    wanted = texts[:, 1:].flatten()
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), wanted, ignore_index=0)
recipe = Recipe(
    model=Next,
    data=lambda: Splits(train=Texts(47, 1), validation=Texts(11, 2)),
    collate=lambda texts: nn.utils.rnn.pad_sequence(texts, batch_first=True),
    forward=lambda model, texts: model(texts),
    loss=loss,
    loss_terms=lambda texts: (texts[:, 1:] > 0).sum(),
    lengths=lambda data: data.lengths,
    weights=lambda data: data.lengths ** 2,
    settings={"order": "shuffled", "epochs": 2, "precision": "fp64", "log_every": 1,
              "batch_size": 8, "checkpoint_every_steps": 3, "lr": 0.05},
)
"""
ORDERS = {
    "columns": "--order columns",
    "weighted": "--order weighted",
    "by length": "--group-by-length",
    "by tokens": "--batch-tokens 60 --accumulate 2",
    "virtual": "--batch-tokens 60 --virtual-ranks 3",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Train in each order alone, and stopped within the first epoch and gone on with on 2 ranks."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = tiny.write_recipe(folder, RECIPE)
    for name, flags in ORDERS.items():
        trained(recipe, folder / name, *flags.split())
        trained(recipe, folder / f"{name} resumed", *flags.split(), "--max-steps", "4")
    resumed = [[folder / f"{name} resumed", "--resume", "--epochs", "2"] for name in ORDERS]
    longer = [[*words, "--max-steps", "1000"] for words in resumed]
    tiny.train_all(longer, on=2, folder=folder)
    return folder


def steps(run: Path) -> list[tuple[float, int]]:
    return [(r["loss"], r["samples"]) for r in read_records(run) if r["event"] == "step"]


@pytest.mark.parametrize("name", ORDERS)
def test_each_order_is_the_same_training_on_other_ranks_after_a_stop(runs, name):
    whole, resumed = steps(runs / name), steps(runs / f"{name} resumed")
    assert [samples for _, samples in whole] == [samples for _, samples in resumed]
    tolerance = 0 if name == "virtual" else 1e-12
    assert max(abs(a - b) for (a, _), (b, _) in zip(whole, resumed, strict=True)) <= tolerance
    mine, its = (last_state(runs / run)["model"] for run in (name, f"{name} resumed"))
    assert all(float((mine[key] - its[key]).abs().max()) <= tolerance for key in mine)


def test_orders_differ_count_the_samples_of_tokens_and_are_kept(runs):
    first = {round(steps(runs / name)[0][0], 9) for name in ORDERS}
    assert len(first) == len(ORDERS) - 1  # two are by tokens
    epochs = [r for r in read_records(runs / "by tokens") if r["event"] == "epoch"]
    assert [record["samples"] for record in epochs] == [47, 47]
    samples = [samples for _, samples in steps(runs / "by tokens")]
    assert samples[-1] == 94
    assert len({b - a for a, b in pairwise(samples)}) > 2
    assert call("train", str(runs / "weighted"), "--resume", "--order", "shuffled") == 2
    assert call("train", str(runs / "by tokens"), "--resume", "--batch-tokens", "61") == 2
    assert last_state(runs / "columns")["order"]["order"] == "columns"
    assert last_state(runs / "by length")["order"].keys() >= {"lengths"}
    order = last_state(runs / "weighted")["order"]
    assert (order["order"], len(order["weights"])) == ("weighted", 16)


def test_what_a_recipe_gives_by_weight_it_draws_by_alike_on_all_ranks(tmp_path):
    by_rank = "data.lengths + float(__import__('os').environ['RANK'])"
    recipe = tiny.write_recipe(tmp_path, RECIPE.replace("data.lengths ** 2", by_rank))
    told = refusal("train", str(recipe), "--order", "weighted", world_size=2, folder=tmp_path)
    assert "Rank 1 has different weights" in told
    rank = "int(__import__('os').environ['RANK'])"
    other = {"return Splits(": f"x = x + {rank}\n    return Splits("}
    other["train=(x[:n], y[:n])"] = f"train=[*zip(x[{rank}::2][:90], y)]"  # a rank's own part
    for old, new in other.items():
        recipe = tiny.write_recipe(tmp_path, tiny.RECIPE.replace(old, new), "values.py")
        told = refusal("train", str(recipe), world_size=2, folder=tmp_path / new[:5])
        assert "Rank 1 has other values" in told
    recipe = tiny.write_recipe(tmp_path, RECIPE.replace('"order": "shuffled", ', ""))
    trained(recipe, tmp_path / "run", "--epochs", "1")
    assert next(iter(read_records(tmp_path / "run")))["order"] == "weighted"
