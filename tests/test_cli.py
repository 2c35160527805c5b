"""The command line before any verb: help, version, and what it costs to ask for them."""

import json
import sys
from pathlib import Path

import pytest

from samestep.base.errors import escape
from samestep.base.plugins import __version__
from samestep.shell.cli import VERBS
from tests.command_line import call, typed
from tests.reporting.made_runs import write_run

SCRIPT = Path(sys.executable).with_name("samestep")
AS_MODULE = ("-m", "samestep")


def assert_ends_with_examples(text: str, verb: str = "") -> None:
    *_, examples = text.partition("examples:\n")
    lines = examples.splitlines()
    assert len(lines) in (2, 3), verb
    assert all("samestep " in line and line.startswith("  ") for line in lines), verb


@pytest.mark.parametrize("command", [(SCRIPT,), AS_MODULE], ids=["script", "module"])
def test_help_names_every_verb_and_ends_with_examples(command):
    done = typed(*command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout
    assert_ends_with_examples(done.stdout)


# Runs commands in one process; prints of each its exit code, what it printed, and which of torch
# and numpy have been imported by then.
WITHOUT_TORCH = """
import contextlib, io, json, sys
from samestep.shell.cli import main
found = {}
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            code = main(command.split())
        except SystemExit as ended:
            code = ended.code
    heavy = sorted({"torch", "numpy"} & {*sys.modules})
    found[command] = (code, printed.getvalue(), heavy)
print(json.dumps(found))
"""
PLAIN = (
    *("runs", "compare one two", "report one", "new --help", "new text mine.py"),
    *("checkpoint list one", "checkpoint verify one"),
    "slurm submit script.py --dry-run",
)
INNER = (
    *("data get", "data list"),
    *(f"checkpoint {v}" for v in ("list", "verify", "export")),
    *(f"slurm {v}" for v in ("submit", "status", "logs", "cancel")),
)


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory) -> dict[str, tuple[int, str, list[str]]]:
    """Commands that need no torch, all in one process, and what each did."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("one", "two", "runs/three"):
        write_run(folder / name)
    (folder / "script.py").write_text("print(1)\n")
    helps = [f"{verb} --help" for verb in (*VERBS, *INNER, "slurm sandbox")]
    commands = json.dumps([*PLAIN, *helps])
    done = typed("-W", "error", "-c", WITHOUT_TORCH, commands, folder=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "one" / "report.html").is_file()
    return json.loads(done.stdout)


def test_help_and_verbs_that_only_read_and_write_files_import_no_torch(without_torch):
    helps = {c: found for c, found in without_torch.items() if c.endswith("--help")}
    assert {command.split()[0] for command in helps} == {*VERBS}
    for command, (code, printed, heavy) in helps.items():
        assert (code, "torch" in heavy) == (0, False), command
        assert_ends_with_examples(printed, command)
    for command in PLAIN:
        code, printed, heavy = without_torch[command]
        assert (code, "torch" in heavy) == (0, False), command
        assert printed
    assert without_torch["runs"][2] == [], "no numpy either"
    assert "18 recorded steps" in without_torch["compare one two"][1]
    assert "#SBATCH" in without_torch["slurm submit script.py --dry-run"][1]


def test_the_help_of_a_recipe_shows_its_own_options_and_their_defaults(output_of):
    text = output_of("train", "spiral", "--help-all")
    for words in ("--batch-size", "--lr-scaling", "--hidden-dims", "--noise", "64 32 16"):
        assert words in text
    assert "(default: 30)" in text, "the recipe's own epochs"


@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        (["--help"], 0, "usage: samestep "),
        (["--version"], 0, f"samestep {__version__}\n"),
        ([], 2, "usage: samestep "),  # nothing was done
        (["trian", "spiral"], 2, ""),
    ],
    ids=str,
)
def test_torch_is_not_imported_before_the_verb_is_known(arguments, code, printed):
    # -X importtime names every module that is imported, on standard error.
    done = typed("-X", "importtime", *AS_MODULE, *arguments)
    assert done.returncode == code
    assert done.stdout.startswith(printed)
    errors = done.stderr.splitlines()
    names = {line.rpartition("|")[2].strip() for line in errors}
    assert "samestep.shell.cli" in names
    assert not {name for name in names if name.split(".")[0] in ("torch", "numpy")}
    said = [line for line in errors if not line.startswith("import time:")]
    if arguments[:1] == ["trian"]:
        (message,) = said
        assert message.startswith("samestep: ")
        assert "'trian'" in message
        assert "'train'" in message
        assert done.stdout == ""
    else:
        assert said == []


@pytest.mark.parametrize(
    ("words", "code"), [("runs --help", 141), ("train spiral --epochs 1 --run-dir", 0)]
)
def test_a_reader_that_leaves_early_sees_no_traceback_and_ends_no_training(words, code, tmp_path):
    # A pipe without a reader, as after `samestep runs --help | head -1`.
    words += f" {tmp_path / 'run'}" * words.endswith("--run-dir")
    program = f"exec {sys.executable} -m samestep {words} | true; exit ${{PIPESTATUS[0]}}"
    done = typed("bash", "-c", program)
    assert (done.returncode, done.stderr) == (code, "")


def test_names_that_hold_codes_of_a_terminal_are_shown_without_them(refused):
    """Somebody else's file could hide a line with them."""
    shown = refused("train", "a\x1b[2Kb.py")
    assert "a\ufffd[2Kb.py" in shown
    assert "\x1b" not in shown
    assert escape("[red]\x1b[2K\n\u200d\xa0x") == "\\[red]\ufffd[2K\n\u200d\xa0x"


def test_a_terminal_is_told_at_once_what_starts_and_a_log_is_not(monkeypatch, capsys):
    for more, told in (([], "starting …\n"), (["--nproc", "2"], "starting 2 ranks …\n")):
        words = ["r.py", *more]
        call("train", *words, "--epochs", "x")
        assert "starting" not in capsys.readouterr().err
        with monkeypatch.context() as context:
            context.setattr(sys.stderr, "isatty", lambda: True)
            call("train", *words, "--epochs", "x")
        assert capsys.readouterr().err.startswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("sweep spiral --lrr 1,2", "--lrr is not a flag of samestep sweep spiral. Did you mean"),
        ("train spiral --lr x", "--lr x: it must be a number."),
        ("train spiral --hidden-dims 8 x", "--hidden-dims 8 x: it must be a list, each a whole"),
        ("runs --sort", "Argument --sort: expected one argument."),
        ("evaluate", "The following arguments are required: RUN."),
        ("evaluate run other", "samestep evaluate does not take 'other'."),
    ],
)
def test_a_flag_that_cannot_be_parsed_is_one_message_with_the_help_s_command(refused, words, told):
    message = refused(*words.split())
    assert told in message
    assert "--help` shows all flags." in message
