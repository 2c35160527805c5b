"""Verbs that only ask Slurm are quick: they import no torch; flags win over files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "empty").mkdir(exist_ok=True)
    place = {"PATH": str(folder / "empty"), "XDG_CONFIG_HOME": str(folder / "config")}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **place},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def submit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text("print(1)\n")
    return run(folder, "-m", "samestep", "slurm", "submit", "mine.py", "--dry-run", *words)


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "submit", "verdict", "sandbox"])
def test_a_verbs_module_imports_no_torch(tmp_path, verb):
    text = f"import sys, samestep.commands.slurm.{verb}; assert 'torch' not in sys.modules"
    done = run(tmp_path, "-W", "error", "-c", text)
    assert done.returncode == 0, done.stderr


def test_a_users_script_is_made_a_job_without_torch(tmp_path):
    (tmp_path / "mine.py").write_text("print(1)\n")
    text = (
        "import sys; from samestep.cli import main\n"
        "code = main(['slurm', 'submit', 'mine.py', '--dry-run'])\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = run(tmp_path, "-c", text)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH" in done.stdout


def directives(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.MULTILINE))


def test_flags_win_over_the_projects_file_and_that_over_the_users(tmp_path):
    user = tmp_path / "config" / "samestep"
    user.mkdir(parents=True)
    (user / "samestep.toml").write_text('[slurm]\naccount = "u"\nqos = "u"\npartition = "u"\n')
    (tmp_path / "samestep.toml").write_text(
        '[slurm]\nqos = "p"\npartition = "p"\nmodule = ["a"]\nrequeue = false\n'
    )
    done = submit(tmp_path, "--partition", "f", "--module", "b")
    assert done.returncode == 0, done.stderr
    found = directives(done.stdout)
    assert (found["account"], found["qos"], found["partition"]) == ("u", "p", "f")
    loaded = re.findall(r"^module load (\S+)", done.stdout, re.MULTILINE)
    assert loaded == ["a", "b"]  # repeatable flags add to those of the file
    assert "#SBATCH --no-requeue" in done.stdout


def test_an_unknown_key_names_the_file_and_the_keys(tmp_path):
    (tmp_path / "samestep.toml").write_text("[slurm]\nnode = 2\n")
    done = submit(tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path / 'samestep.toml'}: [slurm] has no key 'node'" in done.stderr
    assert "Did you mean 'nodes'? The keys are: account, after," in done.stderr


def test_a_secret_for_the_ranks_is_refused_and_never_shown(tmp_path):
    for word in ("API_KEY=hunter2", "MY-TOKEN=hunter2"):
        done = submit(tmp_path, "--env", word)
        assert done.returncode == 2
        assert "--env" in done.stderr
        assert "hunter2" not in done.stdout + done.stderr


def test_no_verb_shows_the_verbs_and_is_a_mistake(tmp_path):
    done = run(tmp_path, "-m", "samestep", "slurm")
    assert done.returncode == 2
    assert "verbs:" in done.stdout
