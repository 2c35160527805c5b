"""`samestep.train`: what `samestep train` does, from a script or a notebook."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.api.as_before import as_before
from samestep.api.as_rank import Shows, train_as_rank
from samestep.api.asked import Asked, asked_of, request_of, with_settings
from samestep.api.one_line import one_line
from samestep.api.place import check_place
from samestep.api.several_ranks import train_on_ranks
from samestep.api.trained_run import TrainedRun
from samestep.errors import UserError
from samestep.ranks.launch import detect_launch
from samestep.ranks.nproc import NumRanks, ranks_to_start, refuse_inside_launcher
from samestep.ranks.process import RankLog, rank_of
from samestep.ranks.startup import forget_signals
from samestep.ranks.world import in_process_group
from samestep.recipe import Recipe
from samestep.screen.nothing import Nothing
from samestep.screen.progress import Screen
from samestep.session.own_ending import end_failed
from samestep.session.request import Request

_busy = threading.Lock()


@with_settings
@one_line
def train(
    what: str | os.PathLike[str] | Recipe,
    *,
    nproc: NumRanks = 1,
    resume: bool = False,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    config: str | os.PathLike[str] | None = None,
    allow_change: str | tuple[str, ...] | list[str] = (),
    recipe_of_run: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a recipe, or go on with a run; return the run.

        run = samestep.train("spiral", epochs=3)
        run = samestep.train("my_recipe.py", nproc=2, lr=0.01, run_dir="runs/mine")
        run = samestep.train(run, resume=True, epochs=8)

    With one rank it trains in this process, whose random numbers and threads are afterwards as they
    were. Ctrl-C, or a notebook's interrupt, stops after the current step and saves; the run is
    returned, its `result["status"]` is "stopped", and `resume=True` goes on from there. In a script
    that a launcher starts (torchrun, srun, mpirun) each process is a rank, as of `samestep train`.

    Args:
        what: a recipe: its name ("spiral"), its file ("my_recipe.py"), or a `samestep.Recipe`,
            which may be made in a notebook; or the directory of a run, whose settings are taken.
        nproc: ranks to start on this machine; "auto": one per GPU, else one per core.
        resume: whether to go on with the run, from its newest whole checkpoint.
        recipe: the recipe of that run, where the run names no file of it.
        config: a TOML file of settings and options; the other arguments win over it.
        allow_change: with `resume`, names of settings that may differ from the checkpoint's;
            "recipe" for an edited recipe.
        recipe_of_run: with `resume`, whether to take the recipe from the run's own copy.
        quiet: whether to show nothing.
        settings: any setting of `samestep train`, and any option of the recipe; `help(samestep.
            Settings)` says what each does, and the recipe's own win over the defaults here.

    Raises:
        UserError: anything in it can be mended by the user; also if a rank fails.
    """

    def call(log: RankLog) -> TrainedRun:
        check_place("train")
        asked = asked_of(
            what,
            recipe,
            keywords=settings,
            config=None if config is None else Path(config),
            resume=resume,
            allow_change=_names(allow_change),
            recipe_of_run=recipe_of_run,
        )
        return _train(asked, nproc, Nothing() if quiet else Screen(go_on=_go_on(asked)), log)

    return _told_once(call)


def _go_on(asked: Asked) -> str:
    recipe = "" if asked.recipe is None else "recipe=…, "
    return f'samestep.train("{{}}", {recipe}resume=True)'


def _told_once(call: Callable[[RankLog], TrainedRun]) -> TrainedRun:
    """Train; among the ranks of a launcher one alone tells of a failure, and all end.

    Raises:
        UserError: in a process alone.
        SystemExit: among ranks.
    """
    log = RankLog(rank_of())
    try:
        return call(log)
    except Exception as error:
        if _launched():
            end_failed(error, log, connected=in_process_group())
        raise
    finally:
        log.give_back()


def _names(given: Any) -> tuple[str, ...]:
    """Return names that are given one by one, or in one text with commas."""
    return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


def _launched() -> bool:
    return detect_launch(os.environ).world_size > 1


def _train(asked: Asked, nproc: NumRanks, screen: Shows, log: RankLog) -> TrainedRun:
    if not _busy.acquire(blocking=False):
        raise UserError(
            "samestep.train() was called while this process trains. Wait until that training has "
            "ended, or train in another process."
        )
    try:
        forget_signals()
        with as_before():
            request = request_of(asked)
            if request.resume and request.settings.run_dir is None:
                raise UserError(
                    "resume=True needs a run: name its directory first, samestep.train(run, resume="
                    "True); or give run_dir, to begin there and go on there when called again."
                )
            number = _number(nproc, request)
            run = _on_ranks(number, asked, screen) if number > 1 else _here(request, screen, log)
            return replace(run, recipe=asked.recipe)
    finally:
        _busy.release()


def _number(nproc: NumRanks, request: Request) -> int:
    """Return how many ranks to start; 1 where this process is to train.

    Raises:
        UserError: there can be no such number.
    """
    settings = request.settings
    if not (nproc == "auto" or (isinstance(nproc, int) and not isinstance(nproc, bool))):
        raise UserError(f'nproc={nproc!r}: it must be a number of ranks, or "auto".')
    if nproc == "auto" and _launched():
        return 1
    if nproc not in ("auto", 1):
        refuse_inside_launcher(f"nproc={nproc}", "Leave nproc out.")
    return ranks_to_start(nproc, settings.device, oversubscribe=settings.oversubscribe)


def _here(request: Request, screen: Shows, log: RankLog) -> TrainedRun:
    """Train in this process, as the one rank or as one of a launcher's."""
    path: Path | None = None

    def begin(run: Path) -> None:
        nonlocal path
        path = run
        log.move_to(run)

    def again() -> None:
        raise UserError(_interrupted_twice(path))

    outcome = train_as_rank(request, screen, begin, again=again)
    return _stopped(outcome.path, outcome.signum)


def _on_ranks(number: int, asked: Asked, screen: Shows) -> TrainedRun:
    path, ended = train_on_ranks(number, asked, screen)
    if ended.message:
        raise UserError(ended.message)
    result = path / "result.json" if path is not None else None
    signum = max(0, ended.code - 128)
    if path is None or result is None or not _ended(path):
        if signum not in (0, signal.SIGINT):
            signal.raise_signal(signum)
        if path is None:  # no run had begun
            raise KeyboardInterrupt
        raise UserError(_interrupted_twice(path))
    screen.result(path, json.loads(result.read_bytes()))
    return _stopped(path, signum)


def _ended(path: Path) -> bool:
    """Whether the latest attempt came to its end, by the last record."""
    return bool(TrainedRun(path).history[-1]["event"] == "stop")


def _stopped(path: Path, signum: int) -> TrainedRun:
    """Return the run; a signal that was to end this process ends it, now that all is saved."""
    if signum not in (0, signal.SIGINT):
        sys.stdout.flush()
        signal.raise_signal(signum)
    return TrainedRun(path)


def _interrupted_twice(path: Path | None) -> str:
    if path is None:
        return "Interrupted twice, before the run began: there is nothing to go on with."
    where = f"{str(path)!r}"
    return (
        "Interrupted twice: the training ended at once, without a checkpoint of where it was. Go "
        f"on from the newest one: samestep.train({where}, resume=True)."
    )
