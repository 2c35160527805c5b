"""The completion scripts complete in real shells what the command line takes."""

import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from samestep.base.errors import UserError
from samestep.base.settings import Settings, flag_name
from samestep.core.data import catalog
from samestep.core.recipes import RECIPES
from samestep.core.recipes.cricket.recipe import CricketOptions
from samestep.shell.api.arguments import CheckpointName, RunPath
from samestep.shell.cli import OWN, VERBS
from samestep.shell.commands.completion import SCRIPTS, completion_words
from samestep.shell.commands.forms import Form, form_of, verb
from samestep.shell.commands.target import parse_target
from tests.command_line import typed
from tests.processes import free_port, launch_environment
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


def test_every_verb_is_completed_and_shells_get_their_script(words, script, output_of):
    assert {word.split()[0] for word in (*words.flags, *words.inner)} == set(VERBS)
    assert output_of("completion", "bash") == script.read_text()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_has_the_syntax_of_its_shell(shell, words, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell](words))
    done = typed(shutil.which(shell), "-n", script)
    assert (done.returncode, done.stderr) == (0, "")


def test_list_shows_size_licence_and_source_and_breaks_no_word_nor_address(output_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for arguments in ((), ("get",), ("get", "mnist"), ("list", "mnist")):
        output_of("data", *arguments, code=2)
    shown = output_of("data", "list")
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 60
    for words in ("mnist", "11.6 MB", "fashion-mnist", "30.9 MB"):
        assert words in shown
    for dataset in catalog.CATALOG.values():
        assert f"  {dataset.source}" in lines
        words = f"{dataset.description} {dataset.licence}".split()
        assert set(words) < set(shown.split())


def groups_of(text: str) -> dict[str, set[str]]:
    groups: dict[str, set[str]] = {}
    for line in text.splitlines():
        if heading := re.fullmatch(r"(\w.*):", line):
            groups[heading[1]] = set()
        elif flag := re.match(r"  --([\w-]+)", line):
            groups[list(groups)[-1]].add(flag[1])
    return groups


def test_the_settings_stand_in_groups_with_defaults_of_recipe_and_file(output_of, here):
    groups = groups_of(output_of("train", "spiral", "--help-all"))
    for group, flag in {
        "train": "resume",
        "options of spiral": "hidden-dims",
        "length": "epochs",
        "tracking": "track-timeout",
    }.items():
        assert flag in groups[group]
    assert max(map(len, groups.values())) <= 21
    shown = [flag for flags in groups.values() for flag in flags]
    assert sorted(shown) == sorted(set(shown))
    assert {flag_name(field.name) for field in fields(Settings)} < set(shown)
    text = " ".join(output_of("train", "images", "--help-all").split())
    assert "(default: on; --no-channels-last turns it off)" in text
    (here / "my.toml").write_text("epochs = 7\n")
    text = output_of("train", "spiral", "--config", "my.toml", "--help-all")
    assert "Passes over the training set. (default: 7)" in text
    for name, flag in (("verify", "max-steps"), ("scale", "patience")):
        shown = groups_of(output_of(name, "spiral", "--help-all"))
        assert not any(flag in flags for flags in shown.values())


COMMON = {"epochs", "batch-size", "lr", "precision", "device", "seed", "run-dir"}


@pytest.mark.parametrize("target", [("images",), ("spiral",), ()])
def test_without_being_asked_for_all_common_settings_are_shown(output_of, monkeypatch, target):
    monkeypatch.setenv("COLUMNS", "80")
    text = output_of("train", *target, "-h")
    shown = [flag for flags in groups_of(text).values() for flag in flags]
    assert COMMON | {"nproc", "resume", "help-all"} <= {*shown}
    assert "bucket-cap-mb" not in shown
    assert ("image-size" in shown) == (target == ("images",))
    assert len(text.splitlines()) <= 77


@pytest.mark.parametrize("verb", [verb for verb in OWN if form_of(verb)])
def test_the_help_of_a_verb_has_all_its_flags_and_fits(output_of, monkeypatch, words, verb):
    monkeypatch.setenv("COLUMNS", "60")
    target = ("images",) if OWN[verb][0] == "recipe" else ()
    for flag in ("--help", "--help-all") if form_of(verb).settings else ("--help",):
        text = output_of(*verb.split(), *target, flag)
        before, _, _ = text.partition("examples:")
        assert max(map(len, before.splitlines())) <= 60
        assert not re.search(r"None|False|default: \)|STR\b", text)
        assert f"usage: samestep {verb}" in text
    assert {flag.name for flag in words.flags[verb]} <= set(re.findall(r"--[a-z-]+", text))


def greet(run: RunPath, title: CheckpointName = "best", *, loud: bool = False, times: int = 2):
    """Return what a greeting is made of.

    Args:
        run: Whom to greet.
        title: The `title`
            of it.
        loud: In capitals, `times` times, but not `never`.
        times: How often.
    """


def test_a_function_is_a_verb_by_its_signature_and_its_docstring(capsys):
    seen = []

    @verb("greet", "greet runs/a", of=greet)
    def main(given, *, json: bool = False) -> int:
        """Greet a run.

        Args:
            json: Print it.
        """
        seen.append((vars(given), json))
        return 7

    assert main(["runs/a", "--loud", "--title", "last", "--json"]) == 7
    assert seen == [({"run": Path("runs/a"), "title": "last", "loud": True, "times": 2}, True)]
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "usage: samestep greet RUN [flags] Greet a run." in shown
    assert "--title best|last|NAME The --title of it. (default: best)" in shown
    assert "--loud In capitals, --times times, but not `never`." in shown
    assert "--times INT How often. (default: 2) --json Print it." in shown
    with pytest.raises(UserError, match=r"--times x: it must be a whole"):
        main(["runs/a", "--times", "x"])


@dataclass(frozen=True)
class Own:
    """Try {}."""

    config: Path | None = None
    rounds: int = 3


def test_a_verbs_flag_goes_before_an_option_of_the_same_name(tmp_path):
    table = tmp_path / "settings.toml"
    table.write_text("rounds = 2\n")
    flags = ["--rounds", "7", "--width", "8"]
    form = Form(verb="try", kind=Own, examples=())
    command, request = parse_target(form, ["cricket", *flags, "--config", str(table)])
    assert command.rounds == 7
    assert request.options == CricketOptions(rounds=2, width=8)
    assert type(request.options) is CricketOptions


@pytest.mark.parametrize(
    "command", ["train spiral --nproc 2", "verify spiral", "scale spiral", "check mine.py"]
)
def test_ranks_are_not_started_within_a_launcher(here, refused, monkeypatch, command):
    (here / "mine.py").write_text("print(1)\n")
    for name, value in launch_environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    assert "torchrun" in refused(*command.split())
