"""`samestep compare` as a user runs it, on runs that were trained."""

import json
import sys
from functools import partial

import pytest

from samestep.base.run.records import read_records
from tests import tiny
from tests.reporting.made_runs import write_run

pytestmark = pytest.mark.xdist_group("compare")  # the runs are trained once for all of them


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run = folder / "run"
    tiny.trained(tiny.write_recipe(folder), run, "--max-steps", "30", on=2)
    tiny.resumed(run, "--max-steps", "66")
    return run


@pytest.fixture
def compare(uninterrupted, of_two_ranks, output_of):
    return partial(output_of, "compare", uninterrupted, of_two_ranks)


def test_one_rank_and_two_are_shown_to_be_the_same_training(uninterrupted, compare, tmp_path):
    found = json.loads(compare("--metric", "loss", "--json"))
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
    epochs = [r for r in read_records(uninterrupted) if r["event"] == "evaluation"]
    assert found["by_samples"]["as_recorded"]
    assert found["by_samples"]["values"][0][0] == epochs[0]["loss"]
    assert found["by_samples"]["places"][0] == epochs[0]["epoch"] * 131
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    compare("--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--metric bleu", "'bleu'"),
        ("--plot a.txt", "--plot a.txt"),
        ("--plot a.png", "pip install 'samestep[plot]'"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(here, refused, monkeypatch, flags, named):
    runs = [str(write_run(here / name)) for name in ("one", "two")]
    if "png" in flags:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert named in refused("compare", *runs, *flags.split())
    assert not list(here.glob("a.*"))
