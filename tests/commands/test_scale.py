"""`samestep scale` as a user runs it: real ranks, started one size after the other."""

import json
import os
import sys

import pytest

from tests.command_line import call, end_with_first_failure, tree
from tests.processes import start_ranks
from tests.tiny import RECIPE, write_recipe


def _rank(words: list[str], task: str) -> None:
    """Measure on a rank whose standard output is a file of its own."""
    from samestep.cli import main

    os.environ |= {"SAMESTEP_TASK": task, "OMP_NUM_THREADS": "1"}
    os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT), 1)
    sys.exit(main(words))


@pytest.fixture
def scale(here, monkeypatch, capfd):
    """Measure on forked ranks; return the exit code, and what was printed on output and errors."""
    outputs = here.parent / "outputs"

    def start(num_ranks: int, words: list[str], task: str) -> int:
        ranks = start_ranks(_rank, num_ranks, outputs, words, task)
        code = end_with_first_failure(ranks)
        sys.stderr.write(ranks.output())
        return code

    def measured(*flags: str) -> tuple[int, str, str]:
        code = call("scale", "tiny.py", "--nproc", "1,2", "--device", "cpu", *flags)
        assert (here / "printed").read_text() == ""
        (here / "printed").unlink()
        return code, *capfd.readouterr()

    monkeypatch.setattr("samestep.ranks.start.start_ranks", start)
    return measured


def test_it_measures_each_size_and_keeps_the_runs_where_it_is_told_to(here, scale):
    recipe = write_recipe(here)
    recipe.write_text("print('read')\n" + recipe.read_text())
    flags = "--seconds 0.3 --rounds 1 --run-dir kept --json"
    code, printed, told = scale(*flags.split())
    assert code == 0, told
    assert "Traceback" not in told
    assert "round 1 of 1" in told
    found = json.loads(printed)  # nothing else is on standard output
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
    kept = sorted(path.name for path in (here / "kept").iterdir())
    assert kept == ["strong-2-round-1", "weak-1-round-1", "weak-2-round-1"]


def test_what_fails_on_the_ranks_is_told_once_and_leaves_nothing(here, scale):
    text = "def data(options):\n    raise RuntimeError('no such shelf')\n"
    write_recipe(here, RECIPE.replace("def data(options):\n", text))
    before = tree(here)
    code, printed, told = scale()
    assert code in (1, 2)
    assert told.count("no such shelf") == 1
    assert printed == ""
    assert tree(here) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("spiral --epochs 3", "--epochs"),
        ("spiral --seconds 0", "--seconds is 0.0"),
        ("spiral --engine lightning", "--engine"),
        ("spiral --mode strong --nproc 1,5 --batch-size 4", "--batch-size 4"),
        ("spiral --run-dir full", "full"),
        ("--nproc 1,2", "before --nproc:"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(here, refused, arguments, words):
    (here / "full").mkdir()
    (here / "full" / "file").touch()
    assert words in refused("scale", *arguments.split())
