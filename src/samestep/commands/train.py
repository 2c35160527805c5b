"""`samestep train`: a recipe, a recipe file or a run, on whatever this is started on."""

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from samestep.commands.help import Nproc, Switch
from samestep.commands.target import parse_target
from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.execution.session import NATIVE, run_session
from samestep.ranks.failure import STARTED_AT
from samestep.ranks.log import RankLog
from samestep.ranks.process import run_as_rank, start_nproc
from samestep.ranks.world import find_world, join, leave
from samestep.screen.progress import Screen
from samestep.tracking.choice import check_installed, chosen
from samestep.tracking.tracker_processes import TrackerProcesses
from samestep.training.stopping import catch_signals


@dataclass(frozen=True)
class Command:
    """What this command itself takes, beside the settings."""

    config: Path | None = None
    """TOML file of settings and options; flags win over it."""
    nproc: Nproc = 1
    """Ranks to start on this machine; auto: one per GPU, else one per core."""
    resume: Switch = False
    """Go on with the run, from its newest whole checkpoint; without it a new run begins."""
    allow_change: Annotated[str | None, tyro.conf.arg(metavar="NAMES")] = None
    """With --resume, settings that may differ from those of the checkpoint, with commas between
    them: lr,weight_decay. The run then becomes another training."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    return run_as_rank(lambda log: _train(arguments, log))


def parse(arguments: list[str]) -> tuple[Command, Request]:
    """Return the command and the request that a target and the flags after it make.

    Raises:
        UserError: anything in them is wrong.
        SystemExit: 2 for a flag that is unknown or ill-typed, 0 after --help.
    """
    lines = "train spiral --epochs 10 --lr 0.01", "train runs/ID --resume --nproc 2"
    about = "Train {}: the same step on one process and on many."
    command, request = parse_target("train", about, Command, arguments, *lines)
    check_resume(request)
    return command, request


def check_resume(request: Request) -> None:
    """Check that what is to go on has a place where it may have begun.

    Raises:
        UserError: it has none.
    """
    if request.resume and request.settings.run_dir is None:
        raise UserError(
            "--resume needs a run: samestep train runs/ID --resume, or --run-dir DIR to begin "
            "there and go on there whenever the command is repeated."
        )


def check_engine(request: Request) -> None:
    """Check that the engine takes these settings and this recipe.

    Raises:
        UserError: it does not.
    """
    settings = request.settings
    if settings.engine == "native":
        return
    from samestep.lightning.engine import check_settings  # noqa: PLC0415 - an extra

    check_settings(settings, request.recipe)
    if request.allow_change:
        raise UserError(
            "--allow-change needs --engine native: Lightning goes on with the optimizer and "
            "the schedule of its own checkpoint."
        )


def _train(arguments: list[str], log: RankLog) -> int:
    command, request = parse(arguments)
    settings = request.settings
    code = start_nproc(
        command.nproc,
        ["train", *arguments],
        device=settings.device,
        oversubscribe=settings.oversubscribe,
    )
    return _run_rank(request, log) if code is None else code


def _run_rank(request: Request, log: RankLog) -> int:
    """Train as one rank of the world that the environment describes."""
    settings, engine = request.settings, NATIVE
    check_engine(request)
    if settings.engine != "native":
        from samestep.lightning.engine import LIGHTNING  # noqa: PLC0415 - an extra

        engine = LIGHTNING
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    join(world, settings.timeout_s)
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
                started_at=float(os.environ.get(STARTED_AT, time.time())),
                engine=engine,
            )
        # Before the ranks part: a launcher may end all with the first that leaves with a signal's
        # code.
        if world.is_main:
            screen.result(outcome.path, json.loads((outcome.path / "result.json").read_text()))
            sys.stdout.flush()
    leave(world)
    return 128 + outcome.signum if outcome.signum else 0
