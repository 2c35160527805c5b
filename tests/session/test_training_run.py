"""One execution of a run as a function call: its records, its end by a signal, its failure."""

import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from samestep import read_records
from samestep.run.records import KINDS
from tests import tiny
from tests.command_line import read_json
from tests.processes import run_ranks

FLAGS = ("--epochs", "2", "--threads", "1")
NAN_LATER = tiny.RECIPE.replace(
    "    return nn.functional.cross_entropy(outputs, targets)",
    "    seen.append(1)\n"
    "    if len(seen) == 15:\n"
    '        raise KeyError("lost")\n'
    "    return nn.functional.cross_entropy(outputs, targets)",
).replace("\nrecipe = ", "\nseen = []\nrecipe = ")


def execute(target: str, flags: tuple[str, ...], stop_at: int | None = None) -> dict[str, Any]:
    """Call run_session alone; a signal comes in when the record of step `stop_at` is shown."""
    import time

    from samestep.commands.train import parse
    from samestep.ranks.world import World
    from samestep.session.training_run import run_session
    from samestep.training.stopping import ReceivedSignal

    _, request = parse([target, *flags])
    received, shown, begun = ReceivedSignal(), [], []

    def show(record):
        shown.append(record)
        if record["event"] == "step" and record["step"] == stop_at:
            received.signum = signal.SIGUSR1

    told: dict[str, Any] = {"shown": shown, "begun": begun}
    try:
        told["outcome"] = run_session(
            request,
            World(),
            received=received,
            show=show,
            begin=lambda path: begun.append((str(path), len(shown))),
            started_at=time.time(),
        )
    except Exception as error:
        told["error"] = type(error).__name__
    return told


def session(target: Path, *flags: str, folder: Path, stop_at: int | None = None) -> dict[str, Any]:
    output = folder / f"output-{len(list(folder.iterdir()))}"
    (told,) = run_ranks(execute, 1, output, str(target), flags, stop_at)
    return told


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """The directory of a whole run, beside its recipe, and what was told of it."""
    folder = tmp_path_factory.mktemp("whole")
    recipe, run = tiny.write_recipe(folder), folder / "run"
    return run, session(recipe, "--run-dir", str(run), *FLAGS, folder=folder)


def test_every_record_that_is_kept_was_shown_and_the_run_is_there_before_the_first(whole):
    run, told = whole
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
    assert read_json(run / "result.json")["status"] == "completed"


def test_a_run_that_a_signal_stopped_is_not_tested_and_goes_on_from_the_exact_step(whole, tmp_path):
    recipe, run = tiny.write_recipe(tmp_path), tmp_path / "run"
    told = session(recipe, "--run-dir", str(run), *FLAGS, folder=tmp_path, stop_at=7)
    assert told["outcome"].signum == signal.SIGUSR1
    stopped_at = told["shown"][-1]["step"]
    assert 7 <= stopped_at <= 8
    result = read_json(run / "result.json")
    assert result.keys() == read_json(whole[0] / "result.json").keys()
    assert (result["status"], result["reason"]) == ("stopped", "SIGUSR1")
    assert (result["steps"], result["test"]) == (stopped_at, None)
    told = session(run, "--resume", folder=tmp_path)
    (resumed,) = (r for r in told["shown"] if r["event"] == "resume")
    assert resumed["step"] == stopped_at
    tiny.assert_same_training(run, whole[0], tolerance=0)


def test_a_run_that_failed_says_why_and_keeps_its_checkpoints(tmp_path):
    recipe, run = tiny.write_recipe(tmp_path, NAN_LATER), tmp_path / "run"
    told = session(recipe, "--run-dir", str(run), *FLAGS, folder=tmp_path)
    assert told["error"] == "EvaluationError"
    result = read_json(run / "result.json")
    assert result["status"] == "failed"
    assert "lost" in result["reason"]
    *_, last = tiny.all_records(run)
    assert (last["event"], last["reason"]) == ("stop", result["reason"])
    assert tiny.newest_announced(run) > 0


def test_a_run_directory_that_is_taken_is_left_as_it_was(whole, tmp_path):
    run, before = whole[0], tiny.files(whole[0])
    told = session(run.parent / "tiny.py", "--run-dir", str(run), *FLAGS, folder=tmp_path)
    assert told["error"] == "UserError"
    assert told["shown"] == told["begun"] == []
    assert tiny.files(run) == before
