from dataclasses import dataclass
from pathlib import Path

import pytest

from samestep.commands.target import parse_target
from samestep.recipes.cricket.recipe import CricketOptions
from tests.processes import free_port, launch_environment


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
