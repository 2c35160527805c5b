"""Which job `samestep slurm status`, `logs` and `cancel` take, and what they do without Slurm."""

import json
import os
import re
import time
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest

from samestep.base.run.directory import STEPPED
from samestep.cluster.slurm import queue
from samestep.cluster.slurm.options import JobOptions, keep_options
from samestep.cluster.slurm.restarts import BEGUN
from samestep.shell.commands.slurm import logs
from tests.command_line import call
from tests.slurm.test_training_progress import START, step

STEP = step(10)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "settings.toml").touch()
    (folder / "events.jsonl").write_text(f"{json.dumps(START)}\n{json.dumps(STEP)}\n")
    (folder / BEGUN).write_text("5 0\n")
    for job, at in ((3, 1_000), (5, 2_000)):
        log = folder / f"slurm-{job}.out"
        log.write_text(f"log of {job}\n")
        os.utime(log, (at, at))
    return folder


@pytest.fixture
def told(output_of):
    return partial(output_of, "slurm")


@pytest.mark.parametrize(
    "states", [("COMPLETED", "RUNNING"), ("RUNNING", "FAILED"), ("COMPLETED", "FAILED")]
)
def test_a_run_directory_names_its_job_or_else_the_newest(slurm, run, told, states):
    for job, state in zip((3, 5), states, strict=True):
        slurm.add(job, run, state, log=f"{run}/slurm-{job}.out")
    expected = 3 if states[0] == "RUNNING" else 5
    assert json.loads(told("status", str(run), "--json"))["queue"]["job"] == expected
    assert told("logs", str(run)) == f"log of {expected}\n"
    if "RUNNING" in states:
        told("cancel", str(run))
        assert slurm.calls[-1] == f"scancel --batch --signal=USR2 {expected}"


@pytest.mark.parametrize("verb", ["status", "logs", "cancel"])
def test_a_job_of_another_user_is_refused(slurm, run, refused, verb):
    slurm.add(8, run, uid=os.getuid() + 1, user="eve")
    assert "user eve" in refused("slurm", verb, "8")
    assert not [call for call in slurm.calls if call.startswith("scancel")]
    if verb == "cancel":
        assert str(run) in refused("slurm", "cancel", str(run)), "it has no job of this user's"


def test_the_users_jobs_are_asked_for_once_and_no_filter_hides_one(slurm, run, told, monkeypatch):
    monkeypatch.setenv("LOGNAME", "eve")
    monkeypatch.setenv("USER", "eve")
    slurm.add(9, run, uid=os.getuid() + 1, user="eve")
    for job in (12, 3, 7):
        slurm.add(job, run)
    rows = [row for row in map(str.split, told("status").splitlines()) if "x" in row[1:2]]
    assert [row[0] for row in rows] == ["3", "7", "12"]
    (query,) = slurm.calls
    assert query.startswith("squeue --me --all --states=all ")
    slurm._write("squeue", '[ "$SQUEUE_PARTITION" ] || cat queue\n')
    monkeypatch.setenv("SQUEUE_PARTITION", "x")
    assert {job.job for job in queue.my_jobs()} >= {3, 7, 12}


@pytest.mark.parametrize("how", ["none", "down"])
@pytest.mark.parametrize("name", ["runs/one", "5"])
def test_where_slurm_is_silent_files_tell(slurm, run, told, capfd, refused, monkeypatch, how, name):
    if how == "none":
        monkeypatch.setenv("PATH", str(run))
        says = "squeue" if "/" in name else "scontrol"  # is not on the PATH
    else:
        slurm.break_down()
        says = "(connect failure)"
    shown = told("status", name)
    assert says in shown
    assert "step 10/100" in shown
    table = json.loads(told("status", name, "--json"))
    assert table["queue"] is None
    assert says in table["queue_error"]
    assert call("slurm", "logs", name) == 0
    said = capfd.readouterr()
    assert said.out == "log of 5\n"
    assert says in said.err
    assert says in refused("slurm", "cancel", name)


