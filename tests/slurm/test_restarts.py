"""A job goes on while it makes progress, and gives up with the reason when it does not."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.slurm.verdict import Ending, Restarts, decide, read_ending, read_restarts, settle


def ending(code=0, told="", step=0, *, saved=True, stopped=False) -> Ending:
    return Ending(code=code, told=told, step=step, saved=saved, stopped=stopped, why="it broke.")


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (ending(0), "completed"),
        (ending(0, "USR1"), "completed"),
        (ending(138, "USR1", 5), "again"),
        (ending(138, "", 5), "again"),
        (ending(143, "", 5), "again"),
        (ending(1, "", 5, stopped=True), "again"),
        (ending(137, "", 5), "again"),
        (ending(2, "", 5), "failed"),
        (ending(143, "USR2", 5), "cancelled"),
        (ending(143, "TERM", 5), "ended"),
        (ending(1, "", None), "again"),
        (ending(2, "", None), "failed"),
    ],
)
def test_each_ending_has_its_word(case, word):
    assert decide(case, Restarts(), limit=2).word == word


@given(
    st.lists(st.tuples(st.sampled_from([1, 137, 138, 143]), st.booleans()), max_size=40),
    st.integers(0, 4),
)
def test_a_job_gives_up_after_its_limit_of_starts_without_progress_and_not_before(starts, limit):
    before, step, idle = Restarts(), 0, 0
    for code, progress in starts:
        step += progress
        idle = 0 if progress else idle + 1
        verdict = decide(ending(code, "", step), before, limit)
        if idle > limit:
            assert verdict.word == "failed"
            assert f"{idle} starts in a row" in verdict.text
            return
        assert verdict.word == "again"
        before = verdict.restarts


def write(run, name, table):
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / name).write_text(json.dumps(table))


def test_what_the_ranks_said_last_in_this_start_is_the_reason(tmp_path):
    log = tmp_path / "log"
    log.write_text("samestep: job 1, start 1\nsamestep: old\nsamestep: job 1, start 2\nx\n")
    end = read_ending(tmp_path, code=137, told="", kind="recipe", since=0, log=log)
    assert end.why == "a rank was killed by SIGKILL (out of memory?)."
    log.write_text(log.read_text() + "samestep: The disk is full.\nsrun: error\n")
    end = read_ending(tmp_path, code=2, told="", kind="recipe", since=0, log=log)
    assert end.why == "The disk is full."


def test_a_stop_that_an_earlier_start_left_does_not_count(tmp_path):
    write(tmp_path, "result.json", {"status": "stopped"})
    at = (tmp_path / "result.json").stat().st_mtime
    old = read_ending(tmp_path, code=1, told="", kind="recipe", since=at + 1, log=None)
    new = read_ending(tmp_path, code=1, told="", kind="recipe", since=at - 1, log=None)
    assert (old.stopped, new.stopped) == (False, True)


def test_the_checkpoint_that_a_new_job_found_is_no_progress_of_its_own(tmp_path):
    write(tmp_path, "checkpoints/index.json", {"last": {"step": 12}})
    at = (tmp_path / "checkpoints" / "index.json").stat().st_mtime
    idle = read_ending(tmp_path, code=1, told="", kind="recipe", since=at + 1, log=None)
    assert (idle.step, idle.saved) == (12, False)
    assert decide(idle, read_restarts(tmp_path, 5), 0).word == "failed"
    busy = read_ending(tmp_path, code=1, told="", kind="recipe", since=at - 1, log=None)
    assert decide(busy, read_restarts(tmp_path, 5), 0).word == "again"


def test_a_failed_job_leaves_why_in_its_result(tmp_path):
    end = read_ending(tmp_path, code=2, told="", kind="recipe", since=0, log=None)
    settle(tmp_path, decide(end, Restarts(job=4), 2), end)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "failed"
    assert result["reason"] == "failed: the ranks ended with exit code 2."


def test_the_reason_that_the_ranks_left_is_kept_and_one_of_an_earlier_start_is_not(tmp_path):
    write(tmp_path, "result.json", {"status": "failed", "reason": "failed: KeyError", "steps": 3})
    (tmp_path / "settings.toml").touch()
    at = (tmp_path / "result.json").stat().st_mtime
    for since, reason in ((at - 1, "failed: KeyError"), (at + 1, "failed: the ranks ended")):
        end = read_ending(tmp_path, code=2, told="", kind="recipe", since=since, log=None)
        verdict = decide(end, Restarts(job=4), 2)
        assert verdict.text.startswith(reason)
        settle(tmp_path, verdict, end)
        result = json.loads((tmp_path / "result.json").read_text())
        assert result["reason"].startswith(reason)
        assert result["steps"] == 3


def test_the_restarts_of_another_job_do_not_count(tmp_path):
    end = ending(138, "USR1", 5)
    settle(tmp_path, decide(end, Restarts(job=4), 2), end)
    assert read_restarts(tmp_path, 4) == Restarts(job=4, restarts=1, step=5)
    assert read_restarts(tmp_path, 5) == Restarts(job=5)
