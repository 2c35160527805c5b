"""The job script is text from a pure function: golden files, bash's own reading, shellcheck."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.slurm.options import JobOptions
from samestep.slurm.script import JobScript, sbatch_options, script_text

GOLDEN = Path(__file__).parent / "scripts"


def job(options: JobOptions, **more) -> JobScript:
    plain = {
        "name": "spiral",
        "title": "spiral, recipe.",
        "run": "/home/me/runs/spiral-1",
        "folder": "/home/me",
        "kind": "recipe",
        "venv": "/home/me/.venv",
        "command": (
            "-m",
            "samestep",
            "train",
            "spiral",
            "--run-dir",
            "/home/me/runs/spiral-1",
            "--resume",
        ),
    }
    return JobScript(options=options, **(plain | more))


SCRIPT = {
    "kind": "script",
    "name": "train",
    "command": ("/home/me/train.py", "--my-flag", "it's 1"),
}
JOBS = {
    "recipe": job(JobOptions()),
    "everything": job(
        JobOptions(
            partition="gpu",
            account="physics",
            qos="high",
            nodes="2",
            gpus_per_node=8,
            cpus_per_task=4,
            mem="64G",
            time="2-00:00:00",
            after=("7", "8:any", "9:notok"),
            module=("cuda/12.4", "gcc"),
            conda="torch env",
            env=("NCCL_DEBUG=WARN", "A=b c"),
            interface="ib0",
            sbatch=("--constraint=a100",),
            signal_s=300,
            restarts=5,
        ),
        venv=None,
    ),
    "torchrun": job(
        JobOptions(
            nodes="2", ntasks_per_node=4, cpus_per_task=2, launcher="torchrun", max_restarts=3
        )
    ),
    "elastic": job(JobOptions(nodes="1-4", ntasks_per_node=2, cpus_per_task=3)),
    "elastic_torchrun": job(JobOptions(nodes="1-4", gpus_per_node=2, launcher="torchrun")),
    "script": job(JobOptions(nodes="2", ntasks_per_node=2), **SCRIPT),
    "no_environment": job(JobOptions(requeue=False), venv=None, python="/usr/bin/python3"),
    "torchrun_script": job(JobOptions(ntasks_per_node=2, launcher="torchrun"), **SCRIPT),
    "container": job(
        JobOptions(container="/images/my torch.sif", gpus_per_node=1),
        venv=None,
        mounts=("/data/my set", "/home/me"),
    ),
    "pyxis": job(
        JobOptions(container_image="nvcr.io#nvidia/pytorch:25.01-py3", interface="^docker,lo"),
        venv=None,
        mounts=("/data", "/home/me"),
        python="/home/me/.venv/bin/python",
        **SCRIPT,
    ),
    "quotes": job(
        JobOptions(job_name='my "first" job'),
        run='/home/it\'s me/a "run" of 5%',
        folder="/home/it's me",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_script_is_the_golden_one(name):
    text = script_text(JOBS[name])
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("SAMESTEP_WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_find_nothing_to_say(name):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt install shellcheck")
    path = GOLDEN / f"{name}.sbatch"
    for command in (["bash", "-n"], ["shellcheck"]):
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(("launcher", "tasks"), [("srun", 4), ("torchrun", 1)])
def test_of_a_range_of_nodes_nothing_holds_the_number_of_the_first_start(launcher, tasks):
    options = JobOptions(nodes="2-9", ntasks_per_node=4, cpus_per_task=3, launcher=launcher)
    asked = sbatch_options(job(options))
    assert (asked["nodes"], asked["mincpus"]) == ("2-9", "12")
    assert not {"ntasks", "ntasks-per-node"} & asked.keys()
    text = script_text(job(options))
    assert (
        f'srun --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node={tasks}'
        in text
    )
    same = sbatch_options(job(JobOptions(nodes="3-3", ntasks_per_node=4)))
    assert (same["ntasks-per-node"], "mincpus" in same) == ("4", False)


WORDS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=20)


@settings(max_examples=15)
@given(run=WORDS, argument=WORDS)
def test_any_path_and_any_argument_reach_the_ranks_as_they_are(run, argument):
    text = script_text(job(JobOptions(), run=f"/{run}", command=("train.py", argument)))
    lines = text.splitlines()
    sets = next(line for line in lines if line.startswith("run="))
    first = next(i for i, line in enumerate(lines) if line.startswith("srun "))
    last = next(i for i, line in enumerate(lines) if line == "step=$!")
    program = "\n".join(
        [
            "srun() { printf '%s\\0' \"$@\"; }",
            sets,
            'printf "%s\\0" "$run"',
            "\n".join(lines[first:last]).removesuffix("&"),
        ]
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, check=True)
    words = done.stdout.decode().split("\0")[:-1]
    assert words == [f"/{run}", "--kill-on-bad-exit=1", "python", "train.py", argument]
