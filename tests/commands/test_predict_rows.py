"""`samestep predict` of files with several rows, and of outputs that are no named classes."""

import csv
import json
import sys
from pathlib import Path

import pytest

from samestep.core.recipe import find_recipe
from samestep.core.session.trained_model import evaluate_run
from tests import tiny
from tests.command_line import call, train_here
from tests.loops.scripts import EXAMPLES


def predicted(output_of, *arguments, code: int = 0) -> list[dict]:
    lines = output_of("predict", *arguments, "--json", code=code).splitlines()
    return [json.loads(line) for line in lines]


def trained(recipe: Path, folder: Path, *flags: str) -> Path:
    run = folder / f"run-{recipe.stem}"
    train_here(str(recipe), "--run-dir", str(run), "--max-steps", "3", *flags)
    return run


def test_each_row_of_a_table_is_predicted_beside_its_actual_value(tmp_path, output_of):
    recipe = EXAMPLES / "csv_regression.py"
    run = trained(recipe, tmp_path)
    rows = find_recipe(str(recipe)).model.__globals__["made_up"](1009)[:100]
    table = tmp_path / "houses.csv"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    found = predicted(output_of, run, table)
    assert [(one["file"], one["row"]) for one in found] == [(str(table), k + 1) for k in range(100)]
    assert [one["actual"] for one in found] == pytest.approx([float(r["price"]) for r in rows])
    error = sum(abs(one["price"] / one["actual"] - 1) for one in found)
    measured = evaluate_run(run, split="validation")
    assert error == pytest.approx(measured["error_percent"], rel=1e-5)
    shown = output_of("predict", run, table).splitlines()
    assert shown[0] == str(table)
    assert shown[1].split() == ["row", "price", "actual"]
    assert len(shown) == 102


def test_a_row_that_is_unreadable_is_named_and_company_changes_none(tmp_path, output_of):
    run = trained(EXAMPLES / "padded_text.py", tmp_path, "--num-sentences", "40")
    rows = ["the cat", "a dog often hears the bird and the", "the bird"]
    together, alone = tmp_path / "together.txt", tmp_path / "alone.txt"
    together.write_text("\n".join(rows))
    alone.write_text(rows[0])
    found = predicted(output_of, run, together, alone)
    assert [one["row"] for one in found] == [1, 2, 3, 1]
    assert found[0]["next"] == found[3]["next"]
    assert found[0]["probability"] == pytest.approx(found[3]["probability"], rel=1e-5)
    broken, empty = tmp_path / "broken.txt", tmp_path / "empty.txt"
    broken.write_text("\n".join([rows[0], "the zebra", rows[2]]))
    empty.write_text("")
    found = predicted(output_of, run, broken, empty, together, code=1)
    assert [one["row"] for one in found if "next" in one] == [1, 1, 2, 3]
    assert [(one["file"], one.get("row")) for one in found if "problem" in one] == [
        (str(broken), 2),
        (str(empty), None),
    ]


ROWS = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from samestep import Recipe, Splits
x = torch.arange(36.0).view(12, 3) / 36
y = x.sum(dim=1, keepdim=True)
@dataclass(frozen=True)
class Options:
    form: str = ""
class Gaps(TensorDataset):
    def __getitem__(self, index):
        if index == 1: raise ValueError("It is broken.")
        return super().__getitem__(index)[0]
def read(options, path):
    numbers = [float(word) for word in path.read_text().split()]
    rows = torch.tensor(numbers).view(-1, 3)
    if options.form == "pairs": return [(row, row.sum().view(1)) for row in rows]
    if options.form == "dataset": return TensorDataset(rows, rows.sum(dim=1, keepdim=True))
    if options.form in ("gaps", "stops"):
        gaps = Gaps(rows)
        return gaps if options.form == "gaps" else (gaps[index] for index in range(len(gaps)))
    if options.form == "iterator": return iter(rows)
    if options.form == "raises": return {}["column"]
    return rows[0]
class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.form = options.form
    def forward(self, x):
        y = self.layer(x)
        if self.training: return y
        if self.form == "tree": return {"y": y, "twice": torch.cat([y, 2 * y], dim=1)}
        return y.view(-1, 1, 1).expand(-1, 4, 5) if self.form == "maps" else y
recipe = Recipe(model=Model, data=lambda options: Splits(train=(x, y)), options=Options, read=read,
                loss=nn.functional.mse_loss, settings={"epochs": 1, "batch_size": 4, "lr": 0.1})
