"""One execution of a run as a function call: what it shows."""

import shutil
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from samestep import read_records
from samestep.api.call import as_in_fresh_process
from samestep.commands.train import parse
from samestep.ranks.world import World
from samestep.run.records import KINDS
from samestep.session.training_run import run_session
from samestep.training.stopping import ReceivedSignal
from tests import tiny
from tests.command_line import read_json

FLAGS = ("--epochs", "2", "--threads", "1")


def session(target: Path, *flags: str, stop_at: int | None = None) -> dict[str, Any]:
    """Call run_session alone; a signal comes in when the record of step `stop_at` is shown."""
    received, shown, begun = ReceivedSignal(), [], []

    def show(record):
        shown.append(record)
        if record["event"] == "step" and record["step"] == stop_at:
            received.signum = signal.SIGUSR1

    with as_in_fresh_process():
        outcome = run_session(
            parse([str(target), *flags])[1],
            World(),
            received=received,
            show=show,
            begin=lambda path: begun.append((str(path), len(shown))),
            started_at=time.time(),
        )
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


def test_where_the_best_checkpoint_is_damaged_the_next_best_is_tested_and_it_is_told(
    uninterrupted, tmp_path
):
    run = shutil.copytree(uninterrupted, tmp_path / "run")
    best = tiny.read_index(run)["best"]["path"]
    (run / "checkpoints" / best).write_bytes(b"")
    tiny.resumed(run)
    *_, tested = (r for r in tiny.all_records(run) if r.get("split") == "test")
    assert any(best in problem for problem in tested["problems"])
    assert tested["checkpoint"] != best
    assert read_json(run / "result.json")["test"]["checkpoint"] == tested["checkpoint"]
