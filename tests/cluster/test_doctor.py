"""Doctor inside a real Slurm: well where the job is, red where it was started wrongly."""

import re
import subprocess
import sys
from pathlib import Path

from tests.doctor.tables import reds, rows_of
from tests.processes import TIMEOUT_S

DOCTOR = ("samestep", "doctor", "--json", "--budget-s", "1")
PYTHON = (sys.executable, "-m", *DOCTOR)
TWO_EACH = ("-N2", "--ntasks-per-node=2")


def srun(sandbox, folder, *command: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command by srun, with its options before it and `more` variables."""
    return subprocess.run(
        ["srun", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=sandbox.environment | {"OMP_NUM_THREADS": "1"} | more,
    )


def in_script(sandbox, folder, command: str, *options: str, head: str = ""):
    """Run doctor by a command in a batch script; return its exit code and its rows."""
    line = f"OMP_NUM_THREADS=1 {command} --json --budget-s 1 > {folder}/table.json"
    (folder / "work").mkdir()
    job = sandbox.submit(folder, f"{head}\ncd work\n{line}\necho $?", *options)
    sandbox.wait_for_state(job, "COMPLETED")
    code = (folder / "out").read_text().splitlines()[-1]
    return int(code), rows_of((folder / "table.json").read_text())


def command_of_the_handbook(folder: Path) -> str:
    """Return how the page starts doctor in a job, with a shared folder of ours."""
    lines = (Path(__file__).parents[2] / "docs" / "how-to" / "doctor.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("srun samestep doctor ")]
    return line.replace("/shared", str(folder))


def own_signals(sandbox) -> str:
    """Return the lines of samestep's own job script that ask for a signal and pass it on."""
    submit = ("slurm", "submit", "spiral", "--time", "10:00", "--dry-run")
    lines = sandbox.run("samestep", *submit).splitlines()
    return "\n".join(line for line in lines if line.startswith(("#SBATCH --signal", "trap ")))


def test_a_healthy_job_has_no_red_row_and_tells_of_its_nodes_and_settings(sandbox, tmp_path):
    options = (*TWO_EACH, "--time=10", "--requeue")
    command = command_of_the_handbook(tmp_path)
    code, rows = in_script(sandbox, tmp_path, command, *options, head=own_signals(sandbox))
    assert str(tmp_path / "runs") in rows["run directory"]["found"]
    assert (code, reds(rows)) == (0, set()), rows
    assert rows["launcher"]["found"] == "srun: 4 ranks on 2 nodes"
    assert rows["nodes"]["found"] == "2 × 2 ranks: node1, node2"
    assert "node1 (node 0) – node2 (node 1)" in rows["links"]["found"]
    assert "00:10:00" in rows["time limit"]["found"]
    told = {name: rows[name]["status"] for name in ("requeue", "stop signal", "time limit")}
    assert set(told.values()) == {"green"}, told
    assert rows["stop signal"]["found"].endswith("trap")
    assert list((tmp_path / "work").iterdir()) == []


def test_python_without_srun_in_a_script_is_red(sandbox, tmp_path):
    # A signal that is given to sbatch itself is nowhere to be seen.
    options = (*TWO_EACH, "--no-requeue", "--signal=USR1@90")
    code, rows = in_script(sandbox, tmp_path, "samestep doctor", *options)
    assert (code, reds(rows)) == (1, {"slurm start"})
    assert "4 tasks" in rows["slurm start"]["found"]
    assert rows["requeue"]["status"] == rows["stop signal"]["status"] == "yellow"


def test_too_few_tasks_and_a_folder_that_only_one_node_has_are_a_red_row_each(sandbox, tmp_path):
    # Each task in a folder of its own, as where a node's own disk is taken for a shared one.
    apart = 'mkdir -p $SLURMD_NODENAME && cd $SLURMD_NODENAME && exec "$@"'
    command = f"srun --ntasks=2 bash -c '{apart}' bash samestep doctor --timeout-s 6"
    code, rows = in_script(sandbox, tmp_path, command, *TWO_EACH)
    assert (code, reds(rows)) == (1, {"tasks", "shared folder"})
    assert "= 4" in rows["tasks"]["found"]
    assert "rank 1 on node2" in rows["shared folder"]["found"]


def test_a_torchrun_for_each_task_is_red(sandbox, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "-m")
    done = srun(sandbox, tmp_path, "-N1", "--ntasks-per-node=2", *torchrun, *DOCTOR)
    assert done.returncode == 1
    # Two worlds of one rank each: two tables, which is the fault itself.
    assert done.stdout.count('"torchrun in srun"') == 2
    assert len(re.findall(r"2 torchruns .* 1 rank\b", done.stdout)) == 2


def test_a_master_that_does_not_resolve_is_red_on_all_nodes_without_waiting(sandbox, tmp_path):
    done = srun(sandbox, tmp_path, "-N2", "-n3", *PYTHON, MASTER_ADDR="no-such-host.invalid")
    assert (done.returncode, reds(rows_of(done.stdout))) == (1, {"master address"})
    # Rank 0 shows the table, rank 1 is on its node and silent.
    said = "samestep: [rank 2 on node2] master address: no-such-host.invalid does not resolve."
    assert done.stderr.count(said) == done.stderr.count("samestep: ") == 1
