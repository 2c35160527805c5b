"""How the script of a loop of one's own ends: what the user is told, and the exit code."""

import sys
from pathlib import Path
from typing import NoReturn

from samestep.errors import AlreadyTold, UserError, is_users
from samestep.ranks.process import RankLog, report
from samestep.ranks.world import World, abandon


class Stopped(AlreadyTold):
    """All ranks have agreed to stop on a signal, and have saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def script_name() -> str:
    """Return what the running script is called, without its ending."""
    return Path(sys.argv[0]).stem or "own_loop"


def say(world: World, text: str) -> None:
    """Print a line on rank 0's standard error."""
    if world.is_main:
        print(f"samestep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a user's own script


def as_mistake(error: BaseException | None) -> BaseException | None:
    """Return what the user is told of an error within a run, such as a call of `exit()` there."""
    if isinstance(error, UserError):  # what reads the data serves recipes, too
        error.what = error.what.replace("The recipe's", "The")
    if not isinstance(error, SystemExit) or isinstance(error, AlreadyTold):
        return error
    import traceback  # noqa: PLC0415 - it is needed after a mistake only

    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    told = UserError(
        f"exit({error.code or ''}) was called{where}, within the run: other ranks would wait for "
        "this one. Leave the loop by break on all ranks, or raise an error."
    )
    told.__cause__ = error
    return told


def end_failed(error: BaseException, log: RankLog, *, connected: bool) -> None:
    """End this process after a failure; return where Python shall show its usual traceback.

    That is an error that is not the user's mistake, in a process alone.
    """
    if isinstance(error, UserError) or (connected and isinstance(error, Exception)):
        end_told(report(error, log))
    if connected:
        told = error.code if isinstance(error, AlreadyTold) else 1
        abandon(told if isinstance(told, int) else 1)


def end_told(code: int) -> NoReturn:
    """End this process with an exit code, after the user was told."""
    abandon(code)  # connected still: this rank or another has failed
    raise AlreadyTold(code)
