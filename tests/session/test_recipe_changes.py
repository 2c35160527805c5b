"""A run goes on with the recipe that it was trained with, and its checkpoints are asked with it."""

import copy
import functools
import json
import shutil
import textwrap
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import UserError
from samestep.base.run.code_copy import copy_code, find_code
from samestep.cluster.slurm.options import JobOptions, keep_options
from samestep.core.session.recipe_changes import keep_recipe, recipe_changes
from samestep.shell.commands.train import parse
from tests import tiny
from tests.api.recipes import made
from tests.command_line import train_here
from tests.tiny import all_records

RECIPE = '''
import torch
from torch import nn
from samestep import Recipe, Splits
SEED = 7
def data():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(SEED))
    y = (x[:, 0] > 0).long()
    return Splits(train=(x[:30], y[:30]), validation=(x[30:], y[30:]), test=(x[30:], y[30:]))
class Net(nn.Module):
    """A small net."""
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))
def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)
recipe = Recipe(model=Net, data=data, loss=loss, read=lambda _, path: torch.ones(4),
                settings={"epochs": 1, "batch_size": 10})
'''
EDITS = {
    "Net.forward()": ("gelu", "relu"),
    "SEED (was 7, is 8)": ("SEED = 7", "SEED = 8"),
    "loss()": ("smoothing=0.1", "smoothing=0.2"),
    "recipe": ("data=data, loss=loss", "data=data, lower_is_better=('loss',), loss=loss"),
    "class Net": ("class Net(nn.Module)", "class Net(nn.Sequential)"),
}
GO_ON = ("--resume", "--epochs", "2")


def keep(run: Path, recipe: samestep.Recipe) -> None:
    keep_recipe(run, "python:made", recipe, changed=False)


def differing(run: Path, recipe: samestep.Recipe) -> list[str]:
    return recipe_changes(run, "python:made", recipe)


