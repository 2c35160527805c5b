"""A scheduler's warning that comes while PyTorch is still being imported is not lost."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import RECIPE
from tests.processes import TIMEOUT_S

# A process of the real command line gets the signal at the moment at which a module is imported.
SIGNALLED = """
import os, signal, sys
module, *words = sys.argv[1:]
sent = []

def strike(event, details):
    if event == "import" and details[0] == module and not sent:
        sent.append(module)
        os.kill(os.getpid(), signal.SIGUSR1)

sys.addaudithook(strike)
from samestep.cli import main
code = main(words)
assert sent, f"{module} was never imported"
sys.exit(code)
"""


def run(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, module, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.fixture
def here(tmp_path) -> Path:
    (tmp_path / "small.py").write_text(RECIPE)
    return tmp_path


def test_a_warning_during_the_import_of_torch_ends_the_training_with_a_checkpoint(here):
    done = run(here, "torch", "train", "small.py", "--run-dir", "run")
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    result = json.loads((here / "run" / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", "SIGUSR1")
    index = json.loads((here / "run" / "checkpoints" / "index.json").read_text())
    assert (here / "run" / "checkpoints" / index["last"]["path"]).is_file()


def test_a_warning_before_any_rank_has_begun_starts_none(here):
    done = run(here, "torch", "train", "small.py", "--run-dir", "run", "--nproc", "2")
    assert done.returncode == 128 + signal.SIGUSR1, done.stderr
    assert not (here / "run").exists()


def test_another_verb_ends_by_the_signal_at_once(here):
    done = run(here, "tyro", "data", "list")
    assert done.returncode == -signal.SIGUSR1
