"""Run a verb as a rank: where its output goes, and one report of a failure.

Ranks that `samestep --nproc` started leave their failure in a file, and the parent prints the
first one. Ranks that something else started print it themselves: rank 0 at once, another rank
only if it has not been ended by then.
"""

import contextlib
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from samestep.base.errors import (
    LOST_PEER,
    AlreadyTold,
    UserError,
    caused,
    device_error,
    error_text,
    file_error,
    is_users,
    no_exit,
    printable,
)
from samestep.base.startup import JOB_RUN, PARENT, unheeded_signal
from samestep.launch.ranks import watched
from samestep.launch.ranks.launch import detect_launch


class RankLog:
    """Where one rank's output goes: rank 0's to the screen, others' to their log in the run.

    File descriptors are redirected, which also catches output of libraries in C. Until the run
    directory is known, the output goes to a temporary file.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.path: Path | None = None
        self.terminal = 2
        """File descriptor of what the user sees of standard error."""
        self._early: IO[bytes] | None = None
        self._usual: list[int] = []
        if rank != 0:
            self._usual = [os.dup(1), os.dup(2)]
            self.terminal = self._usual[1]
            watched.speak_at(self.terminal)
            self._early = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the rank
            self._redirect(self._early.fileno(), self._early.fileno())

    def move_to(self, run: Path) -> None:
        """Keep the log in a run directory from here on."""
        self.path = run / f"rank-{self.rank}.log"
        if self._early is None:
            return
        with self.path.open("ab") as log:
            _flush()
            self._early.seek(0)
            shutil.copyfileobj(self._early, log)
            log.flush()
            self._redirect(log.fileno(), log.fileno())
        self._early.close()
        self._early = None

    def give_back(self) -> None:
        """Print to the usual place again: this rank prints nothing after, or is rank 0 now."""
        if self._usual:
            self._redirect(*self._usual)
            self._early = None
            for usual in self._usual:
                os.close(usual)
            self._usual, self.terminal = [], 2
            watched.speak_at(2)

    def _redirect(self, output: int, errors: int) -> None:
        _flush()
        os.dup2(output, 1)
        os.dup2(errors, 2)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


TASK = "SAMESTEP_TASK"
"""Set in ranks that a verb starts: what they are to do, where the arguments do not say it."""

FAILURE = ".failure-rank-{rank}.json"
"""In a job's run directory: what a rank says of its failure, as launchers hide its exit code."""

MEMBER = "SAMESTEP_MEMBER"
"""Set, in a rank of those that outlive each other, to its number among all that were started."""

HUNG = "hung-rank-{rank}"
"""In the folder of the pulses: why one of these was ended."""

STARTED_AT = "SAMESTEP_STARTED_AT"
"""When the user's command began, in seconds since the epoch."""


def hand_back(value: Any) -> None:
    """Give the process that started this rank a value, which stays if the rank fails later."""
    with _values_file(Path(os.environ[TASK]), rank_of()).open("ab") as file:
        pickle.dump(value, file)


def handed_back(task: Path, rank: int) -> list[Any]:
    """Return the values that a rank has handed back, without one that its end cut short."""
    values: list[Any] = []
    ends = (FileNotFoundError, EOFError, pickle.UnpicklingError)
    with contextlib.suppress(*ends), _values_file(task, rank).open("rb") as file:
        while True:
            values.append(pickle.load(file))  # noqa: S301 - written by our own ranks
    return values


def _values_file(task: Path, rank: int) -> Path:
    return task.with_name(f"{task.name}-rank-{rank}")


# A rank other than 0 gives rank 0 this long to say the same, and the launcher to end them all. On a
# busy machine one rank's Python may start seconds after another's.
GRACE_S = 5.0


def rank_of() -> int:
    """Return the rank in the environment, before anything is checked; 0 without a launcher."""
    try:
        return detect_launch(os.environ).rank
    except UserError:
        return 0


