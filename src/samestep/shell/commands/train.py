"""`samestep train`: a recipe, a recipe file or a run."""

import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base.errors import UserError
from samestep.base.flags import HERE
from samestep.base.run.files import shown_path
from samestep.base.settings import Settings
from samestep.base.startup import HOSTS, JOB_RUN
from samestep.launch.ranks import watched
from samestep.launch.ranks.process import MEMBER, TASK, RankLog, run_as_rank
from samestep.shell.api.on_ranks import train
from samestep.shell.commands.forms import Form, Switch, kind_of
from samestep.shell.commands.target import parse_target, with_value

if TYPE_CHECKING:
    from samestep.core.session.request import Request


@dataclass(frozen=True)
class TrainFlags:
    """Train {}. Every step is the same on one process and on many."""

    smoke: Switch = False
    """Test the setup: two steps, a checkpoint, a resume, validation and test on a few samples, in a
    scratch directory."""
    report: Switch = False
    """Write report.html into the run's directory at the end: curves and pictures."""


FORM = Form(
    verb="train",
    kind=kind_of(train, TrainFlags, left_out=("what", "recipe", "quiet")),
    examples=("train spiral --epochs 10 --lr 0.01", "train runs/ID --resume --nproc 2"),
    settings=True,
)


def main(arguments: list[str]) -> int:
    """Train, as the one that starts ranks or as a rank; those of `samestep.train` have a task."""
    return run_as_rank(lambda log: _train(arguments, log))


def parse(arguments: list[str], verb: str = "train") -> "tuple[Any, Request]":
    """Return the command and the request of a target and its flags; mistakes name the `verb`."""
    arguments = with_value(arguments, "--elastic", "[0-9].*", "auto")
    arguments = with_value(arguments, "--resume", r".*://.*", HERE)
    command, request = parse_target(replace(FORM, verb=verb), arguments)
    check_resume(request)
    if command.elastic is None and (not command.elastic_replace or command.elastic_limit != 10):
        raise UserError("--elastic-limit, --no-elastic-replace: add --elastic.", flags=["elastic"])
    if command.smoke and (command.elastic is not None or command.report):
        raise UserError(
            "--smoke keeps nothing and takes seconds: leave --elastic and --report out.",
            flags=["smoke"],
        )
    return command, request


def check_resume(request: "Request") -> None:
    """Check that --resume names a run, or a directory where it may be."""
    if request.resume and request.settings.run_dir is None:
        raise UserError(
            "--resume needs a run: samestep train runs/ID --resume, or --run-dir DIR to start "
            "there and to continue whenever the command is repeated.",
            flags=["resume", "run_dir"],
        )


def _check_run_is_seen() -> None:
    """Check that this node sees the directory in which the job's script ran."""
    run = os.environ.get(JOB_RUN)
    if not run or "SLURM_PROCID" not in os.environ:
        return
    from samestep.cluster.slurm.restarts import BEGUN  # noqa: PLC0415 - of jobs only

    if not Path(run, BEGUN).exists():
        raise UserError(
            f"{os.environ.get('SLURMD_NODENAME', 'This node')} does not see the run directory "
            f"{run}: use a --run-dir on a file system that all nodes share."
        )


def _train(arguments: list[str], log: RankLog) -> int:
    _check_run_is_seen()
    if HOSTS in os.environ and MEMBER not in os.environ:
        from samestep.launch.ranks.places import ELASTIC, places_of  # noqa: PLC0415 - of jobs only

        if number := places_of(Path()).num_ranks:  # what it asks for was checked at the submit
            from samestep.launch.ranks.keeper import elastic_of  # noqa: PLC0415 - it imports torch
            from samestep.launch.ranks.start import start_ranks  # noqa: PLC0415

            elastic = elastic_of(os.environ[ELASTIC], number, Settings())
            return start_ranks(number, ["train", *arguments], os.environ.get(TASK, ""), elastic)
    if task := os.environ.get(TASK):
        from samestep.shell.api.training import train_received  # noqa: PLC0415 - it imports torch

        return train_received(Path(task), log)
    watched.begin()  # a recipe may hang already where it is imported
    command, request = parse(arguments)
    from samestep.shell.api.training import train_as_rank  # noqa: PLC0415 - the help needs no torch
    from samestep.show.progress import Screen  # noqa: PLC0415

    settings = request.settings
    keeping = None
    if command.elastic is not None:
        from samestep.core.session.fetching import fetched  # noqa: PLC0415 - rarely needed
        from samestep.launch.ranks.keeper import elastic_of  # noqa: PLC0415
        from samestep.launch.ranks.world import World  # noqa: PLC0415

        fetched(request, World())  # its ranks meet only later
        keeping = partial(
            elastic_of,
            command.elastic,
            settings=settings,
            replaces=command.elastic_replace,
            limit=command.elastic_limit,
        )
    if command.nproc != 1 or keeping is not None:
        from samestep.launch.ranks.nproc import start_nproc  # noqa: PLC0415 - of several ranks

        code = start_nproc(
            command.nproc,
            ["train", *arguments],
            device=settings.device,
            oversubscribe=settings.oversubscribe,
            elastic=keeping,
        )
        if code is not None:
            return code
    if command.smoke:
        from samestep.shell.api.smoke import smoke  # noqa: PLC0415 - rarely needed

        return smoke(request)
    outcome = train_as_rank(request, Screen(), log.move_to, speak=log.give_back)
    if command.report and log.rank == 0:
        from samestep.show.reporting.page import write_report  # noqa: PLC0415 - rarely needed

        file = write_report([Path(shown_path(outcome.path))])
        sys.stdout.write(f"report   {file}\n")
    from samestep.core.session.picture_making import end_while_drawing  # noqa: PLC0415

    return end_while_drawing(outcome.signum)
