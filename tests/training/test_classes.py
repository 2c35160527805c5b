"""Per-class accuracy and the confusion matrix: exact against a direct count, on any ranks."""

import json

import numpy as np
import pytest
import torch

from samestep import Splits
from samestep.base.errors import UserError
from samestep.base.words import class_table
from samestep.core.training.metrics import Confusion
from samestep.launch.ranks.world import World
from tests import tiny
from tests.command_line import read_json

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


def direct_count(recipe, folder):
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


def test_the_result_counts_every_sample_once_and_so_does_evaluate(recipe, tmp_path, output_of):
    folder = tmp_path / "run"
    printed = tiny.trained(recipe, folder, on=2)
    test, expected = read_json(folder / "result.json")["test"], direct_count(recipe, folder)
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
    for record in tiny.events(folder, "evaluation"):
        assert record.get("confusion") == (expected if record["split"] == "test" else None)
    assert "absent  no samples" in printed

    result = json.loads(output_of("evaluate", folder, "--json"))
    assert (result["confusion"], result["per_class"]) == (expected, test["per_class"])
    shown = output_of("evaluate", folder)
    assert f"low     {low[0] / sum(low):.4f}" in shown
    assert "confusion" not in shown


@pytest.mark.parametrize("verb", ["evaluate", "train"])
def test_a_checkpoint_of_other_classes_is_refused(recipe, refused, tmp_path, verb):
    folder = tmp_path / "run"
    tiny.trained(recipe, folder, "--epochs", "1")
    # Of another size: else Python would take the compiled file of the one before.
    recipe.write_text(RECIPE.replace('"low", "middle"', '"middle",  "low"'))
    insist = {
        "evaluate": ("--recipe", str(recipe)),
        "train": ("--resume", "--epochs", "2", "--allow-change", "recipe"),
    }
    message = refused(verb, str(folder), *insist[verb])
    assert "'low'" in message
    assert "'middle'" in message


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"high", "absent"', '"high"', "(batch, 3)"),
        ('classes=("low"', 'classes=("one more", "low"', "(batch, 5)"),
    ],
)
def test_names_that_do_not_fit_the_model_are_told(recipe, refused, tmp_path, old, new, says):
    recipe.write_text(RECIPE.replace(old, new))
    assert says in refused("train", str(recipe), "--run-dir", str(tmp_path / "run"))


@pytest.mark.parametrize("classes", [("alone",), ("one", "two", "one")])
def test_a_single_class_and_a_name_given_twice_are_refused(classes):
    with pytest.raises(UserError, match="classes"):
        Splits(train=(torch.zeros(1), torch.zeros(1)), classes=classes)


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
        "cat   0.5000  predicted as ship 4, dog 1",
        "dog   1.0000",
        "frog  no samples",
        "ship  0.2000  predicted as cat 3, dog 3, frog 2",
    ]
    many = {str(number): 1.0 for number in range(21)}
    assert class_table(many, np.eye(21, dtype=int).tolist()) == [], "they are left to the file"
