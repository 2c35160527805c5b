"""The command line of `samestep slurm` where there is no Slurm."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import RECIPE


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    empty = folder / "no-programs"
    empty.mkdir(exist_ok=True)
    environment = {**os.environ, "PATH": str(empty), "XDG_CONFIG_HOME": str(empty)}
    return subprocess.run(
        [sys.executable, "-m", "samestep", "slurm", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("submit", "tiny.py"), "apt install slurm-wlm munge"),
        (("submit", "tiny.py"), "--dry-run` prints the job script without it"),
        (("status", "12"), "There is no Slurm here"),
        (("nothing",), "The verbs are: submit, status, logs, cancel, sandbox"),
        (("submit", "nowhere.py"), "There is no file nowhere.py"),
        (("submit", "spirla", "--dry-run"), "Did you mean 'spiral'"),
        (("submit", "tiny.py", "--time", "2h"), "--time 2h cannot be read"),
        (("submit", "tiny.py", "--dry-run", "--", "--nproc", "2"), "--nproc is for one machine"),
        (("status", "nowhere"), "neither a job's number nor the directory of a run"),
    ],
)
def test_a_mistake_gets_one_message_and_exit_code_2(tmp_path, words, says):
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = run(tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert done.stderr.count("samestep: ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_misspelt_flag_of_the_training_is_refused_before_anything_is_queued(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = run(tmp_path, "submit", "tiny.py", "--dry-run", "--", "--epoch", "5")
    assert done.returncode == 2
    assert "--epochs" in done.stdout + done.stderr


def test_a_dry_run_needs_no_slurm_and_writes_nothing(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    done = run(tmp_path, "submit", "tiny.py", "--nodes", "2", "--dry-run", "--", "--epochs", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/usr/bin/env bash\n")
    assert "#SBATCH --nodes=2\n" in done.stdout
    assert "--epochs 5 --run-dir" in done.stdout.replace(" \\\n  ", " ")  # a long path has its line
    assert not (tmp_path / "runs").exists()


def test_trackers_go_with_the_job_and_a_misspelt_one_is_refused_before_anything_is_queued(tmp_path):
    (tmp_path / "tiny.py").write_text(RECIPE)
    flags = ("--track", "wandb", "--track-offline", "--track-project", "two words")
    done = run(tmp_path, "submit", "tiny.py", "--dry-run", "--", *flags)
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.replace("\\\n", " ").split())
    assert "--track wandb --track-offline --track-project 'two words'" in words
    done = run(tmp_path, "submit", "tiny.py", "--dry-run", "--", "--track", "wanb")
    assert done.returncode == 2
    assert "Did you mean 'wandb'?" in done.stderr


def test_a_script_that_is_kept_can_be_handed_in_by_hand(tmp_path):
    (tmp_path / "mine.py").write_text("print(1)\n")
    done = run(tmp_path, "submit", "mine.py", "-o", "job.sbatch")
    assert done.returncode == 0, done.stderr
    assert "sbatch job.sbatch" in done.stderr
    text = (tmp_path / "job.sbatch").read_text()
    output = next(line for line in text.splitlines() if line.startswith("#SBATCH --output="))
    assert Path(output.split("=", 1)[1]).parent.is_dir(), "Slurm opens the log in it"


@pytest.mark.parametrize(
    "verb", [(), ("submit",), ("status",), ("logs",), ("cancel",), ("sandbox",)]
)
def test_help_ends_with_two_examples(tmp_path, verb):
    done = run(tmp_path, *verb, "--help")
    assert done.returncode == 0
    assert len(done.stdout.split("examples:\n")[-1].strip().splitlines()) == 2
