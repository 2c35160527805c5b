"""The job scripts of examples/ on a real Slurm: a reader copies the folder and submits them."""

import json
import shutil
from pathlib import Path

import pytest

from tests import tiny
from tests.checking.planted import BASE, planted
from tests.cluster.sandbox import FINAL
from tests.command_line import read_json, typed
from tests.doctor.situations import reds, rows_of
from tests.examples.programs import ROOT, SPIRAL_LIGHTNING, TRAIN_DISTRIBUTED, epochs, forked, run
from tests.idx_files import write_mnist

RUN_DISTRIBUTED = "mnist_torchrun/run_distributed.slurm"
# Without dropout, whose masks differ by rank, the steps are equal on any number of ranks.
SPIRAL = ("--num-samples", "500", "--dropout", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Give a folder that has the examples, as a reader's has, and small data."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "logs").mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")
    write_mnist(folder / "data" / "mnist")
    return folder


def submit(sandbox, folder, name, *arguments):
    script = folder / "examples" / name
    told = ("sbatch", "--parsable", f"--chdir={folder}", str(script), *arguments)
    return sandbox.run(*told).strip()


def end(sandbox, folder, job, state="COMPLETED"):
    try:
        sandbox.wait_for_state(job, *FINAL)
    finally:
        (output,) = folder.rglob(f"*-{job}.out")
        print(*(log.read_text() for log in folder.rglob(f"*-{job}.*")))  # shown if the test fails
    assert sandbox.state(job) == state
    return output.read_text()


def edit(script, *edits):
    text = script.read_text()
    for before, after in edits:
        assert before in text
        text = text.replace(before, after)
    script.write_text(text)


def last_losses(run_folder):
    result = read_json(run_folder / "result.json")
    assert result["status"] == "completed"
    return [tiny.events(run_folder, "epoch")[-1]["loss"], result["test"]["loss"]]


def test_the_three_spiral_scripts_train_the_same_and_go_on_when_submitted_again(sandbox, folder):
    def start(name, *settings):
        return submit(sandbox, folder, f"spiral_slurm/{name}.sbatch", *SPIRAL, *settings)

    begun = start("one_gpu", "--epochs", "1")
    whole = start("one_node", "--epochs", "2", "--run-dir", "runs/one_node")
    assert "where   1 rank, " in end(sandbox, folder, begun)
    again = end(sandbox, folder, start("several_nodes", "--epochs", "2"))
    assert "where   2 ranks on 2 nodes, " in again
    assert again.count("epoch 2 ") == 1
    assert "epoch 1 " not in again
    assert "where   2 ranks, " in end(sandbox, folder, whole)
    alone = last_losses(folder / "runs" / "one_node")
    assert last_losses(folder / "runs" / "spiral-slurm") == pytest.approx(alone, abs=1e-5)


def test_torchrun_trains_as_on_one_node_and_goes_on_when_submitted_again(sandbox, folder):
    settings = ("--batch-size", "10")
    here = forked(
        *(TRAIN_DISTRIBUTED, *settings, "--epochs", "2", "--checkpoint-dir", "here"),
        folder=folder,
        world_size=2,
    )
    assert here.returncode == 0, here.stderr
    job = submit(sandbox, folder, RUN_DISTRIBUTED, *settings, "--epochs", "1")
    printed = end(sandbox, folder, job)
    assert printed.count("Starting distributed training on 2 CPU ranks\n") == 1
    assert printed.count("Master node: 127.0.0.1\n") == 1
    assert len(epochs(printed)) == 1
    # The reader edits: one node, two ranks on it.
    edit(
        folder / "examples" / RUN_DISTRIBUTED,
        ("#SBATCH --nodes=2", "#SBATCH --nodes=1"),
        ("#SBATCH --cpus-per-task=1", "#SBATCH --cpus-per-task=2"),
        ("\nranks_per_node=${SLURM_GPUS_ON_NODE:-1} ", "\nranks_per_node=2 "),
    )
    job = submit(sandbox, folder, RUN_DISTRIBUTED, *settings, "--epochs", "2")
    again = end(sandbox, folder, job)
    assert "Starting distributed training on 2 CPU ranks\n" in again
    assert "Resuming after epoch 1 from checkpoints/checkpoint_epoch_1.pt\n" in again
    assert epochs(printed) + epochs(again) == epochs(here.stdout)


def test_the_lightning_job_script_trains_on_two_nodes_as_two_ranks_do_here(sandbox, folder):
    # The parts of 1,013 samples, 709, 151 and 153, are odd: two ranks cannot share them equally.
    told = ("--num_samples", "1013", "--max_epochs", "2", "--experiment_name")
    script = str(folder / "examples" / "spiral_lightning" / "train.sbatch")
    options = (f"--chdir={folder}", "--nodes=2", "--ntasks-per-node=1")
    command = ("sbatch", "--parsable", *options, script, *told, "two")
    job = sandbox.run(*command, OMP_NUM_THREADS="1").strip()
    here = run(SPIRAL_LIGHTNING, *told, "here", folder=folder, world_size=2)
    assert here.returncode == 0, here.stderr
    printed = end(sandbox, folder, job)
    first, *_ = lines = printed.splitlines()
    assert first.startswith("Ranks: 2, nodes: 2, device: cpu, ")
    assert len(lines) == 8  # so no line comes twice
    assert epochs(printed) == epochs(here.stdout)
    assert lines[-2] == here.stdout.splitlines()[-2]  # of the test samples
    assert [path.name for path in (folder / "runs" / "two").iterdir()] == ["version_0"]


def test_the_profiling_job_traces_each_number_of_workers_and_compares_them(sandbox, folder):
    script = folder / "examples" / "mnist_profiling" / "profile_workers.slurm"
    edit(script, ("in 0 1 2 4 8;", "in 0 2;"))
    # The sandbox's nodes have fewer cores than the nine that the job asks for.
    options = (f"--chdir={folder}", "--cpus-per-task=1")
    told = ("--data_dir", "data/mnist", "--epochs", "2")
    job = sandbox.run("sbatch", "--parsable", *options, str(script), *told).strip()
    printed = end(sandbox, folder, job)
    (header,) = (line for line in printed.splitlines() if line.startswith("workers "))
    assert header.split()[1:] == ["0", "2"]
    for workers in (0, 2):
        assert (folder / f"trace_single_gpu_workers_{workers}.json").stat().st_size


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


def test_a_healthy_job_has_no_red_row_and_tells_of_its_nodes_and_settings(sandbox, tmp_path):
    options = (*TWO_EACH, "--time=10", "--requeue")
    command = command_of_the_handbook(tmp_path)
    submit = ("slurm", "submit", "spiral", "--time", "10:00", "--dry-run")
    lines = sandbox.run("samestep", *submit).splitlines()
    own = "\n".join(line for line in lines if line.startswith(("#SBATCH --signal", "trap ")))
    code, rows = in_script(sandbox, tmp_path, command, *options, head=own)
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
    command = ("samestep", "check", "train.py", "--here", "--json")
    where = sandbox.environment | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29417"}
    said = typed("srun", "-N2", "--ntasks-per-node=1", *command, folder=tmp_path, **where)
    findings = json.loads(said.stdout)["findings"]
    assert [finding["code"] for finding in findings] == ["SS103"], said.stderr
    assert said.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
