"""`samestep train`: a recipe, a recipe file or a run, on whatever this is started on."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from samestep.commands.help import examples
from samestep.commands.target import check_named, general_help, refuse_inside_launcher
from samestep.commands.target import parse as parse_target
from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.execution.session import NATIVE, Engine, run_session
from samestep.ranks.failure import PARENT, STARTED_AT, die_with_parent, run_as_rank
from samestep.ranks.log import RankLog
from samestep.ranks.world import find_world, join, leave
from samestep.recipe import recipe_names
from samestep.screen.progress import Screen
from samestep.settings import Settings
from samestep.tracking.choice import check_installed, chosen
from samestep.tracking.tracker_processes import TrackerProcesses
from samestep.training.stopping import catch_signals

_EXAMPLES = """\
examples:
  samestep train spiral --epochs 10 --lr 0.01
  samestep train runs/ID --resume --nproc 2
"""


@dataclass(frozen=True)
class Command:
    """What this command itself takes, beside the settings."""

    config: Path | None = None
    """TOML file of settings and options; flags win over it."""
    nproc: int = 1
    """Ranks to start on this machine."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest whole checkpoint of the run."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(
            general_help("train", "Train: the same step on any number of processes.", _EXAMPLES)
        )
        return 0 if arguments else 2
    known = arguments[0] in recipe_names()
    with examples(_EXAMPLES.replace("spiral", arguments[0]) if known else _EXAMPLES):
        return run_as_rank(lambda log: _train(arguments, log))


def _train(arguments: list[str], log: RankLog) -> int:
    target, *flags = arguments
    check_named(target, "train")
    command, request = parse(target, flags)
    if command.nproc < 1:
        raise UserError(f"--nproc is {command.nproc}; it must be 1 or more.")
    started_at = float(os.environ.get(STARTED_AT, time.time()))
    if command.nproc > 1 and not os.environ.get(PARENT):
        from samestep.ranks.start import start_ranks  # noqa: PLC0415 - imports the elastic agent

        refuse_inside_launcher(f"--nproc {command.nproc}", "Leave --nproc out.")
        return start_ranks(command.nproc, ["train", *arguments], started_at)
    die_with_parent()
    return _run_rank(request, log, started_at)


def parse(target: str, flags: list[str]) -> tuple[Command, Request]:
    """Return the command and the request that these flags make of a target.

    Raises:
        UserError: anything in them is wrong.
        SystemExit: 2 for a flag that is unknown or ill-typed, 0 after --help.
    """
    about = "Train {}: the same step on one process and on many."
    return parse_target(target, flags, verb="train", about=about, kind=Command)


def _run_rank(request: Request, log: RankLog, started_at: float) -> int:
    """Train as one rank of the world that the environment describes."""
    settings = request.settings
    engine = _engine(settings)
    world = find_world(settings.device, settings.backend)
    join(world)
    world.on_main(lambda: check_installed(chosen(settings.track)))
    screen = Screen()
    with (
        catch_signals() as received,
        TrackerProcesses(
            settings,
            request.recipe.name,
            screen.show,
            is_main=world.is_main,
            stopped=lambda: bool(received.signum),
        ) as trackers,
    ):
        with screen:
            outcome = run_session(
                request,
                world,
                received=received,
                show=trackers.show,
                begin=log.move_to,
                started_at=started_at,
                engine=engine,
            )
        # Before the ranks part: a launcher may end all with the first that leaves with a signal's
        # code.
        if world.is_main:
            screen.result(outcome.path, json.loads((outcome.path / "result.json").read_text()))
            sys.stdout.flush()
    leave(world)
    return 128 + outcome.signum if outcome.signum else 0


def _engine(settings: Settings) -> Engine:
    if settings.engine == "native":
        return NATIVE
    from samestep.lightning.engine import LIGHTNING, check_settings  # noqa: PLC0415 - an extra

    check_settings(settings)
    return LIGHTNING
