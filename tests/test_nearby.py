"""What was not found is looked for nearby, within bounds."""

from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.base.nearby import find_nearby
from samestep.core.recipe import find_recipe
from tests.command_line import RECIPE, call, one_message
from tests.reporting.made_runs import write_run


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Make a project with a recipe in a folder and a run; the current folder is the project."""
    project = tmp_path / "above" / "project"
    (project / "examples").mkdir(parents=True)
    (project / "examples" / "mine.py").write_text(RECIPE)
    (project / "sub" / "deeper").mkdir(parents=True)
    write_run(project / "runs" / "toy-1")
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize(
    ("place", "target", "kind", "found"),
    [
        (".", "mine.py", "file", "examples/mine.py"),
        ("sub", "examples/mine.py", "file", "../examples/mine.py"),
        ("examples", "examples/mine.py", "file", "mine.py"),
        (".", "/elsewhere/mine.py", "file", "examples/mine.py"),
        (".", "other.py", "file", None),
        (".", "toy-1", "run", "runs/toy-1"),
        ("runs", "runs/toy-1", "run", "toy-1"),
        (".", "sub", "runs", None),
    ],
)
def test_it_is_found_as_seen_from_the_folder(project, monkeypatch, place, target, kind, found):
    monkeypatch.chdir(project / place)
    assert find_nearby(target, kind) == found


@pytest.mark.parametrize("name", [".hidden", "node_modules", "venv", "runs/one", "with-cfg"])
def test_folders_of_others_are_not_searched(project, name):
    (project / name).mkdir(parents=True)
    (project / name / "its.py").touch()
    if name == "with-cfg":
        (project / name / "pyvenv.cfg").touch()
    assert find_nearby("its.py", "file") is None


def test_a_link_to_a_folder_is_not_followed(project):
    (project / "sub" / "again").symlink_to(project)
    (project / "one/two/three").mkdir(parents=True)
    (project / "one/two/three/deep.py").touch()
    assert find_nearby("deep.py", "file") == "one/two/three/deep.py"


@pytest.mark.parametrize(
    ("target", "right"), [("mine", "examples/mine.py"), ("toy-1", "runs/toy-1")]
)
def test_the_command_is_told_with_the_place(project, refused, monkeypatch, target, right):
    command = ["train", target, "--lr", "0.1"]
    monkeypatch.setattr("sys.argv", ["samestep", *command])
    assert refused(*command).endswith(f"samestep train {right} --lr 0.1")


@pytest.mark.parametrize(
    "command",
    [
        ("evaluate", "toy-1"),
        ("compare", "toy-1", "runs/toy-1"),
        ("profile", "toy-1"),
        ("slurm", "submit", "toy-1"),
        ("slurm", "status", "toy-1"),
    ],
    ids=" ".join,
)
def test_every_verb_that_takes_a_run_says_where_it_is(project, capfd, command):
    told = one_message(call(*command), capfd.readouterr().err)
    assert "runs/toy-1" in told.replace("compare toy-1 runs/toy-1", "")


def test_the_runs_of_a_folder_are_found_from_another(project, monkeypatch, capfd, output_of):
    monkeypatch.chdir(project / "sub")
    assert "samestep runs ../runs" in output_of("runs")
    assert "../runs" in one_message(call("runs", "other/runs"), capfd.readouterr().err)


LOOP = "def main():\n    with {}('runs/x') as run:\n        pass\nmain()\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LOOP.format("samestep.open_run"), "line 4 .*torchrun"),
        (LOOP.format("open_run"), "line 4 .*torchrun"),
        ("", "samestep check"),
    ],
)
def test_a_loop_or_a_plain_script_is_not_run_to_find_that_it_has_no_recipe(text, told, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(f"import pathlib\npathlib.Path(r'{tmp_path}', 'ran').touch()\n{text}")
    with pytest.raises(UserError, match=rf"{told} .*{path.name}"):
        find_recipe(str(path))
    assert not Path(tmp_path, "ran").exists()


def test_a_recipe_beside_which_a_loop_is_written_stays_a_recipe(tmp_path):
    path = tmp_path / "both.py"
    path.write_text(
        "from samestep.core.recipes.spiral import recipe\ndef main():\n    import samestep\n"
        "    samestep.open_run('runs/x')\n"
    )
    assert find_recipe(str(path)).name == "both"