def report(error: BaseException, log: RankLog | None = None) -> int:
    """Report an error that ends this process, and return its exit code.

    This rank's log gets the traceback, unless the error is a `UserError` without a cause.
    """
    error = device_error(error) or file_error(error) or error
    rank, path = (log.rank, log.path) if log else (0, None)
    code = 2 if isinstance(error, UserError) else 1
    message = str(error) if code == 2 else _describe(error, path)
    # What no encoding has, as half of a pair in a file's name, is shown by its number.
    message = message.encode(errors="backslashreplace").decode()
    if path is not None:
        # On a full disk the log takes nothing more; the message must reach the user all the same.
        with contextlib.suppress(OSError), path.open("a", errors="backslashreplace") as file:
            whole = code == 1 or error.__cause__ is not None
            file.write("".join(traceback.format_exception(error)) if whole else message + "\n")
    of_all, lost_peer = getattr(error, "on_all_ranks", False), is_lost_peer(error)
    told_by_rank_0 = rank != 0 and of_all
    if not told_by_rank_0 and (run := os.environ.get(JOB_RUN)):
        failure = {"rank": rank, "code": code, "message": message, "time": time.time()}
        # What the user's code raised may not come again, as an error of a disk.
        raised = isinstance(error, UserError) and not isinstance(caused(error), UserError)
        text = json.dumps(failure | {"lost_peer": lost_peer, "raised": raised})
        with contextlib.suppress(OSError):
            Path(run, FAILURE.format(rank=rank)).write_text(text)
    of_rank = f"[rank {rank}] " if rank else ""
    if rank and not (of_all or lost_peer) and "torch" in sys.modules:
        from samestep.launch.ranks.world import publish_failure  # noqa: PLC0415 - imports torch

        publish_failure(of_rank + message.splitlines()[0])  # rank 0 keeps the run's result
    if lost_peer:
        # The rank that caused it is being reported; a launcher ends this process first.
        # SIGTERM was its word, if it came while the training still took it for a wish to stop.
        ended = unheeded_signal() == signal.SIGTERM
        if ended and not os.environ.get(PARENT):
            return code
        message = _lost_contact(error, rank)
        if "timed out" not in message.lower():
            time.sleep(GRACE_S)
        else:
            watched.wait_for_verdict(error, GRACE_S)
            message += ". If a rank was only slow, as with a large checkpoint: --timeout-s"
    if os.environ.get(PARENT) or os.environ.get(MEMBER):
        # The parent, which parsed the flags first, takes a mistake for one of all ranks.
        alone = code == 2 and error.__cause__ is not None and not of_all
        leave_for_parent(of_rank * alone + message, code)
        return code
    if rank != 0 and not lost_peer:
        time.sleep(GRACE_S)
    if not told_by_rank_0:
        print_error(of_rank + message, log.terminal if log else 2)
    return code


def print_error(message: str, descriptor: int = 2) -> None:
    """Print one error message to standard error."""
    with contextlib.suppress(OSError):  # a terminal that was closed takes nothing more
        sys.stderr.flush()
        text = printable(message, lines=True)  # names of others' files may hold codes of a terminal
        os.write(descriptor, f"samestep: {text}\n".encode())


def _describe(error: BaseException, log: Path | None) -> str:
    """Describe an unforeseen error: the user's own lines, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if is_users(frame.filename)] or frames[-1:]
    lines = [f"  at {f.filename}:{f.lineno} in {f.name}: {f.line}" for f in reversed(own)]
    traceback_text = "".join(traceback.format_exception(error))
    lines.append(f"  The whole traceback is in {log}" if log else traceback_text)
    return "\n".join([error_text(error), *lines])


def why_failed(error: BaseException) -> str:
    """Return why a run fails, as the screen says it: of several ranks, what failed first."""
    error = device_error(error) or error
    if not is_lost_peer(error):
        return str(error) if isinstance(error, UserError) else error_text(error)
    from samestep.launch.ranks.world import first_failure  # noqa: PLC0415 - imports torch

    return first_failure() or _lost_contact(error, rank_of())


LOST_CONTACT = "lost contact with another rank"


def _lost_contact(error: BaseException, rank: int) -> str:
    return f"Rank {rank} {LOST_CONTACT}: {str(error).splitlines()[0]}"


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether a rank gets this error when another one is gone."""
    lost = isinstance(error, RuntimeError) and LOST_PEER.search(str(error))
    return bool(lost) or type(error).__name__.startswith("Dist")


def leave_for_parent(message: str, code: int) -> None:
    """Leave a message and an exit code where the elastic agent looks for a rank's failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        when = {"timestamp": str(int(time.time()))}
        failure = {"message": message, "errorCode": code, "extraInfo": when}
        Path(path).write_text(json.dumps({"message": failure}))


def run_as_rank(verb: Callable[[RankLog], int]) -> int:
    """Run a verb with this rank's log, report its failure once for all ranks; return the exit code.

    A `BrokenPipeError` passes, and so does `AlreadyTold`, once rank 0 had time to report.
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
        from samestep.launch.ranks.world import abandon  # noqa: PLC0415 - imports torch

        abandon(code)  # connected still: this rank or another has failed
    return code
