"""How one start of a job ended, and whether the job starts again."""

import json
import shlex
import signal
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from samestep.base.run.directory import STEPPED, is_run
from samestep.base.run.files import read_object, write_text
from samestep.cluster.slurm.preflight import NOT_PASSED, read_failed
from samestep.cluster.slurm.pulses import read_pulses
from samestep.cluster.slurm.rank_ends import (
    LATE,
    STDERR,
    RankEnd,
    first_end,
    last_words,
    latest_start,
    memory_word,
    read_failures,
)
from samestep.launch.ranks.watched import CLAIM, STALLED

FILE = "slurm.json"  # in the run directory: the restarts of its job
BEGUN = ".begun"
"""The job's script writes it at each start, so its time is by the file server's clock."""

_RESULT = "result.json"
_INDEX = "checkpoints/index.json"
_OURS = "samestep: "
_FAILS_TWICE = 2

Word = Literal["completed", "again", "requeued", "failed", "cancelled", "ended"]
"""`requeued` where the user's script itself has asked Slurm for the next start."""


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often a job restarted, and how often in a row without a newer checkpoint."""

    job: int = 0
    restarts: int = 0
    without_progress: int = 0
    step: int = 0  # step of the newest checkpoint at its last restart
    node_failures: dict[str, int] = field(default_factory=dict)
    """How many starts in a row each of these nodes has ended."""
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known after the ranks of one start have ended."""

    code: int
    told: str
    """The signal that the script received: USR1, USR2, TERM or nothing; LATE if ranks did not end
    after USR1 and were killed, PREFLIGHT if they were not started."""
    step: int | None
    """Step of the newest saved checkpoint; None for a script without a samestep run."""
    saved: bool  # whether this start announced that checkpoint
    stepped: bool = True  # whether any start took a step, as far as is known
    mistake: bool  # whether the next start would fail in the same way, as after exit code 2
    stopped: bool  # whether result.json says that a signal stopped the run
    why: str  # the error of the rank that failed first, or what its exit code means
    frames: tuple[str, ...] = ()
    """The user's lines that led to the error, the innermost first; a preflight's advice."""
    nodes: tuple[str, ...] = ()  # where it failed


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the script does next."""

    word: Word
    text: str  # the last line of the log
    restarts: Restarts


def with_failures(before: Restarts, ending: Ending) -> Restarts:
    """Count a start's end against its nodes; one that is not fit to start on counts fully."""
    if ending.told not in ("", NOT_PASSED) or not ending.code:
        return before
    weight = _FAILS_TWICE if ending.told else 1
    counts = {node: before.node_failures.get(node, 0) + weight for node in ending.nodes}
    return replace(before, node_failures=counts)


def failed_twice(restarts: Restarts) -> tuple[str, ...]:
    """Return the nodes that the next start should do without."""
    counts = restarts.node_failures.items()
    return tuple(n for n, count in counts if count >= _FAILS_TWICE and n not in restarts.excluded)


def requeued(before: Restarts) -> Decision:
    """Return what follows where the user's script has requeued its job itself."""
    restarts = replace(before, restarts=before.restarts + 1, without_progress=0)
    text = f"stopped; its script has requeued the job (restart {restarts.restarts})."
    return Decision(word="requeued", text=text, restarts=restarts)


