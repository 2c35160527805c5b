"""Run a verb in what may be one rank of many, or start ranks that run it."""

import os
import sys
import time
from collections.abc import Callable

from samestep.errors import AlreadyTold, UserError, no_exit
from samestep.ranks.failure import GRACE_S, rank_of, report
from samestep.ranks.launch import detect_launch
from samestep.ranks.limits import NumRanks, ranks_to_start
from samestep.ranks.log import RankLog
from samestep.ranks.startup import PARENT


def run_as_rank(verb: Callable[[RankLog], int]) -> int:
    """Run a verb, tell of its failure once for all ranks, and return the exit code.

    Args:
        verb: given where this rank's output goes, it returns the exit code.

    Raises:
        BrokenPipeError: the reader of the output has left, as `head` does.
        AlreadyTold: of the parsing of flags, after rank 0 has had time to tell.
    """
    log = RankLog(rank_of())
    try:
        with no_exit():
            code = verb(log)
    except BrokenPipeError:
        raise
    except AlreadyTold:
        if log.rank != 0:  # a launcher ends all ranks with the first that ends
            time.sleep(GRACE_S)
        raise
    except Exception as error:
        code = report(error, log)
    if "torch" in sys.modules:
        from samestep.ranks.world import abandon  # noqa: PLC0415 - imports torch

        abandon(code)  # connected still: this rank or another has failed
    return code


def start_nproc(
    nproc: NumRanks,
    arguments: list[str],
    task: str = "",
    *,
    device: str = "auto",
    oversubscribe: bool = False,
) -> int | None:
    """Start the ranks of `--nproc`; return their exit code, or None in a process that is to work.

    Args:
        nproc: how many, or "auto" for as many as this machine has GPUs, else cores.
        arguments: of `samestep`, on each of them.
        task: what else they are to know; they find it as `TASK`.
        device: where they compute.
        oversubscribe: whether the user insists on more than the machine carries.

    Raises:
        UserError: there can be no such number of ranks, or a launcher has already started some.
    """
    if nproc == 1 or os.environ.get(PARENT):
        return None
    if nproc != "auto":
        refuse_inside_launcher(f"--nproc {nproc}", "Leave --nproc out.")
    elif detect_launch(os.environ).world_size > 1:
        return None
    number = ranks_to_start(nproc, device, oversubscribe=oversubscribe)
    if number == 1:
        return None
    from samestep.ranks.start import start_ranks  # noqa: PLC0415 - imports the elastic agent

    return start_ranks(number, arguments, task)


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
