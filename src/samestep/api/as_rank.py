"""Train as one rank: what `samestep train` and `samestep.train` both do on each of them."""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from samestep.errors import UserError
from samestep.ranks.process import STARTED_AT
from samestep.ranks.world import find_world, join, leave
from samestep.run.records import Record
from samestep.session.outcome import Outcome
from samestep.session.request import Request
from samestep.session.training_run import NATIVE, Engine, run_session
from samestep.tracking.choice import check_installed, chosen
from samestep.tracking.tracker_processes import TrackerProcesses
from samestep.training.stopping import Again, catch_signals, end_process


class Shows(AbstractContextManager[Any], Protocol):
    """What rank 0 hands the records to."""

    def show(self, record: Record) -> None:
        """Show one record."""

    def result(self, path: Path, result: dict[str, Any]) -> None:
        """Show how the run ended."""


def train_as_rank(
    request: Request, screen: Shows, begin: Callable[[Path], None], *, again: Again = end_process
) -> Outcome:
    """Train as one rank of the world that the environment describes.

    Args:
        request: what to train, and how.
        screen: shows the records, on rank 0.
        begin: called on every rank with the run directory once it is there.
        again: what a second Ctrl-C does.

    Raises:
        UserError: for anything the user can mend.
    """
    settings, engine = request.settings, _engine(request)
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    join(world, settings.timeout_s)
    world.on_main(lambda: check_installed(chosen(settings.track)))
    with (
        catch_signals(again) as received,
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
                begin=begin,
                started_at=float(os.environ.get(STARTED_AT, time.time())),
                engine=engine,
            )
        # Before the ranks part: a launcher may end all with the first that leaves with a signal's
        # code.
        if world.is_main:
            screen.result(outcome.path, json.loads((outcome.path / "result.json").read_text()))
            sys.stdout.flush()
    leave(world)
    return outcome


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


def _engine(request: Request) -> Engine:
    """Return what takes the steps.

    Raises:
        UserError: Lightning is not installed, or cannot do what the settings say.
    """
    check_engine(request)
    if request.settings.engine == "native":
        return NATIVE
    from samestep.lightning.engine import LIGHTNING  # noqa: PLC0415 - an extra

    return LIGHTNING
