"""What a job's log says of a crash, and of ranks that hang until the time limit."""

import re

from tests.cluster.jobs import samestep, submit
from tests.cluster.sandbox import wait_for

CRASH = """\
import ctypes, os, time
def crash():
    ctypes.string_at(0)
if os.environ["RANK"] == "1":
    crash()
time.sleep(600)
"""
HANG = """\
import signal, time
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print("listens to nobody", flush=True)
time.sleep(600)
"""


def test_a_crash_is_named_by_rank_and_by_the_users_line_under_either_launcher(sandbox, tmp_path):
    (tmp_path / "mine.py").write_text(CRASH)
    for launcher in ("srun", "torchrun"):
        size = ("--nodes", "2", "--ntasks-per-node", "1", "--launcher", launcher)
        job = submit(sandbox, tmp_path, "mine.py", *size, "--restarts", "0", "--max-restarts", "0")
        job.wait("FAILED")
        last = job.log.splitlines()[-1]
        assert re.search(r"rank 1 on node[12] was ended by SIGSEGV", last), job.log
        assert re.search(r"^  at .*mine\.py:3 in crash: ctypes", job.log, re.MULTILINE)


def test_ranks_that_hang_end_before_the_limit_and_a_forbidden_requeue_says_how_to_go_on(
    sandbox, tmp_path
):
    (tmp_path / "mine.py").write_text(HANG)
    limit = ("--time", "1", "--signal-s", "20")
    job = submit(sandbox, tmp_path, "mine.py", "--ntasks-per-node", "2", *limit)
    wait_for(lambda: job.log.count("listens") == 2)
    sandbox.run("scontrol", "update", f"jobid={job.job}", "requeue=0")
    job.wait("FAILED")
    last = job.log.splitlines()[-1]
    assert "had not ended 14 s after the warning" in last
    assert f"sbatch {job.run}/job.sbatch" in last
    assert "restart 1" not in job.log
    shown = samestep(sandbox, tmp_path, "slurm", "status", job.job).stdout
    assert f"sbatch {job.run}/job.sbatch" in shown
