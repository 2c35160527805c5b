"""`samestep new`: each file it writes trains, learns and verifies as it stands."""

import dataclasses
import json
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from PIL import Image

import samestep
from samestep import read_records
from samestep.shell.commands import demo as demonstration
from samestep.shell.commands.new import KINDS, STARTERS
from tests.api.recipes import made
from tests.command_line import _process_as_it_was, call, train_here, tree
from tests.commands.test_predict_rows import predicted
from tests.loops import same, scripts
from tests.verification.forked import assert_nothing_to_accept, verified

RECIPES = [kind for kind in KINDS if kind != "own-loop"]
# What each reaches on the validation data with its own settings, and what guessing would.
LEARNS = {
    "regression": ("error", 100.0, 10.0),
    "classification": ("accuracy", 1 / 3, 0.85),
    "text": ("accuracy", 1 / 2, 0.95),
    "graph": ("accuracy", 1 / 2, 0.85),
    "images": ("accuracy", 1 / 3, 0.95),
}


@pytest.fixture(autouse=True)
def _process():
    """Forget what a test imported: a name that a module has already is refused."""
    with _process_as_it_was():
        yield


def written(kind: str, folder: Path, name: str = "mine.py") -> Path:
    assert call("new", kind, str(folder / name)) == 0
    return folder / name


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_names_itself_and_the_place_for_data_and_is_short(kind, here, capfd):
    assert call("new", kind, "houses.py") == 0
    printed, told = capfd.readouterr()
    assert told == ""
    lines = (here / "houses.py").read_text().splitlines()
    assert 40 <= len(lines) <= 120
    assert not [line for line in lines if "NAME" in line]
    assert len([line for line in lines if "your data here" in line]) == 1
    shown = re.findall(r"(?:samestep|python|torchrun) .*houses\.py.*", printed)
    assert len(shown) == 2, "what to type next"
    for command in shown:
        assert f"    {command}" in "\n".join(lines), "the file itself shows the same commands"


def test_the_folder_of_the_name_is_where_it_goes_and_no_installed_module_hides_it(here, output_of):
    folder = here / "of mine"
    folder.mkdir()
    assert "samestep train 'of mine/reviews.py'" in output_of("new", "text", "of mine/reviews.py")
    assert "samestep train reviews.py" in (folder / "reviews.py").read_text()
    (here / "houses").mkdir()
    (here / "houses" / "__init__.py").write_text("")
    assert call("new", "regression", "houses.py") == 0


def test_help_has_a_line_for_each_kind_which_each_have_a_file(here, output_of):
    printed = output_of("new", "--help")
    for kind in KINDS:
        assert f"\n  {kind} " in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    for arguments in ((), ("text",)):
        assert "usage: samestep new" in output_of("new", *arguments, code=2)
    assert tree(here) == set()
    assert {path.stem.replace("_", "-") for path in STARTERS.glob("*.py")} == KINDS.keys()


# What is wrong → the arguments, and what of them the one message names.
REFUSED = {
    "an unknown kind": (["regresion", "a.py"], "'regression'"),
    "the name first": (["a.py", "text"], "text a.py"),
    "two names": (["text", "a.py", "b.py"], "a.py b.py"),
    "a flag": (["text", "a.py", "--force"], "--force"),
    "no .py": (["text", "reviews"], "text reviews.py"),
    "no name before .py": (["text", ".py"], "text recipe.py"),
    "a hyphen": (["text", "my-reviews.py"], "text my_reviews.py"),
    "a quote in a script": (["own-loop", "a'b.py"], "own-loop a_b.py"),
    "PyTorch": (["regression", "torch.py"], "regression my_torch.py"),
    "an installed module without .py": (["graph", "numpy"], "graph my_numpy.py"),
    "what runs": (["text", "__main__.py"], "text my___main__.py"),
    "no folder": (["text", "nowhere/a.py"], "mkdir -p nowhere"),
    "a file as folder": (["text", "there.py/a.py"], "there.py/a.py"),
    "a file that is there": (["text", "there.py"], "text there_2.py"),
    "a folder that is there": (["text", "taken.py"], "text taken_2.py"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_one_message_with_what_to_type_and_writes_nothing(name, here, refused, capfd):
    arguments, named = REFUSED[name]
    (here / "there.py").write_text("mine = 1\n")
    (here / "taken.py").mkdir()
    before = tree(here)
    message = refused("new", *arguments)
    assert named in message
    assert tree(here) == before
    assert (here / "there.py").read_text() == "mine = 1\n"
    if typed := re.search(r"Type: samestep (new .*)", message):
        words = shlex.split(typed[1])
        if not {"KIND", "NAME.py"} & set(words):
            assert call(*words) == 0, "what it says to type works"


def test_without_pytorch_geometric_the_install_is_told(here, refused, monkeypatch, output_of):
    install = "pip install 'samestep[graphs]'"
    for module in [m for m in sys.modules if m.partition(".")[0] == "torch_geometric"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "torch_geometric", None)
    assert install in output_of("new", "graph", "molecules.py")
    assert install in refused("train", "molecules.py")


@pytest.mark.parametrize("kind", RECIPES)
def test_it_learns_with_its_own_settings(kind, tmp_path):
    run = tmp_path / "run"
    # One thread: more would wait for each other wherever other processes have the cores.
    train_here(str(written(kind, tmp_path)), "--run-dir", str(run), "--threads", "1")
    metric, guessed, reached = LEARNS[kind]
    found = [r[metric] for r in read_records(run) if r["event"] == "evaluation"]
    assert (min(found) < reached) if reached < guessed else (max(found) > reached), found


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("regression", (1, 2)),
        *(pytest.param(kind, (1, 3), marks=pytest.mark.slow) for kind in RECIPES[1:]),
    ],
)
def test_verify_finds_the_same_training_and_nothing_to_accept(kind, sizes, tmp_path):
    found = verified(written(kind, tmp_path), folder=tmp_path / "ranks", sizes=sizes)
    assert_nothing_to_accept(found, f"{sizes[1]} ranks")


