"""Where a call may train or start ranks, and where it would start them without end."""

import multiprocessing
import os

from samestep.errors import UserError
from samestep.ranks.process import TASK
from samestep.ranks.startup import PARENT
from samestep.ranks.world import in_process_group
from samestep.recipe import being_read

GUARD = (
    'Put the call under `if __name__ == "__main__":`, so that a process that only reads this file '
    "does not run it."
)


def check_place(function: str) -> None:
    """Check that this process may train or start ranks.

    Raises:
        UserError: it was started for something else, or is connected to others.
    """
    name = f"samestep.{function}()"
    if (file := being_read()) is not None:
        raise UserError(f"{name} was called while {file} was read as a recipe. {GUARD}")
    if PARENT in os.environ or TASK in os.environ:
        raise UserError(f"{name} was called in a rank that it has started. {GUARD}")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(f"{name} was called in a process that is starting. {GUARD}")
    if in_process_group():
        raise UserError(
            f"{name} makes a process group of its own, and this process is in one already. Call "
            "torch.distributed.destroy_process_group() first, or use samestep.open_run() for a "
            "loop of your own in it."
        )
