"""Run a verb in what may be one rank of many, or start ranks that run it."""

import os
import sys
import time
from collections.abc import Callable

from samestep.errors import UserError
from samestep.ranks.failure import GRACE_S, PARENT, die_with_parent, rank_of, report
from samestep.ranks.launch import detect_launch
from samestep.ranks.log import RankLog


def run_as_rank(verb: Callable[[RankLog], int]) -> int:
    """Run a verb, tell of its failure once for all ranks, and return the exit code.

    Args:
        verb: given where this rank's output goes, it returns the exit code.

    Raises:
        BrokenPipeError: the reader of the output has left, as `head` does.
        SystemExit: of the parsing of flags, after rank 0 has had time to tell.
    """
    die_with_parent()
    log = RankLog(rank_of())
    try:
        code = verb(log)
    except BrokenPipeError:
        raise
    except SystemExit:
        if log.rank != 0:  # a launcher ends all ranks with the first that ends
            time.sleep(GRACE_S)
        raise
    except Exception as error:
        code = report(error, log)
    if "torch" in sys.modules:
        from samestep.ranks.world import abandon  # noqa: PLC0415 - imports torch

        abandon(code)  # connected still: this rank or another has failed
    return code


def start_nproc(nproc: int, arguments: list[str], task: str = "") -> int | None:
    """Start the ranks of `--nproc`; return their exit code, or None in a process that is to work.

    Args:
        nproc: how many.
        arguments: of `samestep`, on each of them.
        task: what else they are to know; they find it as `TASK`.

    Raises:
        UserError: there can be no such number of ranks, or a launcher has already started some.
    """
    if nproc < 1:
        raise UserError(f"--nproc is {nproc}; it must be 1 or more.")
    if nproc == 1 or os.environ.get(PARENT):
        return None
    refuse_inside_launcher(f"--nproc {nproc}", "Leave --nproc out.")
    from samestep.ranks.start import start_ranks  # noqa: PLC0415 - imports the elastic agent

    return start_ranks(nproc, arguments, task)


def refuse_inside_launcher(what: str, instead: str) -> None:
    """Refuse to start ranks where a launcher has started this process among others.

    Args:
        what: what was to start them, as the message's subject.
        instead: what to do.

    Raises:
        UserError: it has.
    """
    launch = detect_launch(os.environ)
    if launch.world_size > 1:
        raise UserError(
            f"{what} starts ranks itself, but {launch.launcher} has already started "
            f"{launch.world_size}. {instead}",
            on_all_ranks=True,
        )
