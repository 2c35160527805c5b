"""A run goes on with what its checkpoint was made with; a change is refused, or insisted on."""

import shutil
import tomllib
from pathlib import Path

import pytest

from samestep import UserError
from samestep.base.run.index import read_index
from samestep.shell.commands.train import parse
from tests.command_line import RECIPE, read_json, train_here
from tests.tiny import all_records, last_state

WITH_OPTION = RECIPE.replace(
    "def model():\n    return nn.Linear(4, 2)",
    "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Options:\n"
    "    scale: float = 1.0\n    depth: int | None = None\n    trees: int = 1\n"
    "    place: str = may_change('here')\n"
    "    def __post_init__(self):\n        object.__setattr__(self, 'twice', 2 * self.scale)\n\n"
    "def model(options):\n    return nn.Linear(4, 2)",
).replace("def data():", "def data(options):")
WITH_OPTION = WITH_OPTION.replace("import Recipe", "import Recipe, may_change")
WITH_OPTION = WITH_OPTION.replace("recipe = Recipe(", "recipe = Recipe(options=Options, ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.py").write_text(WITH_OPTION)
    train_here(str(folder / "small.py"), "--epochs", "1", "--run-dir", str(folder / "run"))
    return folder / "run"


@pytest.fixture
def made(trained, here) -> Path:
    shutil.copytree(trained, here / "run")
    return Path("run")


def edit(made: Path, old: str, new: str) -> None:
    text = (made / "settings.toml").read_text()
    assert old in text
    (made / "settings.toml").write_text(text.replace(old, new))


def go_on(*flags: str) -> None:
    train_here("run", "--resume", "--epochs", "2", *flags)


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("lr = 0.001", "lr = 0.5", "lr"),
        ('schedule = "constant"', 'schedule = "cosine"', "schedule"),
        ("lr = 0.001", "lr = 0.001\nclip_norm = 2.0", "clip_norm"),
        ("scale = 1.0", "scale = 2.0", "scale"),
        ("scale = 1.0", "scale = 1.0\ndepth = 3", "depth"),
        ("trees = 1", "trees = 2", "trees"),  # though a built-in recipe lets it change
    ],
)
def test_a_hand_edited_setting_is_refused_with_both_values(refused, made, old, new, name):
    edit(made, old, new)
    before = (made / "events.jsonl").read_bytes()
    said = refused("train", "run", "--resume", "--epochs", "2")
    was = old.replace('"', "") if name in old else f"{name} = nothing"
    now = new.splitlines()[-1].replace('"', "")
    for words in (was, now, f"--allow-change {name}", "epoch_1.pt"):
        assert words in said
    assert (made / "events.jsonl").read_bytes() == before


def test_the_change_is_made_where_it_is_insisted_on_and_told(here, made):
    edit(made, "lr = 0.001", "lr = 0.5")
    edit(made, "weight_decay = 0.0", "weight_decay = 0.25")
    go_on("--allow-change", "lr,weight-decay")
    (resumed,) = (r for r in all_records(made) if r["event"] == "resume")
    assert resumed["changes"] == ["lr from 0.001 to 0.5", "weight_decay from 0.0 to 0.25"]
    (group,) = last_state(made)["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)
    go_on()  # it is what the newest checkpoint was made with


def test_another_optimizer_begins_anew(here, made):
    edit(made, 'optimizer = "adam"', 'optimizer = "sgd"')
    edit(made, "momentum = 0.0", "momentum = 0.9")
    go_on("--allow-change", "optimizer,momentum")
    (group,) = last_state(made)["optimizer"]["param_groups"]
    assert group["momentum"] == 0.9
    assert read_json(made / "result.json")["status"] == "completed"


def test_a_flag_is_refused_and_insisted_on_in_the_same_way(here, refused, made):
    edit(made, 'place = "here"', 'place = "there"')  # the recipe lets it change
    said = refused("train", "run", "--resume", "--epochs", "2", "--lr", "0.5")
    assert "--allow-change lr" in said
    go_on("--lr", "0.5", "--allow-change", "lr")
    assert "lr = 0.5" in (made / "settings.toml").read_text()


def test_a_repeated_command_inherits_what_it_does_not_give(here, refused, made):
    edit(made, "scale = 1.0", "scale = 2.0")
    text = (made / "settings.toml").read_text().replace("lr = 0.001", "lr = 0.5")
    (made / "settings.toml").write_text(f"virtual_ranks = 2\n{text}")
    Path("small.py").write_text(WITH_OPTION)
    command = ("small.py", "--run-dir", "run", "--resume", "--epochs", "2")
    _, request = parse([*command])
    settings = request.settings
    assert (settings.virtual_ranks, settings.lr, settings.deterministic) == (2, 0.5, True)
    assert (request.options.scale, settings.epochs) == (2.0, 2)
    assert "--virtual-ranks 4" in refused("train", *command, "--virtual-ranks", "4")
    assert "--scale 1.0" in refused("train", *command, "--scale", "1.0")
    assert "--batch-size 40" in refused("train", "run", "--resume", "--batch-size", "40")
    Path("small.py").write_text(WITH_OPTION.replace('"batch_size": 10', '"weight_decay": 0.1'))
    assert "weight_decay = 0.1 in the settings" in refused("train", *command)


def test_what_is_the_best_is_asked_anew_of_another_metric(here, made):
    go_on("--monitor", "loss", "--allow-change", "monitor")
    index = read_index(made / "checkpoints")
    assert (index.monitor, index.mode) == ("loss", "min")
    assert [entry.metric is None for entry in index.checkpoints] == [True, False]
    assert read_json(made / "result.json")["best"]["metric"] == "loss"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--allow-change lr", "--resume"),
        ("--resume --allow-change lt", "'lr'"),
        ("--resume --allow-change seed", "new run"),
        ("--resume --seed 7", "42"),
        ("--resume --engine lightning", "--engine lightning"),
    ],
)
def test_what_cannot_be_allowed_is_refused(refused, made, flags, says):
    assert says in refused("train", str(made), *flags.split())


def test_a_run_named_without_resume_says_that_it_begins_anew(here, made):
    train_here(str(made), "--run-dir", "another", "--epochs", "1")
    start = all_records(here / "another")[0]
    assert "samestep train run --resume" in start["notes"][0]
    assert not start["resumed"]


def test_a_damaged_line_and_no_index_are_told_with_the_line(refused, made):
    (made / "checkpoints" / "index.json").unlink()
    events = made / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*lines[:2], "garbage\n", *lines[2:]]))
    said = refused("train", "run", "--resume", "--epochs", "2")
    assert str(events) in said
    assert "line 3" in said


@pytest.mark.parametrize("target", [["run"], ["small.py", "--run-dir", "run"]])
def test_the_same_batch_size_per_rank_goes_on_no_other(here, trained, made, target):
    shutil.copy(trained.parent / "small.py", here)
    size = tomllib.loads((made / "settings.toml").read_text())["batch_size"]
    command = [*target, "--resume", "--epochs", "2", "--batch-size-per-rank"]
    _, request = parse([*command, str(size)])
    assert (request.settings.batch_size, request.settings.batch_size_per_rank) == (size, None)
    with pytest.raises(UserError, match=rf"--batch-size-per-rank {size + 1}.* {size}\b"):
        parse([*command, str(size + 1)])
