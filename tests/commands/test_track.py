"""`samestep track`: runs that never had a tracker, twice, damaged ones, and what is no run."""

import os
import shutil
from pathlib import Path

import pytest

from samestep.base.run.directory import lock_run
from samestep.base.run.files import hold
from tests import tiny
from tests.command_line import call, refusal
from tests.tracking import own_tracker
from tests.tracking.readers import expected
from tests.tracking.test_following import TAKES, TRACKER, sent, what


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    tiny.trained(tiny.write_recipe(folder), folder / "run", "--epochs", "1")
    return folder / "run"


@pytest.fixture
def run(finished, tmp_path):
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def track(capfd):
    def tracked(*arguments, code=0):
        capfd.readouterr()
        ended = call("track", *map(str, arguments))
        printed, told = capfd.readouterr()
        assert ended == code, printed + told
        assert "Traceback" not in told
        if code:
            assert told.count("samestep: ") == 1
        return " ".join((printed + told).split())

    return tracked


def test_a_run_that_never_had_a_tracker_is_sent_once(track, run):
    before = tiny.files(run)
    text = track(run, "--to", TRACKER, "--project", "later", "--name", "it", "--tags", "x,y")
    assert "own_tracker sent to https://tracker.example/the-run" in text
    assert sent(run) == expected(run)
    (start,), (finish,) = what(run, "start"), what(run, "finish")
    assert (start["project"], start["name"], start["tags"]) == ("later", "it", ["x", "y"])
    assert finish["status"] == "completed"
    text = track(run, "--to", TRACKER, code=2)
    assert f"{run} already at https://tracker.example/the-run" in text
    assert sent(run) == expected(run)
    after = tiny.files(run)
    assert {name: after[name] for name in before if name != "run.lock"} == {
        name: content for name, content in before.items() if name != "run.lock"
    }, "what the run had is as it was"


def test_checkpoints_are_sent_when_they_are_asked_for_as_far_as_they_are_there(track, run):
    (run / "checkpoints" / "checkpoint_step_4.pt").unlink()
    track(run, "--to", TRACKER, "--checkpoints")
    files = [line["file"] for line in what(run, "checkpoint")]
    assert files == ["checkpoint_step_4.pt", "checkpoint_step_8.pt", "checkpoint_epoch_1.pt"]


def _damage_deliveries(run):
    (run / "tracking").mkdir()
    (run / "tracking" / "own_tracker.json").write_text("{")


# What is wrong with a run → how it comes about, and the file to name.
DAMAGED = {
    "no such directory": (shutil.rmtree, "run"),
    "no records": (lambda run: (run / "events.jsonl").unlink(), "events.jsonl"),
    "records that cannot be read": (
        lambda run: (run / "events.jsonl").write_bytes(b"\xff\n\x00\n"),
        "events.jsonl",
    ),
    "damaged deliveries": (_damage_deliveries, "own_tracker.json"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_cannot_be_sent_is_refused(track, run, name):
    damage, file = DAMAGED[name]
    damage(run)
    assert file in track(run, "--to", TRACKER, code=2)
    assert not own_tracker.lines(run)


def test_without_a_key_a_run_is_not_sent_and_the_message_says_what_to_do(track, run, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(run))
    text = track(run, "--to", "wandb", code=2)
    assert "WANDB_API_KEY" in text
    assert "--offline" in text
    assert not (run / "tracking").exists()


def test_of_a_damaged_run_what_is_there_is_sent_and_what_is_not_is_said(track, run):
    (run / "settings.toml").write_text("lr = = 3")
    (run / "result.json").write_text('{"status":')
    (run / "environment.json").unlink()
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    lines[2] = b'{"event": "st\n'
    (run / "events.jsonl").write_bytes(b"".join(lines) + b'{"event": "torn')
    text = track(run, "--to", TRACKER)
    for file in ("settings.toml", "result.json", "environment.json"):
        assert text.count(f"{run / file} ") == 1
    assert text.count(f"{run / 'events.jsonl'}: ") == 2, "for the line in it, and for its last one"
    assert "line 3 " in text
    assert [step for step, _, _ in sent(run)["train"]] == [1, *range(3, 12)]
    (start,), (finish,) = what(run, "start"), what(run, "finish")
    assert (start["project"], start["settings"]) == ("samestep", {})
    assert finish["status"] == "killed", "nothing says how it ended"


def test_a_run_that_goes_on_or_is_being_sent_is_left_to_its_own_process(track, run, tmp_path):
    held = lock_run(run)
    message = refusal("track", str(run), "--to", TRACKER, folder=tmp_path / "output")
    assert f"process {os.getpid()} " in message
    held.close()
    (run / "tracking").mkdir()
    held = hold(run / "tracking" / "own_tracker.lock")
    assert f"process {os.getpid()} " in track(run, "--to", TRACKER, "--timeout", "1", code=1)
    held.close()
    assert not own_tracker.lines(run)
    track(run, "--to", TRACKER)


def test_one_tracker_that_fails_does_not_keep_the_run_from_another(track, run, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("def start(run): raise ConnectionError('gone')\n" + TAKES)
    text = track(run, "--to", f"{broken},{TRACKER}", code=1)
    assert "ConnectionError: gone" in text
    assert sent(run) == expected(run)
    log = (run / "tracking" / "broken.log").read_text()
    assert "Traceback" in log, "whoever wrote it finds where"
