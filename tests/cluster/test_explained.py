"""What a job's log says of a crash, of ranks that hang until the limit, and of a bad node."""

import json
import re

from tests.cluster.jobs import samestep, submit, write_recipe
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
    size = ("--nodes", "2", "--ntasks-per-node", "1", "--restarts", "0", "--max-restarts", "0")
    launchers = [("--launcher", name) for name in ("srun", "torchrun")]
    for job in [submit(sandbox, tmp_path, "mine.py", *size, *how) for how in launchers]:
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


# The name of rank 0's node means nothing on node2, as where a node's resolver is broken.
PROLOG = """#!/bin/sh
test "$SLURMD_NODENAME" = node1 || echo export MASTER_ADDR=no-such-host.invalid
"""


def test_a_node_that_is_not_fit_is_named_and_excluded(sandbox, tmp_path):
    write_recipe(tmp_path)
    prolog = tmp_path / "prolog.sh"
    prolog.write_text(PROLOG)
    prolog.chmod(0o755)
    env = ("--env", f"SLURM_TASK_PROLOG={prolog}")
    job = submit(sandbox, tmp_path, "tiny.py", "--nodes", "1-2", "--preflight", *env)
    job.wait("COMPLETED")
    (said,) = [line for line in job.log.splitlines() if "(restart 1)" in line]
    assert "roll call: rank 1 of 2 never came" in said
    assert said.count("node2") >= 2
    assert sandbox.field(job.job, "ExcNodeList") == "node2"
    assert job.result()["world_size"] == 1
    assert len([r for r in job.all_records() if r["event"] == "start"]) == 1
    shown = samestep(sandbox, tmp_path, "slurm", "status", job.job).stdout
    assert "excluded node2" in shown
    restarts = json.loads((job.run / "slurm.json").read_text())
    assert restarts["excluded"] == ["node2"]
