"""Doctor inside a real Slurm, well or red as the job was started; `check --here` of a job."""

import json
import subprocess
from pathlib import Path

from tests.checking.planted import BASE, planted
from tests.doctor.situations import reds, rows_of
from tests.processes import TIMEOUT_S

TWO_EACH = ("-N2", "--ntasks-per-node=2")


def in_script(sandbox, folder, command: str, *options: str, head: str = ""):
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


WITH_OWN_PORT = (
    '    dist.init_process_group("gloo")\n',
    """\
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo")
""",
)


def test_the_ranks_of_a_job_on_two_nodes_are_checked_together(sandbox, tmp_path):
    text = planted(WITH_OWN_PORT, ("        sampler.set_epoch(epoch)\n", ""), base=BASE)
    (tmp_path / "train.py").write_text(text)
    said = subprocess.run(
        ("srun", "-N2", "--ntasks-per-node=1", "samestep", "check", "train.py", "--here", "--json"),
        env=sandbox.environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    findings = json.loads(said.stdout)["findings"]
    assert [finding["code"] for finding in findings] == ["SS103"], said.stderr
    assert said.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
