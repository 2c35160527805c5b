"""`samestep scale` as a user runs it: real ranks, started one size after the other."""

import json

import pytest

from tests.command_line import refusal, typed
from tests.tiny import write_recipe


def scale(folder, *arguments):
    command = ("-m", "samestep", "scale", *arguments)
    return typed(*command, folder=folder, OMP_NUM_THREADS="1")


def test_it_measures_each_size_and_keeps_the_runs_where_it_is_told_to(tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text("print('read')\n" + recipe.read_text())
    flags = "--seconds 0.3 --rounds 1 --run-dir kept --device cpu --json"
    done = scale(tmp_path, "tiny.py", "--nproc", "1,2", *flags.split())
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "round 1 of 1" in done.stderr
    found = json.loads(done.stdout)  # nothing else is on standard output
    assert {
        mode: [(r["ranks"], r["global_batch_size"]) for r in results]
        for mode, results in found["modes"].items()
    } == {"weak": [(1, 12), (2, 24)], "strong": [(1, 12), (2, 12)]}
    base, two = found["modes"]["weak"]
    assert base["speed_up"] == 1
    assert two["speed_up"] == pytest.approx(two["samples_per_s"] / base["samples_per_s"])
    assert two["efficiency"] == pytest.approx(two["speed_up"] / 2)
    low, high = two["speed_up_interval"]
    assert low <= high
    assert sum(two["phases_ms_per_step"].values()) == pytest.approx(1000 / two["steps_per_s"])
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["strong-2-round-1", "weak-1-round-1", "weak-2-round-1"]


def test_what_fails_on_the_ranks_is_told_once_and_leaves_nothing(tmp_path):
    write_recipe(
        tmp_path,
        "from samestep import Recipe\nfrom torch import nn\n"
        "def data():\n    raise RuntimeError('no such shelf')\n"
        "recipe = Recipe(model=lambda: nn.Linear(1, 1), data=data, "
        "settings={'batch_size': 4})\n",
    )
    before = set(tmp_path.iterdir())
    done = scale(tmp_path, "tiny.py", "--nproc", "1,2", "--device", "cpu")
    assert done.returncode in (1, 2)
    assert done.stderr.count("no such shelf") == 1
    assert done.stdout == ""
    assert {path for path in tmp_path.iterdir() if path.name != "__pycache__"} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("spiral --nproc 1", "--nproc 1"),
        ("spiral --nproc 1,x", "--nproc 1,x"),
        ("spiral --epochs 3", "--epochs"),
        ("spiral --seconds 0", "--seconds is 0.0"),
        ("spiral --rounds 0", "--rounds is 0"),
        ("spiral --engine lightning", "--engine"),
        ("spiral --mode sideways", "--mode"),
        ("spiral --mode strong --nproc 1,5 --batch-size 4", "--batch-size 4"),
        ("spiral --run-dir full", "full"),
        ("spiral --nonsense", "--nonsense"),
        ("--nproc 1,2", "before --nproc:"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(here, refused, arguments, words):
    (here / "full").mkdir()
    (here / "full" / "file").touch()
    assert words in refused("scale", *arguments.split())


def test_under_a_launcher_it_refuses_to_start_ranks_of_its_own(tmp_path):
    assert "torchrun" in refusal("scale", "spiral", world_size=2, folder=tmp_path)
