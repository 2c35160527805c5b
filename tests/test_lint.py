"""The style: each command of `make lint` is a test, and the linter of prose finds what it is for.
The job scripts are good shell, and say the same thing in the same words.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import typed
from tests.examples.programs import JOB_SCRIPTS

ROOT = Path(__file__).parent.parent
RECIPE = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
COMMANDS = RECIPE[1].replace("\t", "").replace("$(BIN)", str(Path(sys.executable).parent))


@pytest.mark.parametrize("command", COMMANDS.splitlines(), ids=lambda line: Path(line).name)
def test_the_code_keeps_its_style(command):
    """`make lint` says the same, and nothing else."""
    done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


PROSE = Path(__file__).parent.parent / "tools" / "prose.py"


def lint(path: Path, text: str) -> tuple[int, list[str]]:
    path.write_text(text)
    ran = subprocess.run(
        [sys.executable, PROSE, path], capture_output=True, text=True, check=False, timeout=60
    )
    assert not ran.stderr
    return ran.returncode, ran.stdout.splitlines()


AGAINST_THE_WORDS = [
    *("Rank 0 alone writes.", "That is no error.", "It stands beside the file."),
    *("The rank is told its share.", "It takes so many steps.", "The training goes on."),
    *("Nobody waits.", "Whoever needs it can have it.", "It is not without rules."),
    "This continues\nonly if it is\ntold to.",
]


def test_each_sentence_against_the_words_is_found_in_a_page(tmp_path):
    code, lines = lint(tmp_path / "page.md", "\n\n".join(["# A page", *AGAINST_THE_WORDS, ""]))
    assert code == 1
    assert [int(line.split(":")[1]) for line in lines] == [*range(3, 21, 2), 22]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""A module."""\n\n\ndef f():\n    """Do it.\n\n    Rank 0 alone writes.\n    """\n', 7),
        ("x = 1\n# Nobody waits.\n", 2),
        ("x = 1  # it goes\ny = 2  # on later\n", None),
        ("# The run\n# goes on\n# after it.\n", 2),
        ('n = 2\nprint(f"rank {n} alone writes")\n', 2),
        ('print("a name, alone")\n', 1),
    ],
)
def test_python_is_read_in_docstrings_comments_and_strings(tmp_path, source, line):
    code, lines = lint(tmp_path / "module.py", source)
    assert code == int(line is not None)
    assert [f"module.py:{line}:" in found for found in lines] == [True] * code


def test_long_sentences_and_lines_are_found_and_good_text_passes(tmp_path):
    page = "# A page\n\nGood. " + "word\n" * 30 + "end.\n\n" + "short " * 21 + "\n"
    code, lines = lint(tmp_path / "page.md", page)
    assert code == 1
    assert "page.md:3: 31 words" in lines[0]
    assert "page.md:35: 126 characters" in lines[1]
    table = f"| Rank 0 alone | {'word ' * 40}|\n|---|---|\n| `alone` | x |\n"
    code, lines = lint(tmp_path / "page.md", f"# A page\n\n{table}")
    assert code == 1
    assert [line.split(":")[1] for line in lines] == ["3"]
    page = "# A page\n\nThere is no error. Run `goes on` or [this](https://example.org/alone).\n\n"
    page += f"```console\n$ nobody goes on\n```\n\n| only | {'word ' * 40}|\n|---|---|\n"
    assert lint(tmp_path / "page.md", page) == (0, [])
    assert lint(tmp_path / "module.py", 'alone = "alone"\n"""Return the sum."""\n') == (0, [])


def test_the_pages_and_sources_name_no_registry():
    hosts = r"pypi\.org|pythonhosted\.org|anaconda\.org|nvcr\.io|ghcr\.io|docker\.io"
    command = ["git", "grep", "--line-number", "-I", "-E", hosts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == ""


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