"""


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> tuple[Path, Path]:
    """A folder with a recipe's run of its own for each form, and a file of two rows."""
    folder = tmp_path_factory.mktemp("numbers")
    path = folder / "rows.txt"
    path.write_text("1 2 3 4 5 6")
    return folder, path


def run_of(folder: Path, form: str, more: str = "") -> Path:
    recipe = tiny.write_recipe(folder, ROWS + more, name=f"rows_{form or 'single'}.py")
    return trained(recipe, folder, "--form", form or "single")


def test_a_number_is_shown_as_it_is_whatever_form_the_rows_come_in(numbers, output_of):
    folder, path = numbers
    (single,) = predicted(output_of, run_of(folder, ""), path)
    assert single.keys() == {"file", "output"}
    for form in ("pairs", "dataset", "iterator"):
        found = predicted(output_of, run_of(folder, form), path)
        assert [one["row"] for one in found] == [1, 2]
        assert found[0]["output"] == single["output"]
        targets = [one.get("target") for one in found]
        assert targets == ([None] * 2 if form == "iterator" else [6.0, 15.0])
    (tree,) = predicted(output_of, run_of(folder, "tree"), path)
    number = single["output"]
    assert tree["output"] == {"y": number, "twice": [number, pytest.approx(2 * number)]}


@pytest.mark.parametrize(("form", "read"), [("gaps", [1, 3]), ("stops", [1])])
def test_the_rows_after_a_broken_one_are_read_or_said_not_to_be(numbers, output_of, form, read):
    folder, _path = numbers
    path = folder / f"{form}.txt"
    path.write_text("1 2 3 4 5 6 7 8 9")
    found = predicted(output_of, run_of(folder, form), path, code=1)
    assert [one["row"] for one in found if "output" in one] == read
    (broken,) = (one for one in found if "problem" in one)
    assert broken["row"] == 2
    assert ("not read" in broken["problem"]) == (form == "stops")


SHOW = """
from dataclasses import replace
recipe = replace(recipe, show=lambda outputs, targets: {})
"""


@pytest.mark.parametrize(
    ("form", "show", "told"),
    [
        ("maps", None, ("(1, 4, 5)", "show")),
        ("raises", None, ("read", "KeyError", "column", "rows_raises.py:")),
        ("one", "[{}, {}]", ("show", "2 values", "1 sample", "rows_one.py:")),
        ("words", "['x']", ("show", "str", "rows_words.py:")),
        ("taken", "[{'file': 1}]", ("show", "'file'", "rows_taken.py:")),
        ("fails", "outputs.tokens", ("show", "tokens", "(1, 1)", "rows_fails.py:")),
    ],
)
def test_outputs_that_cannot_be_shown_are_one_message(numbers, refused, form, show, told):
    folder, path = numbers
    run = run_of(folder, form, SHOW.format(show) if show else "")
    message = refused("predict", str(run), str(path))
    assert [word for word in told if word not in message] == [], message


PICTURE = """
from dataclasses import replace
def picture(options, path, rows, figure):
    assert options.form == "pairs"
    if len(rows) > 2: raise KeyError("row")
    figure.subplots().plot([row["output"] for row in rows])
recipe = replace(recipe, plot=picture)
"""


def test_a_file_is_drawn_where_the_recipe_says_how(numbers, tmp_path, refused, monkeypatch, capfd):
    pytest.importorskip("matplotlib")
    _folder, path = numbers
    drawn, plain = run_of(tmp_path, "pairs", PICTURE), run_of(tmp_path, "dataset")
    png, long = tmp_path / "rows.png", tmp_path / "long.txt"
    assert call("predict", str(drawn), str(path), "--plot", str(png)) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    gaps = run_of(tmp_path, "gaps", PICTURE)
    assert call("predict", str(gaps), str(path), "--plot", str(tmp_path / "none.png")) == 1
    assert "none.png is not drawn" in capfd.readouterr().err
    long.write_text("1 2 3 " * 3)
    for run, files, plot, told in (
        (plain, [path], png, "plot"),
        (drawn, [path, path], png, "--plot"),
        (drawn, [path], tmp_path / "rows.doc", ".png"),
        (drawn, [long], png, "rows_pairs.py:"),
    ):
        message = refused("predict", str(run), *map(str, files), "--plot", str(plot))
        assert told in message
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused("predict", str(drawn), str(path), "--plot", "a.png")
    assert "pip install 'samestep[plot]'" in message