ROWS = 30
TABLE = "area,rooms,age,price\n" + "".join(
    f"{50 + n},{1 + n % 5},{n},{200 + n}\n" for n in range(30)
)
FISH = "length,width,weight,kind\n" + "".join(
    f"{20 + n % 3},7,1.{n % 3},{('bass', 'perch', 'trout')[n % 3]}\n" for n in range(ROWS)
)
REVIEWS = "".join(
    f"{('bad', 'good')[n % 2]}\tit was {('weak', 'fun')[n % 2]}\n" for n in range(ROWS)
)
GRAPHS = "".join(
    json.dumps({"nodes": [[1]] * 3, "edges": [[0, 1], [1, 2], [2, 0]][: 2 + n % 2], "label": n % 2})
    + "\n"
    for n in range(ROWS)
)
OWN = {"regression": TABLE, "classification": FISH, "text": REVIEWS, "graph": GRAPHS}


def write_photos(folder: Path) -> Path:
    for place, name in enumerate(("disc", "square", "stripes")):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(10):
            colour = (20 * number, 100 * place, 50)
            Image.new("RGB", (20, 18), colour).save(folder / "photos" / name / f"{number}.jpg")
    return folder / "photos"


def at_the_place(recipe: Path, data: Path) -> None:
    text, count = re.subn(
        r"(Path \| None) = None  # --- y", rf"\1 = Path({str(data)!r})  # y", recipe.read_text()
    )
    assert count == 1
    recipe.write_text(text)


@pytest.mark.parametrize("kind", RECIPES)
def test_it_trains_on_a_file_put_at_the_place_for_it_and_predicts_it(kind, tmp_path, output_of):
    recipe, run = written(kind, tmp_path), tmp_path / "run"
    if kind == "images":
        data = write_photos(tmp_path)
        files, rows = [data / "disc" / "0.jpg", data / "square" / "0.jpg"], 2
    else:
        data = tmp_path / "data"
        data.write_text(OWN[kind])
        files, rows = [data], REVIEWS.count("\n")
    at_the_place(recipe, data)
    train_here(str(recipe), "--run-dir", str(run), "--epochs", "1")
    (start,) = (r for r in read_records(run) if r["event"] == "start")
    assert 0 < start["num_samples"] < 30
    found = predicted(output_of, run, *files)
    assert len(found) == rows
    name = {"regression": "price", "text": "class", "graph": "class"}.get(kind, "classes")
    assert all(name in one for one in found)
    if kind == "text":  # its lines have no class
        assert not any("target" in one for one in found)
    if kind in ("regression", "classification"):
        first, second, third, *_ = data.read_text().splitlines()
        broken = tmp_path / "broken.csv"
        broken.write_text(f"{first}\n{second}\nn/a{third[third.index(',') :]}\n{second}\n")
        found = predicted(output_of, run, broken, code=1)
        assert [name in one for one in found] == [True, False, True]
        assert "row 2" in found[1]["problem"]
        assert "n/a" in found[1]["problem"]


