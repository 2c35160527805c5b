"""`samestep compare` as a user runs it, on runs that were trained."""

import json
import subprocess
import sys

import pytest

from samestep.run.records import read_records
from tests import tiny
from tests.command_line import refusal, run
from tests.reporting.made_runs import write_run

pytestmark = pytest.mark.xdist_group("compare")  # the runs are trained once for all of them


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train the same on one rank and on two, the latter stopped and resumed on one."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = tiny.write_recipe(folder)
    tiny.train(recipe, "--run-dir", str(folder / "one"), folder=folder)
    two = ("--run-dir", str(folder / "two"))
    tiny.train(recipe, *two, "--max-steps", "30", world_size=2, folder=folder)
    tiny.resume(folder / "two", "--max-steps", "66", folder=folder)
    return folder


def compared(folder, *arguments):
    return json.loads(run("compare", *arguments, "--json", folder=folder).printed(0))


def test_one_rank_and_two_are_told_to_be_the_same_training(trained):
    one, two = str(trained / "one"), str(trained / "two")
    found = compared(trained, one, two, "--metric", "loss")
    (same,) = found["same_training"]
    assert same["verdict"] in ("equal", "rounding")
    assert same["steps"] == 66
    assert same["largest"] < 1e-12
    assert not any(difference["another_training"] for difference in found["settings"].values())
    (problem,) = found["runs"][1]["problems"]
    assert "2, then 1 ranks" in problem
    # The phases of the measured epochs add up to their seconds.
    for speed, phases in zip(found["throughput"], found["phases_ms_per_step"], strict=True):
        # The clocks of both are read one after the other, and an epoch takes 20 ms: it is seen when
        # the system runs something else between the two readings.
        assert sum(phases.values()) == pytest.approx(speed["ms_per_step"], rel=0.02, abs=0.2)
    epochs = [r for r in read_records(trained / "one") if r["event"] == "evaluation"]
    assert found["by_samples"]["as_recorded"]
    assert found["by_samples"]["values"][0][0] == epochs[0]["loss"]
    assert found["by_samples"]["places"][0] == epochs[0]["epoch"] * 131


def test_the_tables_fit_a_terminal(trained):
    printed = run(
        "compare", str(trained / "one"), str(trained / "two"), "--target", "0.6", folder=trained
    ).printed(0)
    lines = [line for line in printed.splitlines() if str(trained) not in line]
    assert "The same training?" in lines
    assert max(map(len, lines)) <= 80


def test_the_curves_are_drawn_into_a_file(trained):
    pytest.importorskip("matplotlib")
    picture = trained / "curves.png"
    runs = (str(trained / "one"), str(trained / "two"))
    run("compare", *runs, "--plot", str(picture), folder=trained)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "--plot a.txt" in refusal("compare", *runs, "--plot", "a.txt", folder=trained)


def test_without_matplotlib_it_says_how_to_get_it(tmp_path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two")
    program = (
        "import sys; sys.modules['matplotlib'] = None; from samestep.cli import main\n"
        "sys.exit(main(['compare', 'one', 'two', '--plot', 'x.png']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'samestep[plot]'" in done.stderr
    assert not (tmp_path / "x.png").exists()


def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path):
    runs = [str(write_run(tmp_path / name)) for name in ("one", "two")]
    assert "'bleu'" in refusal("compare", *runs, "--metric", "bleu", folder=tmp_path)
