"""`samestep scale` as a user runs it: real ranks, started one size after the other."""

import json
import os
import subprocess
import sys

import pytest

from tests.command_line import refusal
from tests.processes import TIMEOUT_S
from tests.tiny import write_recipe


def scale(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "samestep", "scale", *arguments],
        cwd=folder,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_measures_each_size_and_keeps_the_runs_where_it_is_told_to(tmp_path):
    recipe = write_recipe(tmp_path)
    recipe.write_text("print('read')\n" + recipe.read_text())
    done = scale(
        tmp_path,
        "tiny.py",
        "--nproc",
        "1,2",
        "--seconds",
        "0.3",
        "--rounds",
        "1",
        "--run-dir",
        "kept",
        "--device",
        "cpu",
        "--json",
    )
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
        (["--nproc", "1"], "--nproc 1"),
        (["--nproc", "1,x"], "--nproc 1,x"),
        (["--epochs", "3"], "--epochs"),
        (["--seconds", "0"], "--seconds is 0.0"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--engine", "lightning"], "--engine"),
        (["--mode", "sideways"], "--mode"),
        (["--mode", "strong", "--nproc", "1,5", "--batch-size", "4"], "--batch-size 4"),
        (["--run-dir", "full"], "full"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path, arguments, words, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    arguments = [str(tmp_path / a) if a == "full" else a for a in arguments]
    assert words in refusal("scale", "spiral", *arguments, folder=tmp_path / "out")


def test_under_a_launcher_it_refuses_to_start_ranks_of_its_own(tmp_path):
    assert "torchrun" in refusal("scale", "spiral", world_size=2, folder=tmp_path)


def test_without_a_target_it_says_what_to_name(tmp_path):
    assert "before --nproc:" in refusal("scale", "--nproc", "1,2", folder=tmp_path)