def decide(
    ending: Ending,
    before: Restarts,
    limit: int,
    *,
    requeue: bool = True,
    go_on: str = "",
    without: tuple[str, ...] = (),
) -> Decision:
    """Decide what follows; `limit` is how many starts in a row may bring no newer checkpoint.

    Without `requeue`, because of the user or of the site, the text names the command `go_on`.
    A restart excludes the nodes in `without`.
    """
    at = f" at step {ending.step:,}" if ending.step else ""
    if ending.code == 0:
        text = "completed."
        if ending.told == "USR1" and ending.step is None:
            text += " It was warned of the time limit: to be started again, exit with 1, not 0."
        return Decision(word="completed", text=text, restarts=before)
    if ending.told in _ENDED:
        word, text = _ENDED[ending.told]
        unsaved = "its ranks got the signal" if ending.step is None else "nothing is saved"
        newest = "saved at" if ending.stopped else "the newest checkpoint is from"
        saved = f"{newest} step {ending.step:,}" if ending.step else unsaved
        return Decision(word=word, text=f"{text}; {saved}.", restarts=before)
    signalled = ending.told == "USR1" or ending.stopped
    unfit = ending.told == NOT_PASSED and not ending.mistake
    if (ending.mistake or not (ending.stepped or unfit)) and not signalled:
        text = f"failed: {ending.why}"
        if not ending.mistake:
            text = f"{text.rstrip('.')}. Not started again: no start ever took a step."
        return Decision(word="failed", text=text, restarts=before)
    # A user's script shows no progress, and one that the warning signal killed saved nothing.
    progressed = (
        signalled and ending.code not in _STOPS
        if ending.step is None
        else ending.saved and ending.step > before.step
    )
    cause = f"stopped{at}" if signalled else ending.why.rstrip(".")
    if not requeue:
        word, text = ("ended", cause) if signalled else ("failed", f"failed: {cause}")
        text += f"; the job is not requeued. Continue with: {go_on or 'samestep slurm submit RUN'}"
        return Decision(word=word, text=text, restarts=before)
    count = 0 if progressed else before.without_progress + (not (unfit and without))
    if count > limit:
        text = (
            f"failed: {ending.why.rstrip('.')}. Not started again: there was no newer checkpoint "
            f"in {count} start{'s in a row' * (count > 1)}."
        )
        return Decision(word="failed", text=text, restarts=before)
    step, again = max(before.step, ending.step or 0), before.restarts + 1
    excluded = (*before.excluded, *without)
    restarts = replace(before, restarts=again, without_progress=count, step=step, excluded=excluded)
    if ending.step:
        follows = "continues from there" if signalled else f"continues from step {ending.step:,}"
    else:  # a script's checkpoints are unknown
        follows = "starts again" if ending.step is None else "begins again, without a checkpoint"
    follows += f", and excludes {', '.join(without)}" * bool(without)
    text = f"{cause}; the job {follows} (restart {restarts.restarts})."
    return Decision(word="again", text=text, restarts=restarts)


_ENDED: dict[str, tuple[Word, str]] = {
    "USR2": ("cancelled", "cancelled by you"),
    "TERM": ("ended", "Slurm ended this start (preempted, requeued or cancelled)"),
}
_STOPS = frozenset({128 + signal.SIGTERM, 128 + signal.SIGUSR1, 128 + signal.SIGINT})


def read_ending(
    run: Path,
    *,
    code: int,
    told: str,
    kind: str,
    log: Path | None,
    first_node: str = "",
    num_nodes: int = 1,
) -> Ending:
    """Read from the run directory and the job's log how the latest start ended."""
    step = None
    if kind == "recipe" or is_run(run):  # a script with samestep.open_run has checkpoints there
        last = read_object(run / _INDEX).get("last") or {}
        step = int(last.get("step", 0))
    # srun and torchrun hide the ranks' exit codes. Files of earlier starts do not count.
    failures = [left for path, left in read_failures(run) if _is_of_this_start(run, path.name)]
    failures.sort(key=lambda left: (left.get("lost_peer", False), left.get("time", 0)))
    mistake = ""
    if wrong := next((left for left in failures if left.get("code") == 2), None):
        prefix = f"[rank {wrong['rank']}] " if wrong["rank"] else ""
        mistake = f"{prefix}{wrong.get('message', '')}"
    # The watcher killed its ranks: how they ended tells nothing.
    hung = next((str(left.get("message")) for left in failures if left.get("stalled")), "")
    lines = latest_start(log) if log else []
    # srun drops the ranks' last lines when it ends the others; their own files have them.
    own_files = run.glob(STDERR.format(rank="*")) if code else ()
    lines += last_words(path for path in own_files if _is_of_this_start(run, path.name))
    first = first_end(lines, failures)
    cause = None if first is None or first.is_effect else first
    killed = cause is not None and (cause.signal == "SIGKILL" or cause.code == 128 + signal.SIGKILL)
    if cause is not None and killed and not cause.said:
        memory = cause.memory or memory_word(lines, (last_start(run) or (0,))[0])
        cause = replace(cause, memory=memory)
    result = read_object(run / _RESULT) if _is_of_this_start(run, _RESULT) else {}
    why = str(result.get("reason", "")) if result.get("status") == "failed" else ""
    if hung:
        code, cause = STALLED, None
    why = (
        cause.sentence
        if cause and (cause.said or cause.signal or killed)
        else why.removeprefix("failed: ")
    )
    stepped = step != 0 or (run / STEPPED).exists()
    if told == "LATE" and not hung:
        late = next((line for line in reversed(lines) if line.startswith(LATE)), LATE)
        silent = [f"longest silent: {p.sentence}" for p in read_pulses(run, _begun_at(run))[:1]]
        mistake, why = "", "; ".join([late.removeprefix(_OURS).partition(",")[0], *silent])
    # Exit code 2 is a mistake of the user's. What their code raised after some steps may not happen
    # again.
    again = bool(mistake) or code == 2 or (cause is not None and cause.comes_again)
    raised = stepped and any(left.get("raised") for left in failures)
    frames = cause.frames if cause and not mistake else ()
    nodes = [cause.node if cause else (result.get("stall") or {}).get("host") if hung else ""]
    if told == NOT_PASSED:
        unfit = read_failed(run, lines, first_node, num_nodes)
        again, raised, why, nodes = not unfit.nodes, False, unfit.why, [*unfit.nodes]
        mistake, frames = why if again else "", unfit.advice
    said = (line.removeprefix(_OURS) for line in reversed(lines) if line.startswith(_OURS))
    return Ending(
        code=code,
        told=told,
        step=step,
        saved=_is_of_this_start(run, _INDEX),
        stepped=stepped,
        mistake=again and not raised,
        stopped=result.get("status") == "stopped",
        why=mistake or hung or why or next(said, "") or _meaning(code, cause),
        frames=frames,
        nodes=tuple(filter(None, nodes)),
    )


