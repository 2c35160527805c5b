"""Per-class accuracy and the confusion matrix: exact against a direct count, on any ranks."""

import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep import Splits, read_records
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.reporting.words import class_table
from samestep.training.metrics import Confusion
from tests import tiny
from tests.command_line import call, read_json, refusal

# 53 test samples: no number of ranks divides them. One class has no test sample.
RECIPE = """
import torch
from torch import nn
from samestep import Recipe, Splits

def numbers(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()

def data():
    return Splits(train=numbers(60, 1), validation=numbers(20, 2), test=numbers(53, 3),
                  classes=("low", "middle", "high", "absent"))

recipe = Recipe(model=lambda: nn.Linear(4, 4), data=data,
                settings={"epochs": 2, "batch_size": 12, "lr": 0.05})
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "named.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on one rank, with its recipe beside it, to be looked at or copied."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "named.py").write_text(RECIPE)
    tiny.trained(folder / "named.py", folder / "run")
    return folder


def direct_count(recipe, folder):
    """Return what the saved weights make of the test set, counted one by one."""
    namespace = {}
    exec(compile(recipe.read_text(), "named.py", "exec"), namespace)
    inputs, targets = namespace["numbers"](53, 3)
    best = read_json(folder / "checkpoints" / "index.json")["best"]["path"]
    weights = torch.load(folder / "checkpoints" / best, weights_only=True)
    assert weights["classes"] == ["low", "middle", "high", "absent"]
    rows = np.zeros((4, 4), int)
    outputs = inputs @ weights["model"]["weight"].T + weights["model"]["bias"]
    for target, output in zip(targets.tolist(), outputs, strict=True):
        rows[target, int(output.argmax())] += 1
    return rows.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_result_counts_every_sample_once_and_so_does_evaluate(recipe, tmp_path, capfd, ranks):
    folder = tmp_path / "run"
    printed = tiny.trained(recipe, folder, on=ranks)
    test = read_json(folder / "result.json")["test"]
    expected = direct_count(recipe, folder)
    assert test["confusion"] == expected
    low, middle, high, _ = expected
    assert test["per_class"] == {
        "low": low[0] / sum(low),
        "middle": middle[1] / sum(middle),
        "high": high[2] / sum(high),
        "absent": None,
    }
    right = sum(row[place] for place, row in enumerate(expected))
    assert test["accuracy"] == right / 53
    (record,) = [r for r in read_records(folder) if r.get("split") == "test"]
    assert record["confusion"] == expected
    assert "absent  no samples" in printed

    def evaluated(*flags: str) -> str:
        capfd.readouterr()
        assert call("evaluate", str(folder), *flags) == 0
        return capfd.readouterr().out

    result = json.loads(evaluated("--json"))
    assert (result["confusion"], result["per_class"]) == (expected, test["per_class"])
    shown = evaluated()
    assert f"low     {low[0] / sum(low):.4f}" in shown
    assert "confusion" not in shown


def test_a_validation_counts_no_classes(trained):
    for record in read_records(trained / "run"):
        assert record.get("split") != "validation" or "confusion" not in record


@pytest.mark.parametrize("verb", ["evaluate", "train"])
def test_a_checkpoint_of_other_classes_is_refused(recipe, refused, trained, tmp_path, verb):
    folder = shutil.copytree(trained / "run", tmp_path / "run")
    settings = folder / "settings.toml"
    settings.write_text(settings.read_text().replace(str(trained), str(tmp_path)))
    recipe.write_text(RECIPE.replace('"low", "middle"', '"middle", "low"'))
    insist = {
        "evaluate": ("--recipe", str(recipe)),
        "train": ("--resume", "--epochs", "3", "--allow-change", "recipe"),
    }
    message = refused(verb, str(folder), *insist[verb])
    assert "'low'" in message
    assert "'middle'" in message


@pytest.mark.parametrize(
    ("old", "new", "says", "world_size"),
    [
        ('"high", "absent"', '"high"', "(batch, 3)", 1),
        ('classes=("low"', 'classes=("one more", "low"', "(batch, 5)", 2),
    ],
)
def test_names_that_do_not_fit_the_model_are_told(tmp_path, old, new, says, world_size):
    recipe = tmp_path / "named.py"
    recipe.write_text(RECIPE.replace(old, new))
    arguments = ("train", str(recipe), "--run-dir", str(tmp_path / "run"), "--epochs", "1")
    message = refusal(*arguments, world_size=world_size, folder=tmp_path / "outputs")
    assert says in message


@pytest.mark.parametrize("classes", [("alone",), ("one", "two", "one")])
def test_a_single_class_and_a_name_given_twice_are_refused(classes):
    with pytest.raises(UserError, match="classes"):
        Splits(train=(torch.zeros(1), torch.zeros(1)), classes=classes)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=40),
    batch=st.integers(1, 9),
)
def test_counts_do_not_depend_on_the_batches(pairs, batch):
    expected = np.zeros((5, 5), int)
    counted = Confusion("abcde", torch.device("cpu"))
    for start in range(0, len(pairs), batch):
        some = pairs[start : start + batch]
        outputs = torch.eye(5)[[prediction for _, prediction in some]]
        counted.add(outputs, torch.tensor([target for target, _ in some]))
        for target, prediction in some:
            expected[target, prediction] += 1
    assert counted.result(World())["confusion"] == expected.tolist()


@pytest.mark.parametrize("target", [-100, 3])
def test_a_target_that_is_no_class_is_told_with_all_others(target):
    counted = Confusion("abc", torch.device("cpu"))
    counted.add(torch.eye(3), torch.tensor([0, target, 2]))
    with pytest.raises(UserError, match=r"1 targets .* 0 to 2"):
        counted.result(World())


def test_the_table_has_a_line_a_class_with_its_commonest_mistakes_first():
    rows = [[5, 1, 0, 4], [0, 3, 0, 0], [0, 0, 0, 0], [3, 3, 2, 2]]
    per_class = {"cat": 0.5, "dog": 1.0, "frog": None, "ship": 0.2}
    assert class_table(per_class, rows) == [
        "cat   0.5000  taken for ship 4, dog 1",
        "dog   1.0000",
        "frog  no samples",
        "ship  0.2000  taken for cat 3, dog 3, frog 2",
    ]


def test_more_than_twenty_classes_are_left_to_the_file():
    names = {str(number): 1.0 for number in range(21)}
    assert class_table(names, np.eye(21, dtype=int).tolist()) == []
