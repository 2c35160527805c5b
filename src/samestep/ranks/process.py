"""Run a verb in what may be one rank of many."""

import sys
from collections.abc import Callable

from samestep.ranks.failure import let_rank_0_speak, rank_of, report
from samestep.ranks.log import RankLog


def run_as_rank(verb: Callable[[RankLog], int]) -> int:
    """Run a verb, tell of its failure once for all ranks, and return the exit code.

    Raises:
        BrokenPipeError: the reader of the output has left, as `head` does.
        SystemExit: of the parsing of flags, after rank 0 has had time to tell.
    """
    log = RankLog(rank_of())
    try:
        code = verb(log)
    except BrokenPipeError:
        raise
    except SystemExit:
        let_rank_0_speak(log.rank)
        raise
    except Exception as error:
        code = report(error, log)
    if "torch" in sys.modules:
        from samestep.ranks.world import abandon  # noqa: PLC0415 - imports torch

        abandon(code)  # connected still: this rank or another has failed
    return code
