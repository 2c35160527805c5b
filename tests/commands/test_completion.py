"""The completion scripts complete in real shells what the command line takes."""

import shlex
import shutil
import subprocess

import pytest

from samestep.cli import VERBS
from samestep.commands.completion import _INNER, SCRIPTS, completion_words
from samestep.recipes import RECIPES
from tests.command_line import typed
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


# A line up to the cursor → what is offered there, beside two runs, a recipe, data and an image.
OFFERED = {
    "samestep tra": "track,train",
    "samestep trai": "train",
    "samestep ": ",".join(sorted([*VERBS, "--help", "--version"])),
    "samestep slurm su": "submit",
    # recipes and files
    "samestep train sp": "spiral",
    "samestep train ": ",".join(sorted([*RECIPES, "data", "my recipe.py", "photo.png", "runs"])),
    "samestep train spiral ": "",
    # flags of the verb and of the recipe
    "samestep train spiral --micro": "--micro-batch-size",
    "samestep train mnist --hid": "",
    "samestep train my_recipe.py --lr 0.1 --lr-s": "--lr-scaling",
    "samestep slurm submit spiral --nodes 2 -- --hid": "--hidden-dims",
    # values of a flag
    "samestep runs --sort du": "duration",
    "samestep evaluate runs/a --checkpoint b": "best",
    "samestep train spiral --lr ": "",
    # where a run is wanted, those in runs
    "samestep evaluate ": "runs/a,runs/b",
    "samestep predict ": "runs/a,runs/b",
    "samestep predict runs/a ph": "photo.png",
}


def test_bash_completes_verbs_targets_flags_and_values(script, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name)
    for name in ("my recipe.py", "photo.png"):
        (tmp_path / name).touch()
    (tmp_path / "data").mkdir()
    driver = DRIVER.format(script=shlex.quote(str(script)), folder=shlex.quote(str(tmp_path)))
    done = subprocess.run(
        ["bash", "--norc", "--noprofile", "-c", driver],
        input="".join(f"{line}\n" for line in OFFERED),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    offers = (",".join(sorted(filter(None, x.split("\t")))) for x in done.stdout.splitlines())
    assert dict(zip(OFFERED, offers, strict=True)) == OFFERED


def test_every_verb_is_completed_and_shells_get_their_script(words, script, refused, output_of):
    assert {word.split()[0] for word in (*words.flags, *_INNER)} == set(VERBS)
    assert output_of("completion", "bash") == script.read_text()
    for wrong in (("csh",), ("bash", "zsh")):
        assert "fish" in refused("completion", *wrong)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_has_the_syntax_of_its_shell(shell, words, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell](words))
    done = typed(shutil.which(shell), "-n", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_fish_completes(words, tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    (tmp_path / "samestep.fish").write_text(SCRIPTS["fish"](words))
    for line, offered in {
        "samestep trai": "train",
        "samestep train sp": "spiral",
        "samestep train spiral --micro": "--micro-batch-size",
    }.items():
        command = f"source samestep.fish; complete -C {shlex.quote(line)}"
        done = typed(shutil.which("fish"), "--no-config", "-c", command, folder=tmp_path)
        assert {found.partition("\t")[0] for found in done.stdout.splitlines()} == {offered}
