"""Doctor inside a real Slurm: well where the job is, red where it was started wrongly."""

import json
import subprocess
import sys

PYTHON = (sys.executable, "-m", "samestep", "doctor", "--json", "--budget-s", "2")
TWO_EACH = ("-N2", "--ntasks-per-node=2")


def doctor(sandbox, folder, *srun: str, options: tuple[str, ...] = (), **more: str):
    """Run doctor by srun; return its exit code, its rows by name, and what went to stderr."""
    done = subprocess.run(
        ["srun", *srun, *PYTHON, *options], cwd=folder, capture_output=True, text=True,
        check=False, timeout=90, env=sandbox.environment | {"OMP_NUM_THREADS": "1"} | more,
    )  # fmt: skip
    return done.returncode, rows_of(done.stdout), done.stderr


def rows_of(printed: str) -> dict[str, dict[str, str]]:
    """Return the rows of the one table that was printed."""
    return {row["name"]: row for row in json.loads(printed)["checks"]}


def reds(rows) -> set[str]:
    """Return the names of the red rows; each says what to do."""
    red = {name for name, row in rows.items() if row["status"] == "red"}
    assert all(rows[name]["advice"] for name in red)
    return red


def in_script(sandbox, folder, command: str, *options: str) -> dict[str, dict[str, str]]:
    """Run a command in a batch script; return the rows of the table that it printed."""
    line = f"OMP_NUM_THREADS=1 {command} {' '.join(PYTHON)} > table.json"
    job = sandbox.submit(folder, f"{line}\necho $?", *options)
    sandbox.wait_for_state(job, "COMPLETED")
    return rows_of((folder / "table.json").read_text())


def test_two_nodes_of_a_healthy_allocation_have_no_red_row(sandbox, tmp_path):
    code, rows, errors = doctor(sandbox, tmp_path, *TWO_EACH)
    assert (code, reds(rows)) == (0, set()), errors
    assert rows["launcher"]["found"] == "srun: 4 ranks on 2 nodes"
    assert rows["nodes"]["found"] == "2 × 2 ranks: node1, node2"
    assert "node1 (node 0) – node2 (node 1)" in rows["links"]["found"]
    assert rows["time limit"]["status"] == "green"
    assert list(tmp_path.iterdir()) == []


def test_the_script_tells_its_signal_requeue_and_time_limit(sandbox, tmp_path):
    rows = in_script(
        sandbox, tmp_path, "srun", *TWO_EACH, "--time=10", "--requeue", "--signal=USR1@60"
    )
    assert reds(rows) == set()
    assert rows["requeue"]["status"] == "green"
    assert "00:10:00" in rows["time limit"]["found"]
    # Given to sbatch itself it is nowhere to be seen.
    assert "in the script" in rows["stop signal"]["found"]


def test_python_without_srun_in_a_script_is_red(sandbox, tmp_path):
    rows = in_script(sandbox, tmp_path, "", *TWO_EACH, "--no-requeue")
    assert reds(rows) == {"slurm start"}
    assert "one process, though job" in rows["slurm start"]["found"]
    assert rows["requeue"]["status"] == "yellow"


def test_fewer_tasks_than_nodes_times_tasks_per_node_are_red(sandbox, tmp_path):
    rows = in_script(sandbox, tmp_path, "srun --ntasks=3", *TWO_EACH)
    assert reds(rows) == {"tasks"}
    assert "3 tasks, but 2 nodes × 2 tasks per node = 4" in rows["tasks"]["found"]


def test_a_torchrun_for_each_task_is_red(sandbox, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "-m")
    done = subprocess.run(
        ["srun", "-N1", "--ntasks-per-node=2", *torchrun, "samestep", *PYTHON[3:]], cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=90,
        env=sandbox.environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    # Two worlds of one rank each: two tables, which is the fault itself.
    assert done.stdout.count('"torchrun in srun"') == 2
    assert done.stdout.count("srun started 2 torchruns on a node, each with 1 rank") == 2


def test_a_master_that_does_not_resolve_is_red_on_all_nodes_without_waiting(sandbox, tmp_path):
    code, rows, errors = doctor(sandbox, tmp_path, *TWO_EACH, MASTER_ADDR="no-such-host.invalid")
    assert code == 1
    assert reds(rows) == {"master address"}
    assert errors.count("samestep: [rank 2 on node2] master address: no-such-host.invalid") == 1


def test_a_folder_that_only_one_node_has_is_red(sandbox, tmp_path):
    # Each task in a folder of its own, as where a node's own disk is taken for a shared one.
    apart = 'mkdir -p $SLURMD_NODENAME && cd $SLURMD_NODENAME && exec "$@"'
    done = subprocess.run(
        ["srun", *TWO_EACH, "bash", "-c", apart, "bash", *PYTHON], cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=90,
        env=sandbox.environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 1
    rows = rows_of(done.stdout)
    assert reds(rows) == {"shared folder"}
    assert "rank 2 on node2 does not see it (2 ranks in all)" in rows["shared folder"]["found"]