def test_programs_without_a_configuration_are_told(slurm, tmp_path, refused, monkeypatch):
    monkeypatch.delenv("SLURM_CONF", raising=False)
    program = slurm.folder / "squeue"
    text = program.read_text()
    program.write_text(
        "#!/bin/sh\necho 'squeue: fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    assert "SLURM_CONF" in refused("slurm", "status")
    program.write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    said = refused("slurm", "status")
    assert f"SLURM_CONF is {tmp_path}/slurm.conf" in said
    assert "unset SLURM_CONF" in said
    (tmp_path / "slurm.conf").touch()
    slurm.break_down()
    assert "sandbox status" in refused("slurm", "status")


def test_damaged_records_hide_nothing_else_and_an_empty_log_is_told(slurm, run, told, capfd):
    slurm.add(5, run)
    (run / "events.jsonl").write_text(f"{json.dumps(START)}\n{{torn\n{json.dumps(STEP)}\n")
    shown = told("status", "5")
    assert "RUNNING" in shown
    assert "events.jsonl" in shown
    assert told("status")
    slurm.add(5, run, state="COMPLETED")
    (run / "rank-1.log").touch()
    assert call("slurm", "logs", "5", "--rank", "1") == 0
    printed, told_so = capfd.readouterr()
    assert not printed
    assert "rank-1.log" in told_so


def test_ranks_that_begin_while_all_logs_are_followed_are_shown(slurm, run, told, monkeypatch):
    slurm.add(5, run, log=f"{run}/slurm-5.out")

    def pass_time(_seconds: float) -> None:
        (run / "rank-1.log").write_text("late\n")
        slurm.add(5, run, state="COMPLETED", log=f"{run}/slurm-5.out")

    monkeypatch.setattr(
        logs, "time", SimpleNamespace(sleep=pass_time, monotonic=count(0, 9).__next__)
    )
    assert told("logs", "5", "--rank", "all", "--follow") == "log of 5\n1: late\n"


def of_age(run, seconds: float) -> None:
    at = time.time() - seconds
    for name in ("events.jsonl", STEPPED):
        (run / name).touch()
        os.utime(run / name, (at, at))


def test_a_training_that_hangs_shows_for_how_long_it_took_no_step_and_no_eta(slurm, run, told):
    slurm.add(5, run, elapsed="00:10:00")
    of_age(run, 5)
    assert re.search(r"^ETA +0:45", told("status", "5"), re.MULTILINE)  # 90 steps of 8, 16 a second
    of_age(run, 80)
    for words in (("status", "5"), ("status",)):
        shown = told(*words)
        assert re.search(r"no step for 1:2\d", shown)
        assert not re.search(r"^ETA +\d", shown, re.MULTILINE)
    quiet_s = json.loads(told("status", "5", "--json"))["training"]["quiet_s"]
    assert quiet_s == pytest.approx(80, abs=5)
    slurm.add(5, run, elapsed="00:00:03")  # it has just begun anew
    assert "no step for" not in told("status", "5")


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "CANCELLED"])
def test_what_ended_an_earlier_start_is_told_of_an_ended_job_alone(slurm, run, told, state):
    slurm.add(5, run, state)
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "stop", "step": 10, "reason": "SIGUSR1"}) + "\n")
    (run / "result.json").write_text('{"status": "stopped", "reason": "SIGUSR1"}')
    rows = dict(line.split(None, 1) for line in told("status", "5").splitlines())
    assert ("ended" in rows) is (state == "CANCELLED")
    assert ("ETA" in rows) is (state == "RUNNING")
    training = json.loads(told("status", "5", "--json"))["training"]
    assert training["status"] == ("stopped" if state == "CANCELLED" else "")
    assert (training["eta_s"] is None) is (state != "RUNNING")


def test_a_script_that_is_done_has_begun(slurm, run, told):
    for name in ("settings.toml", "events.jsonl"):
        (run / name).unlink()
    (run / "job.sbatch").write_text("samestep slurm verdict --kind script --restarts 2\n")
    slurm.add(5, run, "COMPLETED")
    rows = dict(line.split(None, 1) for line in told("status", "5").splitlines())
    assert "not begun" not in rows["training"]
    assert rows["ended"] == "completed, exit code 0"


def test_cancel_waits_until_the_jobs_script_can_be_told(slurm, run, told, monkeypatch):
    slurm.add(5, run)
    begun, waited = run / BEGUN, []
    begun.write_text("5 3\n")  # of an earlier start

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            assert not [call for call in slurm.calls if call.startswith("scancel")]
            begun.write_text("5 0\n")

    # Not `time.sleep` itself: another test's thread may still be sleeping in this process.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(queue, "time", clock)
    told("cancel", "5")
    assert len(waited) == 3
    assert slurm.calls[-1] == "scancel --batch --signal=USR2 5"


