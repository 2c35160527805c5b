"""The job scripts of examples/ on a real Slurm: a reader copies the folder and submits them."""

import json
import shutil

import pytest

from tests.cluster.sandbox import FINAL
from tests.examples.programs import ROOT, SPIRAL_LIGHTNING, TRAIN_DISTRIBUTED, epochs, run
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
    """Submit a job script of the examples from a folder; return the job's id."""
    script = folder / "examples" / name
    told = ("sbatch", "--parsable", f"--chdir={folder}", str(script), *arguments)
    return sandbox.run(*told).strip()


def end(sandbox, folder, job, state="COMPLETED"):
    """Wait for the end of a job, which must be this one; return what it printed."""
    try:
        sandbox.wait_for_state(job, *FINAL)
    finally:
        (output,) = folder.rglob(f"*-{job}.out")
        print(output.read_text())  # shown where the test fails
    assert sandbox.state(job) == state
    return output.read_text()


def last_losses(run_folder):
    """Return the last epoch's loss in training, and the loss on the test data."""
    records = [json.loads(line) for line in (run_folder / "events.jsonl").read_text().splitlines()]
    result = json.loads((run_folder / "result.json").read_text())
    assert result["status"] == "completed"
    return [[r["loss"] for r in records if r["event"] == "epoch"][-1], result["test"]["loss"]]


def test_the_three_spiral_scripts_train_the_same_and_go_on_when_submitted_again(sandbox, folder):
    first = submit(sandbox, folder, "spiral_slurm/one_gpu.sbatch", *SPIRAL, "--epochs", "1")
    names = ("one_gpu", "one_node", "several_nodes")
    told = {name: (*SPIRAL, "--epochs", "2", "--run-dir", f"runs/{name}") for name in names}
    jobs = {n: submit(sandbox, folder, f"spiral_slurm/{n}.sbatch", *told[n]) for n in names}
    printed = {name: end(sandbox, folder, job) for name, job in jobs.items()}
    assert "where   1 rank, " in printed["one_gpu"]
    assert "where   2 ranks, " in printed["one_node"]
    assert "where   2 ranks on 2 nodes, " in printed["several_nodes"]
    alone = last_losses(folder / "runs" / "one_gpu")
    for name in names[1:]:
        assert last_losses(folder / "runs" / name) == pytest.approx(alone, abs=1e-5)
        assert printed[name].count("epoch 1 ") == 1
    # A run of one rank goes on on two nodes.
    end(sandbox, folder, first)
    again = end(
        *(sandbox, folder),
        submit(sandbox, folder, "spiral_slurm/several_nodes.sbatch", *SPIRAL, "--epochs", "2"),
    )
    assert "epoch 2 " in again
    assert "epoch 1 " not in again
    assert last_losses(folder / "runs" / "spiral") == pytest.approx(alone, abs=1e-5)


def test_torchrun_on_two_nodes_trains_as_it_does_on_one_and_goes_on_when_submitted_again(
    sandbox, folder
):
    settings = ("--batch-size", "10")
    here = run(
        *(TRAIN_DISTRIBUTED, *settings, "--epochs", "2", "--checkpoint-dir", "here"),
        folder=folder,
        world_size=2,
    )
    assert here.returncode == 0, here.stderr
    script = folder / "examples" / RUN_DISTRIBUTED
    printed = end(
        sandbox, folder, submit(sandbox, folder, RUN_DISTRIBUTED, *settings, "--epochs", "1")
    )
    assert printed.count("Starting distributed training on 2 CPU ranks\n") == 1
    assert printed.count("Master node: 127.0.0.1\n") == 1
    assert len(epochs(printed)) == 1
    # The reader edits: one node, two ranks on it.
    edited = script.read_text()
    for before, after in (
        ("#SBATCH --nodes=2", "#SBATCH --nodes=1"),
        ("#SBATCH --cpus-per-task=1", "#SBATCH --cpus-per-task=2"),
        ("\nranks_per_node=${SLURM_GPUS_ON_NODE:-1} ", "\nranks_per_node=2 "),
    ):
        assert before in edited
        edited = edited.replace(before, after)
    script.write_text(edited)
    again = end(
        sandbox, folder, submit(sandbox, folder, RUN_DISTRIBUTED, *settings, "--epochs", "2")
    )
    assert "Starting distributed training on 2 CPU ranks\n" in again
    assert "Resuming after epoch 1 from checkpoints/checkpoint_epoch_1.pt\n" in again
    assert epochs(printed) + epochs(again) == epochs(here.stdout)


def test_one_lightning_job_script_trains_on_one_rank_on_one_node_and_on_two(sandbox, folder):
    # The parts of 1,013 samples, 709, 151 and 153, are odd: two ranks cannot share them equally.
    told = ("--num_samples", "1013", "--max_epochs", "2")
    script = str(folder / "examples" / "spiral_lightning" / "train.sbatch")
    sizes = {"1 x 1": (1, 1), "1 x 2": (1, 2), "2 x 1": (2, 1)}
    jobs = {}
    for name, (nodes, tasks) in sizes.items():
        options = (f"--chdir={folder}", f"--nodes={nodes}", f"--ntasks-per-node={tasks}")
        command = ("sbatch", "--parsable", *options, script, *told, "--experiment_name", name)
        jobs[name] = sandbox.run(*command, OMP_NUM_THREADS="1").strip()
    here = run(SPIRAL_LIGHTNING, *told, "--experiment_name", "here", folder=folder, world_size=2)
    assert here.returncode == 0, here.stderr
    for name, (nodes, tasks) in sizes.items():
        printed = end(sandbox, folder, jobs[name])
        first, *_ = lines = printed.splitlines()
        assert first.startswith(f"Ranks: {nodes * tasks}, nodes: {nodes}, device: cpu, ")
        assert len(lines) == 8  # so no line comes twice
        if nodes * tasks == 2:
            assert epochs(printed) == epochs(here.stdout)
            assert lines[-2] == here.stdout.splitlines()[-2]  # of the test samples
        kept = [path.name for path in (folder / "runs" / name).iterdir()]
        assert kept == ["version_0"]


def test_the_profiling_job_traces_each_number_of_workers_and_compares_them(sandbox, folder):
    script = str(folder / "examples" / "mnist_profiling" / "profile_workers.slurm")
    # The sandbox's nodes have fewer cores than the nine that the job asks for.
    options = (f"--chdir={folder}", "--cpus-per-task=1")
    told = ("--data_dir", "data/mnist", "--epochs", "2")
    job = sandbox.run("sbatch", "--parsable", *options, script, *told).strip()
    printed = end(sandbox, folder, job)
    (header,) = (line for line in printed.splitlines() if line.startswith("workers "))
    assert header.split()[1:] == ["0", "1", "2", "4", "8"]
    for workers in (0, 1, 2, 4, 8):
        assert (folder / f"trace_single_gpu_workers_{workers}.json").stat().st_size
