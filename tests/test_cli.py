"""The command line before any verb: help, version, and what it costs to ask for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli import VERBS
from samestep.version import __version__
from tests.command_line import call
from tests.processes import TIMEOUT_S

SCRIPT = Path(sys.executable).with_name("samestep")
AS_MODULE = [sys.executable, "-m", "samestep"]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


@pytest.mark.parametrize("command", [[SCRIPT], AS_MODULE], ids=["script", "module"])
def test_help_names_every_verb_and_ends_with_two_examples(command):
    done = run(*command, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    assert_ends_with_two_examples(done.stdout)


def assert_ends_with_two_examples(text: str) -> None:
    *_, examples = text.partition("examples:\n")
    lines = examples.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("  samestep ") for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [
        ("train",),
        ("train", "spiral"),
        ("train", "mnist"),
        ("evaluate",),
        ("data",),
        ("track",),
        ("new",),
        ("runs",),
        ("completion",),
        ("report",),
        ("watch",),
    ],
    ids=" ".join,
)
def test_the_help_of_a_verb_ends_with_two_examples(arguments, capfd):
    assert call(*arguments, "--help") == 0
    printed, told = capfd.readouterr()
    assert told == ""
    assert_ends_with_two_examples(printed)


def test_the_help_of_a_recipe_shows_its_own_options_and_their_defaults(capfd):
    assert call("train", "spiral", "--help-all") == 0
    text = capfd.readouterr().out
    for flag in ("--batch-size", "--lr-scaling", "--hidden-dims", "--noise"):
        assert flag in text
    assert "64 32 16" in text
    assert "(default: 30)" in text, "the recipe's own epochs"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["trian"]], ids=str)
def test_torch_is_not_imported_before_the_verb_is_known(arguments):
    # -X importtime names every module that is imported, on standard error.
    done = run(sys.executable, "-X", "importtime", "-m", "samestep", *arguments)
    names = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "samestep.cli" in names
    assert not {name for name in names if name.split(".")[0] in ("torch", "numpy", "tyro")}


def test_the_version_is_that_of_the_package():
    done = run(*AS_MODULE, "--version")
    assert (done.returncode, done.stdout) == (0, f"samestep {__version__}\n")


def test_without_arguments_the_help_is_shown_and_the_exit_code_says_that_nothing_was_done():
    done = run(*AS_MODULE)
    assert done.returncode == 2
    assert done.stdout.startswith("usage: samestep ")


def test_an_unknown_verb_gives_the_nearest_one():
    done = run(*AS_MODULE, "trian", "spiral")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("samestep: ")
    assert "'trian'" in done.stderr
    assert "'train'" in done.stderr


def test_a_reader_that_leaves_early_sees_no_traceback():
    # A pipe that nobody reads, as after `samestep runs --help | head -1`.
    program = f"exec {sys.executable} -m samestep runs --help | true; exit ${{PIPESTATUS[0]}}"
    done = run("bash", "-c", program)
    assert done.returncode == 141
    assert done.stderr == ""
