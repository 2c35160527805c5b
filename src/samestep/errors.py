"""The one error that a user's mistake raises; the command line turns it into exit code 2."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# What a rank meets when another one is gone: an effect, never the cause.
LOST_PEER = re.compile(
    r"closed by peer|connection (reset|refused|was closed)|broken pipe|gloo|nccl", re.IGNORECASE
)


class UserError(Exception):
    """A mistake in what the user asked for or in where they asked for it.

    The message is all that the user sees, so it says what is wrong, where, and what to do.
    """

    def __init__(self, message: str, *, on_all_ranks: bool = False) -> None:
        super().__init__(message)
        self.on_all_ranks = on_all_ranks
        """Whether every rank raises it by agreement, so that rank 0 alone needs to tell."""


class AlreadyTold(SystemExit):
    """The command ends with this exit code, and the user knows why."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Run code of the user's; a call of `exit()` in it is a mistake.

    Raises:
        UserError: it was called.
    """
    try:
        yield
    except AlreadyTold:
        raise
    except SystemExit as error:
        import traceback  # noqa: PLC0415 - it is needed after a mistake only

        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if "_sitebuiltins" not in f.filename][-1]  # exit() is there
        code = "" if error.code is None else repr(error.code)
        raise UserError(
            f"exit({code}) was called at {frame.filename}:{frame.lineno}. A recipe must not end "
            "the process: other ranks may be waiting for it. Raise an error there instead."
        ) from error


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "Did you mean …? " for the closest of some names, or nothing."""
    import difflib  # noqa: PLC0415 - it is needed after a mistake only

    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]!r}? " if close else ""
