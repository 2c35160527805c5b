"""How far a run has come, by the files in its directory."""

import json

import pytest

from samestep.slurm.queue import Progress, read_progress

START = {"event": "start", "resumed": False, "world_size": 1, "num_samples": 80}
START |= {"total_steps": 100, "steps_per_epoch": 10, "epochs": 10, "global_batch_size": 8}
AGAIN = {**START, "resumed": True}


def step(number: int, loss: float = 0.5) -> dict:
    seen = {"samples": 8 * number, "seconds": 1.0, "samples_per_s": 16.0}
    return {"event": "step", "step": number, "epoch": 1, "loss": loss} | seen


def saved(number: int) -> dict:
    return {"event": "checkpoint", "step": number, "path": f"checkpoints/{number}.pt"}


def resumed(number: int) -> dict:
    return {"event": "resume", "step": number, "checkpoint": f"{number}.pt"}


@pytest.fixture
def write(tmp_path):
    def _write(*records: dict, result: str | None = None, torn: str = "") -> Progress | None:
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / "events.jsonl").write_text(lines + torn)
        if result is not None:
            (tmp_path / "result.json").write_text(result)
        return read_progress(tmp_path)

    return _write


def test_a_running_training_tells_its_step_epoch_loss_and_what_is_left(write):
    progress = write(START, step(10), saved(10), step(20, loss=0.25), torn='{"event": "st')
    found = {"step": 20, "total_steps": 100, "epoch": 3, "epochs": 10, "loss": 0.25}
    assert progress == Progress(**found, checkpoint_step=10, eta_s=80 * 8 / 16.0, starts=1)


def test_a_training_that_has_not_or_only_just_begun_has_no_loss_and_no_eta(tmp_path, write):
    assert read_progress(tmp_path) is None
    assert write() is None
    progress = write(START)
    assert (progress.step, progress.epoch, progress.starts) == (0, 1, 1)
    assert (progress.loss, progress.eta_s, progress.checkpoint_step) == (None, None, None)


def test_a_resumed_training_stands_at_its_checkpoint_and_not_where_it_was_killed(write):
    killed = (START, step(10), saved(10), step(20))
    progress = write(*killed, AGAIN, resumed(10))
    assert (progress.step, progress.checkpoint_step, progress.starts) == (10, 10, 2)
    stop = {"event": "stop", "step": None, "reason": "failed: no disk"}  # at no step of its own
    progress = write(*killed, stop, AGAIN, resumed(10), step(15))
    assert (progress.step, progress.starts) == (15, 2)


def test_the_last_epoch_is_never_exceeded(write):
    assert write(START, step(100)).epoch == 10
    assert write(START | {"epochs": None}, step(100)).epoch == 11


STOPPED = json.dumps({"status": "stopped", "reason": "SIGUSR1"})


def test_an_ended_training_says_how_and_one_that_went_on_does_not(write):
    stop = {"event": "stop", "step": 10, "reason": "SIGUSR1"}
    ended = write(START, step(10), saved(10), stop, result=STOPPED)
    assert (ended.status, ended.why) == ("stopped", "SIGUSR1")
    on = write(START, step(10), saved(10), stop, AGAIN, resumed(10), step(20), result=STOPPED)
    assert on.status == ""


def test_a_run_that_failed_before_it_began_has_its_reason(tmp_path):
    table = {"status": "failed", "reason": "failed: no such data"}
    (tmp_path / "result.json").write_text(json.dumps(table))
    assert read_progress(tmp_path) == Progress(status="failed", why="failed: no such data")


@pytest.mark.parametrize("line", ["{torn", '{"event": "start"}', "\\xff"])
def test_a_damaged_line_inside_the_records_is_told_and_no_traceback(tmp_path, line):
    text = f"{json.dumps(START)}\n{line}\n{json.dumps(step(10))}\n"
    (tmp_path / "events.jsonl").write_bytes(text.encode("latin-1"))
    (tmp_path / "result.json").write_text(json.dumps({"status": "failed", "reason": "no disk"}))
    progress = read_progress(tmp_path)
    assert str(tmp_path / "events.jsonl") in progress.damage
    assert (progress.status, progress.why) == ("failed", "no disk")


@pytest.mark.parametrize("result", ["", "{", "[1]", "null", "\x00"])
def test_a_result_that_cannot_be_read_is_left_aside(write, result):
    stop = {"event": "stop", "step": 10, "reason": "finished"}
    progress = write(START, step(10), stop, result=result)
    assert (progress.step, progress.status, progress.why) == (10, "", "")
