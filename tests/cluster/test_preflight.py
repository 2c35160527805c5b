"""A node that is not fit is named before the ranks start, and the job goes on without it."""

import json

from tests.cluster.jobs import samestep, submit, write_recipe

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
