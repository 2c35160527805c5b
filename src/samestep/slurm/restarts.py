"""How one start of a job ended, and whether it goes on: a pure function, and what it reads."""

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from samestep.ranks.failure import MISTAKE
from samestep.run.directory import is_run
from samestep.run.files import read_object, write_text

FILE = "slurm.json"  # in the run directory: what the restarts of its job have come to
BEGUN = ".begun"
"""There too: the job's script touches it at each start, by the clock of the file server."""

_RESULT = "result.json"
_INDEX = "checkpoints/index.json"
_OURS = "samestep: "

Word = Literal["completed", "again", "failed", "cancelled", "ended"]


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """What the job's script knows of its earlier starts, and how many made no newer checkpoint."""

    job: int = 0
    restarts: int = 0
    without_progress: int = 0
    step: int = 0
    """Step of the newest checkpoint when it last asked."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known once the ranks of one start have ended."""

    code: int
    told: str
    """The signal that came to the script: USR1, USR2, TERM or nothing."""
    step: int | None
    """Step of the newest announced checkpoint; None where the script is the user's own."""
    saved: bool
    """Whether this start announced it."""
    mistake: bool
    """Whether the next start would fail in the same way: an exit code of 2 says so."""
    stopped: bool
    """Whether the run itself wrote that a signal stopped it."""
    why: str
    """What the ranks said, or what the exit code means."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the script does next."""

    word: Word
    text: str
    """The last line of the log."""
    restarts: Restarts


def decide(ending: Ending, before: Restarts, limit: int, *, requeue: bool = True) -> Decision:
    """Return what follows: the end, another start, or neither because Slurm ends it anyway.

    The limit is of starts in a row without a newer checkpoint.
    """
    at = f" at step {ending.step:,}" if ending.step else ""
    if ending.code == 0:
        text = "completed."
        if ending.told == "USR1" and ending.step is None:
            text += " It was warned of the time limit: if it is to go on, exit with 1, not 0."
        return Decision(word="completed", text=text, restarts=before)
    if ending.told in _ENDED:
        word, text = _ENDED[ending.told]
        unsaved = "its ranks were told" if ending.step is None else "nothing is saved"
        saved = f"saved{at}" if at else unsaved
        return Decision(word=word, text=f"{text}; {saved}.", restarts=before)
    signalled = ending.told == "USR1" or ending.stopped
    if ending.mistake and not signalled:
        return Decision(word="failed", text=f"failed: {ending.why}", restarts=before)
    # A script of the user's shows no progress; one that a warning killed outright saved nothing.
    progressed = (
        signalled and ending.code not in _STOPS
        if ending.step is None
        else ending.saved and ending.step > before.step
    )
    cause = f"stopped{at}" if signalled else ending.why.rstrip(".")
    if not requeue:
        word, text = ("ended", cause) if signalled else ("failed", f"failed: {cause}")
        text += "; hand it in again to go on (--no-requeue)."
        return Decision(word=word, text=text, restarts=before)
    count = 0 if progressed else before.without_progress + 1
    if count > limit:
        text = (
            f"failed: {ending.why.rstrip('.')}. Not started again: there was no newer checkpoint "
            f"in {count} starts in a row."
        )
        return Decision(word="failed", text=text, restarts=before)
    step, again = max(before.step, ending.step or 0), before.restarts + 1
    restarts = Restarts(job=before.job, restarts=again, without_progress=count, step=step)
    text = f"{cause}; the job goes on from the newest checkpoint (restart {restarts.restarts})."
    return Decision(word="again", text=text, restarts=restarts)


_ENDED: dict[str, tuple[Word, str]] = {
    "USR2": ("cancelled", "cancelled by you"),
    "TERM": ("ended", "Slurm ended this start (preempted, requeued or cancelled)"),
}
_STOPS = frozenset({128 + signal.SIGTERM, 128 + signal.SIGUSR1, 128 + signal.SIGINT})


def read_ending(run: Path, *, code: int, told: str, kind: str, log: Path | None) -> Ending:
    """Read from the run directory, and the job's log file, how a start of this kind ended."""
    step = None
    if kind == "recipe":
        last = read_object(run / _INDEX).get("last") or {}
        step = int(last.get("step", 0))
    # srun and torchrun hide the ranks' exit codes; what an earlier start left does not count.
    mistake = (run / MISTAKE).read_text() if _is_of_this_start(run, MISTAKE) else ""
    result = read_object(run / _RESULT) if _is_of_this_start(run, _RESULT) else {}
    left = str(result.get("reason", "")) if result.get("status") == "failed" else ""
    return Ending(
        code=code,
        told=told,
        step=step,
        saved=_is_of_this_start(run, _INDEX),
        mistake=bool(mistake) or code == 2,  # samestep's own code for a mistake of the user's
        stopped=result.get("status") == "stopped",
        why=mistake or left.removeprefix("failed: ") or _why(code, log),
    )


def settle(run: Path, verdict: Decision, ending: Ending) -> None:
    """Write down what was decided; a failed run gets its why in result.json."""
    write_text(run / FILE, json.dumps(asdict(verdict.restarts), indent=2) + "\n")
    result = read_object(run / _RESULT)
    if verdict.word == "failed" and (is_run(run) or not result):
        reason = f"failed: {ending.why}"
        result |= {"status": "failed", "reason": reason, "exit_code": ending.code}
        write_text(run / _RESULT, json.dumps(result, indent=2) + "\n")


def read_restarts(run: Path, job: int) -> Restarts:
    """Return what is known of the restarts of a job; those of another job do not count."""
    try:
        found = msgspec.json.decode((run / FILE).read_bytes(), type=Restarts)
    except (OSError, msgspec.MsgspecError):
        return Restarts(job=job)
    return found if found.job == job else Restarts(job=job)


def _is_of_this_start(run: Path, name: str) -> bool:
    try:
        return (run / name).stat().st_mtime_ns >= (run / BEGUN).stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _why(code: int, log: Path | None) -> str:
    """Return what the ranks said last in this start, or what the exit code means."""
    if log is not None and (said := _last_message(log)):
        return said
    if code == 128 + signal.SIGKILL:
        return "a rank was killed by SIGKILL (out of memory?)."
    if code > 128 and code - 128 in {int(number) for number in signal.Signals}:
        return f"a rank was ended by {signal.Signals(code - 128).name}."
    return f"the ranks ended with exit code {code}."


def _last_message(log: Path) -> str:
    """Return samestep's last message in the latest start of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = ["", *(line.removeprefix(_OURS) for line in lines if line.startswith(_OURS))]
    return "" if said[-1].startswith("job ") else said[-1]
