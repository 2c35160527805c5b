"""The job scripts are good shell, and say the same thing in the same words."""

import re
import shutil

import pytest

from tests.command_line import typed
from tests.examples.programs import JOB_SCRIPTS

SPIRAL = [path for path in JOB_SCRIPTS if path.parent.name == "spiral_slurm"]


def test_shellcheck_finds_nothing():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed: apt install shellcheck")
    done = typed("shellcheck", "--enable=quote-safe-variables", *JOB_SCRIPTS)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", JOB_SCRIPTS, ids=lambda path: path.name)
def test_slurm_sees_every_option_before_the_first_command(path):
    lines = path.read_text().splitlines()
    options = [n for n, line in enumerate(lines) if line.startswith("#SBATCH ")]
    commands = [n for n, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(options) < min(commands)  # sbatch ignores those that come later
    assert {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time", "--output"} <= {
        lines[n].removeprefix("#SBATCH ").split("=")[0] for n in options
    }


def test_the_training_command_is_the_same_in_all_three_spiral_scripts():
    commands = {
        re.search(r"^srun .*\Z", p.read_text(), re.DOTALL | re.MULTILINE)[0] for p in SPIRAL
    }
    assert len(commands) == 1
    assert "samestep train spiral" in commands.pop()
    assert [path.name for path in JOB_SCRIPTS] == [
        *("profile_workers.slurm", "run_distributed.slurm", "train.sbatch"),
        *("one_gpu.sbatch", "one_node.sbatch", "several_nodes.sbatch"),
    ]