def using(values: object) -> samestep.Recipe:
    def model():
        return values and nn.Linear(4, 2)

    return made(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.py").write_text(RECIPE)
    samestep.train(folder / "small.py", run_dir=folder / "run", quiet=True)
    return folder


@pytest.fixture
def edited(trained, here):
    shutil.copytree(trained / "run", "run")
    settings = Path("run/settings.toml")
    settings.write_text(settings.read_text().replace(str(trained), str(here)))

    def edit(old: str, new: str) -> str:
        assert old in RECIPE
        Path("small.py").write_text(RECIPE.replace(old, new))
        return "run"

    return edit


def test_an_edited_recipe_is_refused_with_what_differs_wherever_it_would_be_used(edited, refused):
    asks = [("train", "run", *GO_ON), ("train", "small.py", "--run-dir", "run", *GO_ON)]
    asks += [("evaluate", "run"), ("predict", "run", "small.py"), ("explain", "run")]
    for name, (old, new) in EDITS.items():
        edited(old, new)
        for ask in asks[: 1 if name != "loss()" else None]:
            assert f" {name}. " in refused(*ask), (name, ask)
    calls = (samestep.load, samestep.evaluate, lambda run: samestep.predict(run, "small.py"))
    for call in (*calls, lambda run: samestep.train(run, resume=True, epochs=2, quiet=True)):
        with pytest.raises(UserError, match=r"recipe\(\)|class Net"):
            call("run")


def test_comments_docstrings_default_settings_and_the_main_block_are_no_change(edited):
    edited('    """A small net."""\n    def', "    # no more words\n    def")
    parse(["run", *GO_ON])
    edited('"epochs": 1', '"epochs": 3')
    parse(["run", *GO_ON])
    edited("\nrecipe", "\nif __name__ == '__main__':\n    print('trained')\nrecipe")
    parse(["run", *GO_ON])
    edited("\nrecipe", "\nif __name__ == '__main__':\n    pass\nelse:\n    SEED = 8\nrecipe")
    with pytest.raises(UserError):
        parse(["run", *GO_ON])
    edited("path: torch.ones(4)", "path: torch.zeros(4)")
    parse(["run", *GO_ON])
    assert samestep.evaluate("run")["samples"] == 10


def test_the_runs_own_copy_or_the_new_file_is_chosen(edited, capsys):
    edited("label_smoothing=0.1)", "label_smoothing=0.1) * 2")
    losses = [
        samestep.evaluate("run", recipe=file)["loss"] for file in ("run/recipe.py", "small.py")
    ]
    assert losses[1] == pytest.approx(2 * losses[0])
    assert samestep.shell.cli.main(["evaluate", "run", "--recipe", "small.py", "--json"]) == 0
    assert f'"loss": {losses[1]!r}' in capsys.readouterr().out
    edited("SEED = 7", "SEED = 8")
    for target in (["run"], ["small.py", "--run-dir", "run"]):
        _, request = parse([*target, *GO_ON, "--recipe-of-run"])
        assert request.recipe.model.__init__.__globals__["SEED"] == 7
        assert (request.recipe.name, request.recipe_changes) == ("small", ())
    assert Path(request.recipe.model.__init__.__globals__["__file__"]).name == "small.py"
    with pytest.raises(UserError):
        parse(["small.py", "--recipe-of-run"])


def test_an_edit_that_is_insisted_on_is_recorded_and_is_the_runs_recipe_from_then_on(edited):
    edited("SEED = 7", "SEED = 8")
    samestep.train("run", resume=True, epochs=2, allow_change="recipe", quiet=True)
    (resumed,) = (r for r in all_records(Path("run")) if r["event"] == "resume")
    assert resumed["changes"] == ["recipe: SEED (was 7, is 8)"]
    assert Path("run/recipe_before_1.py").read_text() == RECIPE
    parse(["run", "--resume", "--epochs", "3"])


def test_a_recipe_made_in_python_is_compared_by_its_functions_and_values(tmp_path):
    def recipe(by: float = 0.1, width: int = 4, act: type = nn.GELU, **more) -> samestep.Recipe:
        def model():
            return nn.Sequential(nn.Linear(4, width), act(), nn.Linear(width, 2))

        return made(model, **({"loss": nn.CrossEntropyLoss(label_smoothing=by)} | more))

    def weighted(outputs, targets, by):
        return nn.functional.cross_entropy(outputs, targets) * by

    keep(tmp_path, recipe())
    assert differing(tmp_path, recipe(settings={"lr": 0.1})) == []
    for name, other in {
        "loss": recipe(by=0.2),
        "width (was 4, is 8)": recipe(width=8),
        "act": recipe(act=nn.ReLU),
        "model": made(lambda: nn.Linear(4, 2), loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
        "loss ": recipe(loss=functools.partial(weighted, by=torch.tensor(2.0))),
    }.items():
        assert name.strip() in str(differing(tmp_path, other)), name


def test_a_missing_run_is_told_alike_and_a_lost_settings_file_is_no_run_elsewhere(edited, refused):
    edited("SEED = 7", "SEED = 7")
    for ask in (("train", "no/run"), ("evaluate", "no/run"), ("compare", "no/run", "no/other")):
        assert "There is no run at no/run" in refused(*ask), ask
    for call in (samestep.load, samestep.evaluate, samestep.TrainedRun):
        with pytest.raises(UserError, match="There is no run at"):
            call("no/run")
    Path("run/settings.toml").unlink()
    said = refused("train", "run", "--resume")
    assert "settings.toml is missing" in said
    assert "There is one at" not in said


@pytest.mark.parametrize(
    "table",
    [
        torch.eye(4).to_sparse(),
        torch.ones(3, device="meta"),
        torch.tensor([1 + 2j]).conj(),
        torch.empty(0, 2),
        torch.tensor(2.0, dtype=torch.bfloat16),
        np.array([object()]),
    ],
)
def test_no_kind_of_tensor_ends_a_training_for_the_comparison(table, tmp_path):
    keep(tmp_path, using(table))
    assert differing(tmp_path, using(table)) == []


def test_a_large_tensor_is_compared_by_its_bytes_without_a_copy(tmp_path):
    table = np.zeros(2**22, np.uint8)
    tracemalloc.start()
    keep(tmp_path, using(table))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < table.nbytes / 4
    table[7] = 1
    assert differing(tmp_path, using(table)) == ["values"]


def test_the_same_code_under_another_module_name_is_no_change(tmp_path, monkeypatch):
    source = textwrap.dedent(
        """
        from torch import nn
        class Act(nn.ReLU): pass
        class Metric:
            def __call__(self, outputs, targets): return outputs.argmax(1) == targets
        def model(act=Act): return nn.Sequential(nn.Linear(4, 2), act())
        """
    )

    def recipe(module: str, by: float = 0.5):
        space = {"__name__": module}
        exec(source, space)
        loss = functools.partial(nn.functional.cross_entropy, weight=torch.tensor([by, 1]))
        return made(space["model"], loss=loss, metrics={"right": space["Metric"]()})

    keep(tmp_path, recipe("__main__"))
    assert differing(tmp_path, recipe("mine")) == []


def test_a_field_that_recipes_have_gained_since_is_a_change_only_where_it_is_used(tmp_path):
    keep(tmp_path, made())
    kept = tmp_path / "recipe.json"
    before = json.loads(kept.read_text())
    for name in ("reduction", "loss_weights", "evaluate_batch"):
        del before["pieces"][name]
    kept.write_text(json.dumps(before))
    assert differing(tmp_path, made()) == []
    assert differing(tmp_path, made(reduction="sum")) == ["reduction (new)"]


STATE = {"cache": None, "count": 0, "table": {}, "log": [1.0], "total": torch.zeros(1)}


def test_what_the_recipes_own_functions_change_is_no_change(tmp_path):
    source = textwrap.dedent(
        """
        from torch import nn
        def model():
            global cache
            cache = (1, 2)
            def inner():
                table["key"], total[0] = 1, 2
                log.append(1.0)
            inner()
            return nn.Linear(4, 2)
        def loss(outputs, targets):
            global count
            count += 1
            total.add_(1)
            Kept.seen += len(seen) + len(log)
            return nn.functional.cross_entropy(outputs, targets)
        class Kept:
            seen = 0
        """
    )
    space = {"__name__": "__main__", **copy.deepcopy(STATE), "seen": [1, 2]}
    exec(source, space)
    recipe = made(space["model"], loss=space["loss"])
    keep(tmp_path, recipe)
    space["model"]()
    space["loss"](torch.zeros(1, 2), torch.tensor([0]))
    assert space["Kept"].seen == 4
    assert differing(tmp_path, recipe) == []
    space["seen"].append(3)
    assert differing(tmp_path, recipe) == ["seen"]


class Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        return outputs.argmax(1) == targets


def test_what_a_training_has_changed_is_compared_as_it_was_before(here):
    counts = Counts()

    def recipe():
        cache = [1]

        def fill(into):
            into.append(2)

        def data():
            fill(cache)
            return made().data()

        return made(data=data, metrics={"right": counts}, settings={"epochs": 1})

    run = samestep.train(recipe(), quiet=True)
    go_on = functools.partial(samestep.train, run, resume=True, epochs=2, quiet=True)
    with pytest.raises(UserError, match="model"):
        go_on(recipe=made(lambda: nn.Linear(4, 2)))
    assert go_on(recipe=recipe()).result["epochs"] == 2


def test_of_a_dict_the_keys_that_the_functions_name_are_compared(tmp_path):
    def recipe(*, whole=False, **other):
        values = {"epochs": 1, "width": 4, **other}

        def model():
            return next(nn.Linear(4, values["width"]) for _ in range(2))

        return made((lambda: values) if whole else model)

    (tmp_path / "whole").mkdir()
    keep(tmp_path, recipe())
    assert differing(tmp_path, recipe(epochs=2)) == []
    assert differing(tmp_path, recipe(width=8)) == ["values['width'] (was 4, is 8)"]
    keep(tmp_path / "whole", recipe(whole=True))
    assert differing(tmp_path / "whole", recipe(whole=True, epochs=2)) == ["values"]


def test_the_run_of_a_job_goes_on_by_hand_with_its_copy_and_tells_the_commit_of_that(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    run.mkdir()
    keep_options(run, JobOptions())
    copy_code(replace(find_code(recipe), commit="a" * 40), run)
    copied = str(run / "code" / recipe.name)
    train_here(copied, "--run-dir", str(run), "--resume", "--max-steps", "1")
    recipe.write_text("recipe = None\n")
    train_here(str(run), "--resume", "--max-steps", "2")
    assert json.loads((run / "environment.json").read_text())["git_commit"] == "a" * 40
    assert [r["step"] for r in all_records(run) if r["event"] == "stop"][-1] == 2
