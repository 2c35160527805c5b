"""A job goes on while it makes progress, and gives up with the reason when it does not."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.base.run.directory import STEPPED
from samestep.cluster.slurm import restarts
from samestep.cluster.slurm.rank_ends import LATE, STDERR, first_end, memory_word
from samestep.cluster.slurm.restarts import (
    NOT_PASSED,
    PREFLIGHT,
    Restarts,
    decide,
    failed_twice,
    read_preflight,
    read_restarts,
    with_failures,
)
from samestep.launch.ranks.process import FAILURE
from samestep.launch.ranks.watched import STALLED
from samestep.shell.commands.slurm import verdict


def ending(code=0, received="", step=0, **more) -> restarts.Ending:
    usual = {"saved": True, "mistake": code == 2, "stopped": False, "why": "it broke."}
    return restarts.Ending(code=code, received=received, step=step, **(usual | more))


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (ending(1, "", 5, stopped=True), "again"),
        (ending(2, "", 5), "failed"),
        # srun ended the other ranks, or torchrun said no more than that one had failed.
        (ending(143, "", 5, mistake=True), "failed"),
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
        decision = decide(ending(code, "", step), before, limit)
        if idle > limit:
            assert decision.word == "failed"
            assert f" {idle} start" in decision.text
            return
        assert decision.word == "again"
        before = decision.restarts


@pytest.fixture
def run(tmp_path) -> Path:  # a run directory whose job has begun a start ten seconds ago
    (tmp_path / "settings.toml").touch()
    (tmp_path / restarts.BEGUN).touch()
    os.utime(tmp_path / restarts.BEGUN, (time.time() - 10,) * 2)
    return tmp_path


def write(run: Path, name: str, table: dict | str, *, before: bool = False) -> None:
    path = run / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    if before:
        os.utime(path, (time.time() - 100,) * 2)


def read(run: Path, code: int, log: Path | None = None, **more) -> restarts.Ending:
    how = {"code": code, "received": "", "kind": "recipe", "log": log} | more
    return restarts.read_ending(run, **how)


def test_what_the_ranks_said_last_is_the_reason_and_exit_code_2_of_one_a_mistake(run):
    log = run / "log"
    log.write_text("samestep: job 1, start 1\nsamestep: old\nsamestep: job 1, start 2\nx\n")
    assert read(run, 137, log).why.count("SIGKILL") == 1
    log.write_text(log.read_text() + "samestep: The disk is full.\nsrun: error\n")
    assert read(run, 2, log).why == "The disk is full."
    said = "samestep: job 1, start 1, on n\nsrun: error: node2: task 1: Exited with exit code 2\n"
    log.write_text(f"{said}srun: Terminating StepId=1.0\nsrun: error: node1: task 0: Terminated\n")
    assert read(run, 143, log, kind="script").mistake


def test_a_mistake_that_a_rank_left_counts_whatever_the_launcher_made_of_it(run):
    name, left = FAILURE.format(rank=1), {"rank": 1, "code": 2, "message": "There is no data.csv."}
    write(run, name, left, before=True)
    assert not read(run, 143).mistake
    write(run, name, left)
    decision = decide(read(run, 143), Restarts(), 2)
    assert decision.word == "failed"
    assert "[rank 1] There is no data.csv." in decision.text


@pytest.mark.parametrize(("stepped", "word"), [(True, "again"), (False, "failed")])
def test_a_hang_starts_again_where_steps_were_taken(run, stepped, word):
    said = "rank 1 on node2 took no part in step 30 for 15 s; it stands in slow.py:12"
    left = {"rank": 1, "code": STALLED, "message": said, "stalled": True, "time": 2.0}
    write(run, FAILURE.format(rank=1), left)
    lost = {"rank": 0, "code": 1, "message": "lost", "lost_peer": True, "time": 1.0}
    write(run, FAILURE.format(rank=0), lost)
    if stepped:
        (run / STEPPED).touch()
    log = run / "log"
    log.write_text("samestep: job 1, start 1\nsrun: error: node1: task 0: Killed\n")
    end = read(run, 137, log)
    assert (end.code, end.why) == (STALLED, said)
    assert decide(end, Restarts(), 2).word == word


def test_what_code_raised_is_tried_again_after_steps_and_no_preflight_is(run):
    left = {"rank": 1, "code": 2, "message": "OSError: the disk is gone", "raised": True}
    write(run, FAILURE.format(rank=1), left)
    assert decide(read(run, 2), Restarts(), 2).word == "failed"
    (run / STEPPED).touch()
    assert decide(read(run, 2), Restarts(), 2).word == "again"
    (run / PREFLIGHT).write_text(table(("same versions", ())))
    end = read(run, 1, received=NOT_PASSED, num_nodes=2)
    assert (end.mistake, end.nodes) == (True, ())
    assert decide(end, Restarts(), 2).word == "failed"


@pytest.mark.parametrize("steps", [None, 3, 5])
def test_a_training_that_srun_ended_early_with_code_0_is_started_again(run, steps):
    write(run, "checkpoints/index.json", {"last": {"step": 5}})
    if steps:
        write(run, "result.json", {"status": "completed", "steps": steps}, before=True)
    word = "completed" if steps == 5 else "again"
    assert decide(read(run, 0), Restarts(), 2).word == word


@pytest.mark.parametrize("code", [1, 137])
def test_where_no_step_was_ever_taken_the_job_is_not_started_again(run, code):
    end = read(run, code)
    assert decide(end, Restarts(), 2).word == "failed"
    assert decide(replace(end, received="USR1"), Restarts(), 2).word == "again"
    (run / STEPPED).touch()
    assert decide(read(run, code), Restarts(), 2).word == "again"


def test_the_log_promises_only_what_there_is_and_excluded_nodes_are_kept():
    promises = {7: "step 7 ", 0: "without a checkpoint", None: "starts again"}
    for step, promise in promises.items():
        assert promise in decide(ending(1, "", step), Restarts(), 2).text
    assert "stopped at step 7; " in decide(ending(1, "USR1", 7), Restarts(), 2).text
    saved, hung = (decide(ending(137, "USR2", 7, stopped=s), Restarts(), 2) for s in (True, False))
    assert saved.word == hung.word == "cancelled"
    assert "saved at step 7" in saved.text
    assert "saved at" not in hung.text
    assert "step 7" in hung.text
    end = ending(1, NOT_PASSED, stepped=False, nodes=("node2",))
    before = with_failures(Restarts(job=7), end)
    assert failed_twice(before) == ("node2",)
    once = with_failures(Restarts(), ending(1, nodes=("node1",)))
    for stopped in (ending(138, "USR1", nodes=("node1",)), replace(end, received="", stopped=True)):
        assert with_failures(once, stopped) == once  # the time limit, or someone's signal
    twice, other = (with_failures(once, ending(1, nodes=(n,))) for n in ("node1", "node2"))
    assert (failed_twice(once), failed_twice(twice), failed_twice(other)) == ((), ("node1",), ())
    went = decide(end, before, 0, without=("node2",))
    assert (went.word, went.restarts.excluded) == ("again", ("node2",))
    assert failed_twice(went.restarts) == ()
    assert decide(end, before, 0).word == "failed"  # Slurm has too few others
    assert decide(end, before, 1).word == "again"
    assert decide(end, before, 1, requeue=False).word == "failed"


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "failed"),
        ("RuntimeError: boom", "again"),
        ("FATAL:   could not open image /images/none.sif", "failed"),
        ("slurmstepd: error: pyxis: couldn't start container", "failed"),
        ("samestep: failed: node1 does not see the run directory /r", "failed"),
    ],
)
def test_a_script_that_cannot_begin_is_not_started_again(run, line, word):
    (run / "settings.toml").unlink()  # a script makes no run of samestep
    log = run / "log"
    is_python = not line.startswith(("FATAL", "slurmstepd", "samestep"))
    trace = "0: Traceback (most recent call last):\n" if is_python else ""
    log.write_text(
        f"samestep: job 1, start 1, on n\n{trace}0: {line}\n"
        "srun: error: node1: task 0: Exited with exit code 1\n"
    )
    end = read(run, 1, log, kind="script")
    decision = decide(end, Restarts(), 2)
    assert (decision.word, line in decision.text) == (word, True)


@pytest.mark.parametrize(("before", "word"), [(False, "failed"), (True, "again")])
def test_what_srun_lost_of_a_ranks_last_words_is_read_from_the_ranks_own_file(run, before, word):
    (run / "settings.toml").unlink()
    log = run / "log"
    log.write_text(
        "samestep: job 1, start 2, on n\nsrun: error: node2: task 1: Exited with exit code 1\n"
        "srun: error: node1: task 0: Terminated\n"
    )
    said = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'\n"
    write(run, STDERR.format(rank=1), said, before=before)
    end = read(run, 1, log, kind="script")
    decision = decide(end, Restarts(), 2)
    assert decision.word == word
    assert ("No module named 'torch'" in decision.text) != before


def test_the_checkpoint_that_a_new_job_found_is_no_progress_of_its_own(run):
    write(run, "checkpoints/index.json", {"last": {"step": 12}}, before=True)
    idle = read(run, 1)
    assert (idle.step, idle.saved) == (12, False)
    assert decide(idle, read_restarts(run, 5), 0).word == "failed"
    write(run, "checkpoints/index.json", {"last": {"step": 12}})
    assert decide(read(run, 1), read_restarts(run, 5), 0).word == "again"
    write(run, "result.json", {"status": "stopped"}, before=True)
    assert not read(run, 1).stopped


@pytest.mark.parametrize(("before", "reason"), [(False, "KeyError"), (True, "exit code 2")])
def test_the_reason_that_this_start_left_is_kept_and_an_earlier_ones_is_not(run, before, reason):
    left = {"status": "failed", "reason": "failed: KeyError", "steps": 3}
    write(run, "result.json", left, before=before)
    end = read(run, 2)
    decision = decide(end, Restarts(job=4), 2)
    assert reason in decision.text
    restarts.settle(run, decision, end)
    result = json.loads((run / "result.json").read_text())
    assert reason in result["reason"]
    assert result["steps"] == 3


@pytest.mark.parametrize(
    ("end", "word", "says"),
    [
        (ending(138, "USR1", 5), "ended", r".* step 5; .*submit RUN"),
        (ending(137, "", 5), "failed", r"failed: it broke; .*submit RUN"),
        (ending(0, "USR1", 5), "completed", r"completed\."),
    ],
)
def test_a_job_that_may_not_be_requeued_promises_no_restart(end, word, says):
    decision = decide(end, Restarts(), 2, requeue=False)
    assert decision.word == word
    assert re.fullmatch(says, decision.text)


@pytest.mark.parametrize("step", [None, 5])
def test_ranks_that_were_killed_for_passing_over_the_warning_made_no_progress(run, step):
    pulse = {"rank": 1, "step": 29, "phase": "backward", "age_s": 40.0, "call": "all_reduce #9"}
    ranks = [pulse | {"rank": 0, "age_s": 39.0}, pulse]
    write(run, ".pulse-n2.json", {"time": time.time(), "host": "node2", "ranks": ranks})
    log = run / "log"
    log.write_text(f"{LATE} 20 s, so they are killed.\nsrun: error: node1: task 0: Killed\n")
    end = read(run, 137, log, received="LATE")
    decision = decide(replace(end, step=step, stepped=True), Restarts(), 2)
    assert (decision.word, decision.restarts.without_progress) == ("again", 1)
    assert "rank 1 on node2: " in decision.text
    assert "all_reduce #9" in decision.text
    assert "29" in decision.text


@pytest.mark.parametrize(
    ("line", "counts", "word"),
    [
        ("srun: error: node2: task 1: Out Of Memory", "", "srun"),
        ("slurmstepd-node2: error: Detected 1 oom-kill event(s) in StepId=4.0.", "", "Slurm"),
        ("", "low 0\noom_kill 2\n", "2 oom_kill"),
        ("", "oom_kill 0\n", "(out of memory?)"),
    ],
)
def test_a_killed_rank_ran_out_of_memory_where_it_is_said(tmp_path, line, counts, word):
    events = tmp_path / "system.slice" / "slurmstepd.scope" / "job_4" / "memory.events"
    events.parent.mkdir(parents=True)
    events.write_text(counts)
    lines = [line, "srun: error: node2: task 1: Killed"]
    end = first_end(lines)
    memory = end.memory or memory_word(lines, 4, tmp_path)
    assert word in replace(end, memory=memory).sentence


def test_sacct_has_the_word_on_memory_where_there_is_no_cgroup(tmp_path, monkeypatch):
    sacct = tmp_path / "sacct"
    sacct.write_text('#!/bin/sh\ntest "$1" = --jobs=4 && echo OUT_OF_MEMORY || echo FAILED\n')
    sacct.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert memory_word([], 4, tmp_path).startswith("sacct says")
    assert memory_word([], 5, tmp_path) == ""


def test_a_warned_script_is_told_how_it_goes_on_and_restarts_are_of_one_job(tmp_path):
    warned, plain = (decide(ending(0, received, None), Restarts(), 2) for received in ("USR1", ""))
    assert (warned.word, warned.text.startswith(plain.text)) == ("completed", True)
    assert warned.text != plain.text
    assert decide(ending(1, "USR1", None), Restarts(), 2).word == "again"
    end = ending(138, "USR1", 5)
    restarts.settle(tmp_path, decide(end, Restarts(job=4), 2), end)
    assert read_restarts(tmp_path, 4) == Restarts(job=4, restarts=1, step=5)
    assert read_restarts(tmp_path, 5) == Restarts(job=5)


def test_a_script_that_keeps_checkpoints_there_goes_on_as_a_recipe_does(run):
    before = Restarts()
    for step in (5, 9, 12, 20):  # each start is stopped by its time limit, and saves
        write(run, "checkpoints/index.json", {"last": {"step": step}})
        write(run, "result.json", {"status": "stopped"})
        end = read(run, 138, received="USR1", kind="script")
        decision = decide(end, before, 2)
        assert (decision.word, decision.restarts.without_progress) == ("again", 0)
        before = decision.restarts
    for word in ("again", "again", "failed"):
        end = read(run, 1, kind="script")
        decision = decide(end, before, 2)
        assert decision.word == word
        before = decision.restarts


def table(*rows: tuple[str, tuple[str, ...]]) -> str:
    checks = [{"name": "cores", "status": "green", "found": "2", "advice": "", "hosts": []}]
    row = {"status": "red", "found": "bad", "advice": "mend it"}
    checks += [row | {"name": name, "hosts": hosts} for name, hosts in rows]
    return json.dumps({"checks": checks})


@pytest.mark.parametrize(
    ("can", "flags", "word"),
    [
        (True, ["--exclude"], "again node[3-4],node2\n"),
        (False, ["--exclude"], "again\n"),
        (True, [], "again\n"),  # of a script by an older samestep
    ],
)
def test_a_verdict_tells_what_to_exclude(slurm, run, monkeypatch, capsys, can, flags, word):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    (slurm.folder / "job-7").write_text(
        "JobId=7 ExcNodeList=node[3-4] Command=/a b/job.sh WorkDir=/"
    )
    if not can:
        slurm.break_down()
    (run / PREFLIGHT).write_text(table(("space", ("node2",))))
    verdict.main([str(run), "--code", "1", "--told", NOT_PASSED, *flags])
    out, log = capsys.readouterr()
    assert out == word
    assert "space" in log
    called = [call for call in slurm.calls if call.startswith("sbatch")]
    assert called == ["sbatch --test-only --exclude=node[3-4],node2 /a b/job.sh"] * (len(word) > 6)
    assert read_restarts(run, 7).excluded == (("node2",) if called else ())


LAUNCH = "srun: error: Task launch for StepId=7.0 failed on node n2.here: Communication timeout"


@pytest.mark.parametrize(
    ("written", "line", "num_nodes", "nodes"),
    [
        (table(("space", ("n2",)), ("clock", ())), "", 3, ("n2",)),
        (table(("space", ("n2", "n1"))), "", 2, ()),
        (table(("space", ())), "", 1, ("n1",)),
        (table(("space", ())), "", 2, ()),
        ("", LAUNCH, 2, ("n2.here",)),
        ("", "srun: error: n1.a.b: task 0: Bus error", 2, ("n1.a.b",)),
        ("", "srun: error: n2: task 1: Exited with exit code 1", 2, ("n1",)),
        ("", "srun: error: n2: task 1: Exited with exit code 127", 2, ()),
        ("", "", 2, ("n1",)),
    ],
)
def test_a_preflight_names_the_nodes_that_are_not_fit(tmp_path, written, line, num_nodes, nodes):
    (tmp_path / PREFLIGHT).write_text(written)
    assert read_preflight(tmp_path, [line], "n1", num_nodes).nodes == nodes


def test_slurm_itself_is_asked_whether_a_job_goes_on(run, slurm, monkeypatch, capsys):
    """Lightning requeues by itself and ends with 0; a TERM may be to the script alone."""
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    words = [str(run), "--code", "0", "--told", "USR1", "--kind", "script"]
    said = []
    for restarts_by_slurm in (3, 4):
        slurm.add(12, run, "COMPLETING", comment=f"x Restarts={restarts_by_slurm} Comment=x")
        verdict.main(words)
        said.append(capsys.readouterr())
    assert [one.out for one in said] == ["completed\n", "requeued\n"]
    assert "(restart 1)" in said[1].err
    assert read_restarts(run, 12).restarts == 1
    (run / STEPPED).touch()
    for state, word in (("RUNNING", "again\n"), ("COMPLETING", "ended\n")):
        slurm.add(12, run, state)
        verdict.main([str(run), "--code", "137", "--told", "TERM"])
        assert capsys.readouterr().out == word
