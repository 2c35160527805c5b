"""The help of the verbs that train: every flag once, in its group, at any width."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from samestep.commands.completion import COMMANDS, completion_words
from samestep.commands.help import help_text
from samestep.commands.target import parse_target
from samestep.recipes.cricket.recipe import CricketOptions
from samestep.settings import Settings, flag_name
from tests.processes import free_port, launch_environment


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
    for verb, flag in (("verify", "max-steps"), ("scale", "patience")):
        shown = groups_of(output_of(verb, "spiral", "--help-all"))
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
    assert len(text.splitlines()) <= 73


@pytest.fixture(scope="module")
def completed():
    return completion_words().flags


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_help_of_a_verb_has_all_its_flags_and_fits(output_of, monkeypatch, completed, verb):
    monkeypatch.setenv("COLUMNS", "60")
    place, kind = COMMANDS[verb]
    target = ("images",) if kind == "recipe" else ()
    for flag in ("--help", "--help-all") if "+" in place else ("--help",):
        text = output_of(*verb.split(), *target, flag)
        before, _, _ = text.partition("examples:")
        assert max(map(len, before.splitlines())) <= 60
        assert not re.search(r"None|False|default: \)|STR\b", text)
        assert f"usage: samestep {verb}" in text
    assert {flag.name for flag in completed[verb]} <= set(re.findall(r"--[a-z-]+", text))


ADDRESS = "https://example.org/where/the/data/of/this/recipe/come/from"


@dataclass(frozen=True)
class Linked:
    url: str = ""
    """https://example.org/where/the/data/of/this/recipe/come/from, or a mirror of it."""


@pytest.mark.parametrize("width", [40, 80])
def test_a_word_that_is_longer_than_its_line_stays_whole_beside_its_flag(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    (line,) = (x for x in help_text("verb", "It.", {"verb": Linked()}).splitlines() if ADDRESS in x)
    assert line.startswith("  --url ")


@dataclass(frozen=True)
class Own:
    config: Path | None = None
    rounds: int = 3


def test_a_verbs_flag_goes_before_an_option_of_the_same_name(tmp_path):
    table = tmp_path / "settings.toml"
    table.write_text("rounds = 2\n")
    flags = ["--rounds", "7", "--width", "8"]
    command, request = parse_target(
        "try", "Try {}.", Own, ["cricket", *flags, "--config", str(table)]
    )
    assert command.rounds == 7
    assert request.options == CricketOptions(rounds=2, width=8)
    assert type(request.options) is CricketOptions


@pytest.mark.parametrize(
    ("flag", "meant"), [("--learning-rate", "--lr"), ("--max_epochs=3", "--epochs")]
)
def test_a_flag_that_other_tools_call_otherwise_is_named(refused, flag, meant):
    assert f"{meant} here" in refused("train", "spiral", flag, "3")


@pytest.mark.parametrize(
    "command", ["train spiral --nproc 2", "verify spiral", "scale spiral", "check mine.py"]
)
def test_ranks_are_not_started_within_a_launcher(here, refused, monkeypatch, command):
    (here / "mine.py").write_text("print(1)\n")
    for name, value in launch_environment(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    assert "torchrun" in refused(*command.split())