def test_cancel_says_when_ranks_that_hang_are_killed_and_how_to_go_on(slurm, run, told):
    slurm.add(5, run)
    keep_options(run, JobOptions(signal_s=77))
    said = told("cancel", "5")
    assert " 77 s " in said
    assert f": samestep slurm submit {run}\n" in said
    (run / "settings.toml").unlink()  # as of a script, or before the training has begun
    assert f": sbatch {run}/job.sbatch\n" in told("cancel", "5")


def pulse(run, ages: dict[int, float]) -> None:
    ranks = [
        {"rank": r, "step": 29, "phase": "backward", "age_s": age, "call": "all_reduce #812"}
        for r, age in ages.items()
    ]
    node = {"time": time.time(), "host": "node2", "ranks": ranks}
    (run / ".pulse-node2.json").write_text(json.dumps(node))


def test_the_status_of_a_hang_names_the_rank_its_node_its_step_and_since_when(slurm, run, told):
    slurm.add(5, run)
    pulse(run, {0: 40.0, 3: 49.0, 2: 41.0})
    shown = told("status", "5")
    assert "step 29" in shown, "the records may be older"
    [ranks] = [line for line in shown.splitlines() if line.startswith("ranks ")]
    assert re.findall(r"rank 3 on node2|0:49|all_reduce #812|0:41", ranks) == [
        *("rank 3 on node2", "0:49", "all_reduce #812", "0:41")
    ]


def test_a_job_whose_comment_was_replaced_is_found_by_its_folder(slurm, run, told):
    (run / "job.json").write_text("{}")
    slurm.add(5, run, comment="see ticket 12", log=str(run / "slurm-%j.out"))
    (found,) = json.loads(told("status", "--json"))
    assert (found["queue"]["run"], found["training"]["step"]) == (str(run), 10)
    assert found["queue"]["log"].endswith("/slurm-5.out")


def test_a_forgotten_job_is_listed_and_a_failed_one_says_how_to_go_on(slurm, run, told):
    (run / ".begun").write_text("4 0 my job\n")
    keep_options(run, JobOptions(job_name="next"))  # of a later job, cancelled before it began
    assert re.search(r"^4 +my job  ended ", told("status"), re.MULTILINE)
    slurm.add(4, run, state="TIMEOUT")
    assert f"samestep slurm submit {run}" in told("status", "4")


def test_of_two_jobs_of_one_run_the_later_has_its_steps(slurm, run, told):
    (run / BEGUN).write_text("7 0\n")
    slurm.add(5, run, state="CANCELLED")
    slurm.add(7, run)
    rows = {row[0]: row for row in map(str.split, told("status").splitlines()) if "x" in row[1:2]}
    assert "10" in rows["7"]
    assert "10" not in rows["5"]
    assert json.loads(told("status", "5", "--json"))["training"] is None
    shown = told("status", "5")
    assert "samestep slurm status 7" in shown
    assert "slurm submit" not in shown
    slurm.add(8, run, state="CANCELLED")  # before it began
    assert "has not begun" in told("status", "8")
    # Of a run's jobs: one that runs, one that waits, the one that began last, the newest.
    for job, state, shown in ((7, "TIMEOUT", 7), (9, "PENDING", 9), (3, "RUNNING", 3)):
        slurm.add(job, run, state)
        assert told("status", str(run)).split()[1] == f"{shown},"


def test_a_job_whose_script_has_not_begun_shows_nothing_of_an_earlier_start(slurm, run, told):
    pulse(run, {0: 40.0})
    slurm.add(5, run)
    assert "step 29" in told("status", "5")
    (run / BEGUN).write_text("4 0\n")  # resubmitted: the job is called running before that
    shown = told("status", "5")
    assert "step 10" in shown
    assert "ranks" not in shown
    (run / BEGUN).unlink()  # trained here, then submitted and cancelled in the queue
    slurm.add(5, run, state="CANCELLED", elapsed="00:00:00")
    assert "has not begun" in told("status", "5")


def test_watching_ends_with_the_jobs_and_asks_once_for_each_picture(slurm, run, told, monkeypatch):
    slurm.add(5, run)
    monkeypatch.setattr(
        "samestep.shell.commands.slurm.status.time.sleep",
        lambda _: slurm.add(5, run, state="COMPLETED") or (slurm.folder / "queue").write_text(""),
    )
    told("status", "--watch")
    assert len(slurm.calls) == 2
