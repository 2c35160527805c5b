"""A job array: which tasks it has, its script, and its jobs as Slurm lists them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UserError
from samestep.slurm.job_array import array_text, read_array, submit_array
from samestep.slurm.options import JobOptions
from samestep.slurm.queue import find_job, parse_job
from tests.command_line import typed
from tests.slurm.test_queue import RUNNING
from tests.slurm.test_script import job


@given(st.lists(st.integers(0, 99), min_size=1, unique=True), st.none() | st.integers(1, 9))
def test_numbers_of_tasks_are_read_as_they_are_written(tasks, at_once):
    text = ",".join(map(str, tasks)) + (f"%{at_once}" if at_once else "")
    assert read_array(text) == (tasks, at_once)


@pytest.mark.parametrize(
    ("text", "tasks"), [("0-3", [0, 1, 2, 3]), ("1-9:4", [1, 5, 9]), ("0-1,7", [0, 1, 7])]
)
def test_ranges_are_read_as_sbatch_reads_them(text, tasks):
    assert read_array(text) == (tasks, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        *["a", "3-1", "0,5-1", "1,1", "1,", "1%0", "1%", "-1", "1-5:0", "0-2%x", "0-9999999"],
        "0-1" + 30 * "0",
    ],
)
def test_what_is_no_list_of_tasks_is_refused(text):
    with pytest.raises(UserError):
        read_array(text)


@given(st.sampled_from(['/home/it\'s me/a "sweep" of 5%', "/runs/s"]), st.sampled_from([None, 2]))
def test_each_task_runs_its_own_job_script_and_has_its_log_beside_it(folder, at_once):
    jobs = {task: job(JobOptions(time="30"), run=f"{folder}/{task}") for task in (3, 7)}
    text = array_text(jobs, Path(folder), at_once)
    array = "#SBATCH --array=3,7" + (f"%{at_once}" if at_once else "")
    assert array in text.replace('"', "")
    assert "#SBATCH --time=30\n" in text
    assert "/.array/%a/slurm-%j.out" in text
    last = text.splitlines()[-1].removeprefix("exec ")
    said = typed("bash", "-c", f"printf '%s\n' {last}", SLURM_ARRAY_TASK_ID="7")
    assert said.stdout.splitlines() == ["bash", f"{folder}/.array/7/job.sbatch"]


def test_a_task_of_an_array_is_known_by_its_array_and_by_its_run(tmp_path):
    run, link = tmp_path / "lr=1", tmp_path / ".array" / "3"
    run.mkdir()
    link.parent.mkdir()
    link.symlink_to(run)
    line = RUNNING.replace("JobId=19 ", "JobId=19 ArrayJobId=12 ArrayTaskId=3 ")
    line = line.replace("samestep:/home/ada/it's here/runs/b", f"samestep:{link.parent}/%a")
    found = parse_job(line.replace("slurm-19.out", "%a/slurm-%j-of-%A.out"))
    assert (found.job, found.target, found.run) == (19, "12_3", run)
    assert found.log == Path("/home/ada/it's here/runs/b/3/slurm-19-of-12.out")


def test_the_number_of_a_whole_array_is_refused_where_one_job_is_meant(slurm):
    task = RUNNING.replace("JobId=19 ", "JobId=19 ArrayJobId=12 ArrayTaskId=3 ")
    rest = task.replace("ArrayTaskId=3 ", "ArrayTaskId=4-9%2 ")
    for told in (f"{task}\n{task}\n", f"{rest}\n"):
        (slurm.folder / "job-12").write_text(told)
        with pytest.raises(UserError, match="12_0"):
            find_job(12)
    (slurm.folder / "job-12_3").write_text(f"{task}\n")
    assert find_job("12_3").target == "12_3"


def test_an_array_that_slurm_refuses_leaves_nothing(slurm, tmp_path):
    (slurm.folder / "sbatch").write_text("#!/bin/sh\necho 'Invalid job array' >&2\nexit 1\n")
    folder = tmp_path / "runs" / "sweep"
    jobs = {task: job(JobOptions(), run=str(folder / str(task))) for task in (3, 7)}
    with pytest.raises(UserError, match="Invalid job array"):
        submit_array(jobs, folder, None)
    assert not folder.exists()
