"""The style, as `make lint` checks it: each of its commands is a test, beside the others."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RECIPE = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
COMMANDS = RECIPE[1].replace("\t", "").replace("$(BIN)", str(Path(sys.executable).parent))


@pytest.mark.parametrize("command", COMMANDS.splitlines(), ids=lambda line: Path(line).name)
def test_the_code_keeps_its_style(command):
    """`make lint` says the same, and nothing else."""
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def test_no_file_names_the_host_of_a_registry():
    """Where packages and images come from is for the machine's own settings to say."""
    hosts = r"pypi\.org|pythonhosted\.org|anaconda\.org|nvcr\.io|ghcr\.io|docker\.io"
    command = ["git", "grep", "--line-number", "-I", "-E", hosts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == ""