def go_on_command(run: Path) -> str:
    """Return the command that continues a run; a script has none, and begins again."""
    shown = shlex.quote(str(run))
    return f"samestep slurm submit {shown}" if is_run(run) else f"sbatch {shown}/job.sbatch"


class JobStart(NamedTuple):
    """A start of a job, as its script notes it."""

    job: int
    restarts: int
    name: str


def last_start(run: Path) -> JobStart | None:
    """Return the start that a run directory has seen last; None if there was none."""
    try:
        job, restarts, *name = (run / BEGUN).read_text().split(maxsplit=2)
        return JobStart(int(job), int(restarts), "".join(name).strip())
    except (OSError, ValueError):
        return None


def settle(run: Path, verdict: Decision, ending: Ending) -> None:
    """Keep the restarts in the run directory; write a failure's reason into result.json."""
    write_text(run / FILE, json.dumps(asdict(verdict.restarts), indent=2) + "\n")
    for claim in run.glob(CLAIM.format(name="*")):  # of watchers that Slurm ended with their ranks
        claim.unlink(missing_ok=True)
    result = read_object(run / _RESULT)
    if verdict.word == "failed" and (is_run(run) or not result):
        reason = f"failed: {ending.why}"
        result |= {"status": "failed", "reason": reason, "exit_code": ending.code}
        write_text(run / _RESULT, json.dumps(result, indent=2) + "\n")


def read_restarts(run: Path, job: int) -> Restarts:
    """Return the restarts of a job; those of another job of this run do not count."""
    try:
        found = msgspec.json.decode((run / FILE).read_bytes(), type=Restarts)
    except (OSError, RecursionError, msgspec.MsgspecError):
        return Restarts(job=job)
    return found if found.job == job else Restarts(job=job)


def _is_of_this_start(run: Path, name: str) -> bool:
    try:
        return (run / name).stat().st_mtime_ns >= (run / BEGUN).stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _begun_at(run: Path) -> float:
    return (run / BEGUN).stat().st_mtime if (run / BEGUN).exists() else 0.0


def _meaning(code: int, cause: RankEnd | None) -> str:
    if cause is not None:
        return f"{cause.sentence}."
    if code == 128 + signal.SIGKILL:
        return "a rank was killed by SIGKILL (out of memory?)."
    if code > 128 and code - 128 in {int(number) for number in signal.Signals}:
        return f"a rank was ended by {signal.Signals(code - 128).name}."
    return f"the ranks ended with exit code {code}."
