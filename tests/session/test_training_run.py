"""One execution of a run as a function call, and whether a training passes a sweep's rung."""

import math
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import read_records
from samestep.base.run.directory import SWEEP
from samestep.base.run.records import KINDS
from samestep.core.session.halving import halving_of
from samestep.core.session.training_run import Shown, run_session
from samestep.core.training.stopping import ReceivedSignal
from samestep.launch.ranks.world import World
from samestep.shell.api.call import as_in_fresh_process
from samestep.shell.commands.train import parse
from tests import tiny
from tests.command_line import read_json

FLAGS = ("--epochs", "2", "--threads", "1")


def session(target: Path, *flags: str, stop_at: int | None = None) -> dict[str, Any]:
    """Call run_session alone; a signal comes in when the record of step `stop_at` is shown."""
    received, shown, also, begun = ReceivedSignal(), [], [], []

    def show(record):
        shown.append(record)
        if record["event"] == "step" and record["step"] == stop_at:
            received.signum = signal.SIGUSR1

    with as_in_fresh_process():
        outcome = run_session(
            parse([str(target), *flags])[1],
            World(),
            received=received,
            shown=Shown(
                (show, also.append), lambda path: begun.append((str(path), len(shown))), math.inf
            ),
        )
    assert also == shown
    return {"shown": shown, "begun": begun, "outcome": outcome}


def test_every_record_that_is_kept_was_shown_and_the_run_is_there_before_the_first(tmp_path):
    run = tmp_path / "run"
    told = session(tiny.write_recipe(tmp_path), "--run-dir", str(run), *FLAGS)
    assert told["begun"] == [(str(run), 0)]
    shown = [record for record in told["shown"] if record["event"] != "progress"]
    assert shown == list(read_records(run))
    assert [shown[0]["event"], shown[-1]["event"]] == ["start", "stop"]
    for record in shown:  # as run/records.py documents it; an evaluation has metrics, too
        kind = KINDS[record["event"]]
        msgspec.convert(record, kind)
        if record["event"] != "evaluation":
            assert record.keys() <= {"event", *kind.__struct_fields__}
    assert (told["outcome"].path, told["outcome"].signum) == (run, 0)
    result = read_json(run / "result.json")
    assert result["status"] == "completed"
    assert result["test"]["checkpoint"] == tiny.read_index(run)["best"]["path"]
    assert 50e6 < result["peak_memory_bytes"] < 50e9
    assert result["seconds_to_first_step"] is None, "the clock was set back"


def test_where_the_best_checkpoint_is_damaged_the_next_is_tested(uninterrupted, tmp_path):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    best = tiny.read_index(run)["best"]["path"]
    (run / "checkpoints" / best).write_bytes(b"")
    tiny.resumed(run)
    *_, tested = (r for r in tiny.all_records(run) if r.get("split") == "test")
    assert any(best in problem for problem in tested["problems"])
    assert tested["checkpoint"] != best
    assert read_json(run / "result.json")["test"]["checkpoint"] == tested["checkpoint"]


MODES = st.sampled_from(["min", "max"])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(2, 5), MODES)
@settings(max_examples=40)
def test_at_a_rung_the_best_nth_of_those_that_came_so_far_go_on(values, factor, mode):
    with tempfile.TemporaryDirectory() as place:
        sweep = Path(place)
        (sweep / SWEEP).touch()
        for come, value in enumerate(values, 1):
            is_hopeless = halving_of(sweep / f"run-{come}", factor, mode, World())
            best_first = sorted(values[:come], reverse=mode == "max")
            worst_that_goes_on = best_first[max(1, come // factor) - 1]
            goes_on = value <= worst_that_goes_on if mode == "min" else value >= worst_that_goes_on
            assert is_hopeless(factor, value) == (not goes_on)


@given(st.integers(2, 5), st.integers(1, 130))
@settings(max_examples=40)
def test_between_the_rungs_all_go_on(factor, epoch):
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / SWEEP).touch()
        best, worst = (halving_of(Path(place, name), factor, "min", World()) for name in "ab")
        assert not best(epoch, 0.0)
        assert worst(epoch, 1.0) == (epoch in {factor**k for k in range(9)})


def test_a_metric_that_is_no_number_is_the_worst(tmp_path):
    (tmp_path / SWEEP).touch()
    first, second = (halving_of(tmp_path / name, 2, "max", World()) for name in "ab")
    assert not first(1, -5.0)
    assert second(1, math.nan)
