"""The completion scripts complete in real shells what the command line takes."""

import re
import shlex
import shutil
import subprocess

import pytest

from samestep.cli import VERBS
from samestep.commands.completion import _INNER, COMMANDS, SCRIPTS, completion_words
from samestep.recipes import RECIPES
from tests.command_line import call, one_message
from tests.reporting.made_runs import write_run

DRIVER = """
. {script}
cd {folder}
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"
    [[ "$line" == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)) COMP_LINE=$line COMP_POINT=${{#line}}
    ${{function:=$(complete -p samestep | sed 's/.*-F \\([^ ]*\\) .*/\\1/')}} samestep
    printf '%s\\t' "${{COMPREPLY[@]}}"
    echo
done
"""


@pytest.fixture(scope="module")
def words():
    return completion_words()


@pytest.fixture(scope="module")
def script(tmp_path_factory, words):
    path = tmp_path_factory.mktemp("completion") / "samestep.bash"
    path.write_text(SCRIPTS["bash"](words))
    return path


@pytest.fixture
def complete(script, tmp_path):
    """Return a function: a line, up to the cursor → what real bash offers."""

    def ask(line):
        driver = DRIVER.format(script=shlex.quote(str(script)), folder=shlex.quote(str(tmp_path)))
        done = subprocess.run(
            ["bash", "--norc", "--noprofile", "-c", driver],
            input=line + "\n",
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return sorted(filter(None, done.stdout.rstrip("\n").split("\t")))

    return ask


def test_the_verbs_and_what_comes_after_them_are_completed(complete):
    assert complete("samestep tr") == ["track", "train"]
    assert complete("samestep tra") == ["track", "train"]
    assert complete("samestep trai") == ["train"]
    assert complete("samestep ") == sorted([*VERBS, "--help", "--version"])
    assert complete("samestep slurm su") == ["submit"]
    assert complete("samestep slurm sandbox u") == ["up"]
    assert complete("samestep data ") == ["--help", "get", "list"]
    assert complete("samestep completion z") == ["zsh"]


def test_a_verb_that_trains_completes_recipes_and_files(complete, tmp_path):
    assert complete("samestep train sp") == ["spiral"]
    assert complete("samestep train ") == list(RECIPES)
    (tmp_path / "my recipe.py").touch()
    write_run(tmp_path / "runs" / "spiral-1")
    assert complete("samestep verify my") == ["my recipe.py"]
    assert complete("samestep train runs/s") == ["runs/spiral-1"]
    assert complete("samestep train spiral ") == []


def test_the_flags_of_the_verb_and_of_the_recipe_are_completed(complete):
    assert complete("samestep train spiral --micro") == ["--micro-batch-size"]
    assert complete("samestep train spiral --hid") == ["--hidden-dims"]
    assert complete("samestep train mnist --hid") == []
    assert complete("samestep train my_recipe.py --lr 0.1 --lr-s") == ["--lr-scaling"]
    assert complete("samestep evaluate runs/ID --sp") == ["--split"]
    assert complete("samestep slurm submit spiral --nod") == ["--nodes"]
    assert complete("samestep slurm submit spiral --no-re") == ["--no-requeue"]
    assert complete("samestep slurm submit spiral --nodes 2 -- --hid") == ["--hidden-dims"]


def test_the_values_of_a_flag_are_completed(complete, tmp_path):
    assert complete("samestep train spiral --precision ") == ["bf16", "fp16", "fp32", "fp64"]
    assert complete("samestep train mnist --model c") == ["convnet"]
    assert complete("samestep scale spiral --mode w") == ["weak"]
    assert complete("samestep runs --sort du") == ["duration"]
    assert complete("samestep evaluate runs/ID --checkpoint b") == ["best"]
    assert complete("samestep train spiral --lr ") == []
    (tmp_path / "data").mkdir()
    assert complete("samestep train mnist --data-dir d") == ["data"]


def test_where_a_run_is_wanted_those_in_runs_are_completed(complete, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "photo.png").touch()
    assert complete("samestep evaluate ") == ["runs/a", "runs/b"]
    assert complete("samestep compare runs/a ") == ["runs/a", "runs/b"]
    assert complete("samestep predict ") == ["runs/a", "runs/b"]
    assert complete("samestep predict runs/a ph") == ["photo.png"]
    assert complete("samestep runs r") == ["runs"]


def test_every_verb_is_completed(words):
    assert {word.split()[0] for word in (*words.flags, *_INNER)} == set(VERBS)


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_flag_that_is_offered_is_one_of_the_verb(verb, words, capfd):
    target = ("spiral",) if COMMANDS[verb][1] == "recipe" else ()
    flag = "--help-all" if "+" in COMMANDS[verb][0] else "--help"
    assert call(*verb.split(), *target, flag) == 0
    told = set(re.findall(r"--[a-z-]+", capfd.readouterr().out))
    assert {flag.name for flag in words.flags[verb]} <= told


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_has_the_syntax_of_its_shell(shell, words, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell](words))
    done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(words, tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    script = tmp_path / "samestep.fish"
    script.write_text(SCRIPTS["fish"](words))

    def ask(line):
        command = f"source {script}; complete -C {shlex.quote(line)}"
        done = subprocess.run(
            ["fish", "--no-config", "-c", command],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        return {found.partition("\t")[0] for found in done.stdout.splitlines()}

    assert ask("samestep trai") == {"train"}
    assert ask("samestep train sp") == {"spiral"}
    assert ask("samestep train spiral --micro") == {"--micro-batch-size"}


def test_the_command_prints_the_script(script, capfd):
    assert call("completion", "bash") == 0
    assert capfd.readouterr().out == script.read_text()


@pytest.mark.parametrize("arguments", [("csh",), ("bash", "zsh")], ids=str)
def test_another_shell_is_refused(arguments, capfd):
    assert "fish" in one_message(call("completion", *arguments), capfd.readouterr().err)
