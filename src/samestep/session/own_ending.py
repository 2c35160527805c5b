"""How a script with a loop of its own ends: what the user reads, and the exit code."""

import sys
from typing import NoReturn

from samestep.errors import AlreadyTold, UserError, is_users
from samestep.ranks.process import RankLog, report
from samestep.ranks.world import World, abandon


class Stopped(AlreadyTold):
    """All ranks have agreed to stop on a signal, and have saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


def say(world: World, text: str) -> None:
    """Print a line on rank 0's standard error."""
    if world.is_main:
        print(f"samestep: {text}", file=sys.stderr, flush=True)  # noqa: T201 - a user's own script


def as_mistake(error: BaseException | None) -> BaseException | None:
    """Return an error within a run as the user reads it; a call of `exit()` becomes a UserError."""
    if isinstance(error, UserError):  # the code that reads data was written for recipes
        error.what = error.what.replace("The recipe's", "The")
    if not isinstance(error, SystemExit) or isinstance(error, AlreadyTold):
        return error
    import traceback  # noqa: PLC0415 - only after a mistake

    own = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    mistake = UserError(
        f"exit({error.code or ''}) was called{where}, within the run: other ranks would wait for "
        "this one.",
        remedy="Leave the loop by break on all ranks, or raise an error.",
    )
    mistake.__cause__ = error
    return mistake


def end_failed(error: BaseException, log: RankLog, *, connected: bool) -> None:
    """End this process after a failure.

    Return where Python should show its own traceback: one process, and no mistake of the user.
    """
    if isinstance(error, UserError) or (connected and isinstance(error, Exception)):
        end_reported(report(error, log))
    if connected:
        code = error.code if isinstance(error, AlreadyTold) else 1
        abandon(code if isinstance(code, int) else 1)


def end_reported(code: int) -> NoReturn:
    """End this process with an exit code, after the failure was reported."""
    abandon(code)  # connected still: this rank or another has failed
    raise AlreadyTold(code)