def test_a_target_of_another_scale_is_refused_with_the_numbers_to_write(tmp_path, refused):
    recipe, run = written("regression", tmp_path), tmp_path / "run"
    header, *rows = TABLE.splitlines()
    (tmp_path / "data").write_text("\n".join([header, *(f"{row}000" for row in rows)]))
    at_the_place(recipe, tmp_path / "data")
    said = refused("train", str(recipe), "--run-dir", str(run))
    lines = re.search(r"TARGET_MEAN = [0-9.e+]+; TARGET_DEVIATION = [0-9.e+]+[0-9]", said)[0]
    text, old = recipe.read_text(), "TARGET_MEAN, TARGET_DEVIATION = 345.0, 137.0"
    assert old in text
    recipe.write_text(text.replace(old, lines))
    train_here(str(recipe), "--run-dir", str(run), "--epochs", "1")


def test_columns_of_another_scale_a_missing_one_and_a_broken_image_are_named(tmp_path, refused):
    data, recipe = tmp_path / "data", written("classification", tmp_path, "fish.py")
    data.write_text(FISH.replace("\n2", "\n2000"))
    at_the_place(recipe, data)
    assert "2000" in refused("train", str(recipe))
    data.write_text("area,rooms\n1,2\n")
    recipe = written("regression", tmp_path, "houses.py")
    at_the_place(recipe, data)
    assert "no column age" in refused("train", str(recipe))
    recipe, photos = written("images", tmp_path, "photos_of.py"), write_photos(tmp_path)
    at_the_place(recipe, photos)
    (photos / "disc" / "half.jpg").write_bytes(b"")
    assert "disc/half.jpg" in refused("train", str(recipe))


@pytest.fixture
def alone(tmp_path) -> Path:
    folder = tmp_path / "alone"
    folder.mkdir()
    scripts.run(written("own-loop", folder), "run", folder=folder)
    return folder / "run"


def test_the_script_learns_the_same_on_two_ranks_as_compare_says(alone, tmp_path, output_of):
    held_out = [r["loss"] for r in read_records(alone) if r["event"] == "evaluation"]
    assert len(held_out) == 10
    assert held_out[-1] < held_out[0] / 4
    scripts.run(written("own-loop", tmp_path), "run", world_size=2, folder=tmp_path)
    same.assert_same(tmp_path / "run", alone)
    found = json.loads(output_of("compare", alone, tmp_path / "run", "--json"))
    assert found["same_training"][0]["verdict"] in ("equal", "rounding")


def test_the_script_that_was_killed_goes_on_to_the_same_bits(alone, tmp_path):
    script = written("own-loop", tmp_path)
    kill = scripts.Strike(45, signal.SIGKILL)
    scripts.run(script, "run", folder=tmp_path, strike=kill, code=-signal.SIGKILL)
    scripts.run(script, "run", folder=tmp_path)
    same.assert_same(tmp_path / "run", alone, tolerance=0)


@pytest.fixture
def played(monkeypatch, tmp_path):
    """The demo's own steps, with a tiny training in place of each."""
    monkeypatch.chdir(tmp_path)
    recipe = made(settings={"log_every": 1})

    def train(run, **more):
        return samestep.train(recipe, run_dir=run, quiet=True, **more)

    def train_and_kill(run, nproc):
        train(run, epochs=1)
        return demonstration.Killed(path=run, step=8, checkpoint=6, processes=3)

    def resume(run, nproc):
        return samestep.train(run, recipe=recipe, resume=True, epochs=4, quiet=True)

    monkeypatch.setattr(demonstration, "train_whole", train)
    monkeypatch.setattr(demonstration, "train_and_kill", train_and_kill)
    monkeypatch.setattr(demonstration, "resume", resume)
    return monkeypatch


def test_equal_trainings_end_with_0_and_fit_80_columns(played, output_of):
    said = output_of("demo")
    assert max(len(line) for line in said.splitlines() if "runs/demo" not in line) <= 80
    for name in ("runs/demo-whole", "runs/demo-killed"):
        assert name in said


def test_trainings_that_differ_end_with_1(played):
    proof = demonstration.proof
    played.setattr(
        demonstration, "proof", lambda *runs: dataclasses.replace(proof(*runs), verdict="rounding")
    )
    assert call("demo") == 1


def test_an_interrupted_demo_does_not_go_on(played):
    whole = demonstration.train_whole
    played.setattr(demonstration, "train_whole", lambda run: whole(run, epochs=1))
    stopped = samestep.TrainedRun.result.fget

    def result(run):
        return {**stopped(run), "status": "stopped"}

    played.setattr(samestep.TrainedRun, "result", property(result))
    assert call("demo") == 130
