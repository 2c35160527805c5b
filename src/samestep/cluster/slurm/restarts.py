"""How one start of a job ended, its ranks or the check of its nodes before them; what follows."""

import re
import shlex
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from samestep.base.run.directory import STEPPED, is_run
from samestep.base.run.files import read_object, write_object
from samestep.cluster.slurm.rank_ends import (
    LATE,
    STDERR,
    RankEnd,
    first_end,
    last_signs,
    last_words,
    latest_start,
    memory_word,
    read_failures,
)
from samestep.launch.ranks.watched import CLAIM, STALLED

FILE = "slurm.json"  # in the run directory: the restarts of its job
BEGUN = ".begun"
"""The job's script writes it at each start, so its time is by the file server's clock."""

PREFLIGHT = "preflight.json"
"""The table of `samestep doctor`, which the job's script runs on all nodes before the ranks."""
NOT_PASSED = "PREFLIGHT"
"""Stands for the signal that a job's script received, where it did not start its ranks."""
_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for .* failed on node (\S+): (.+)")

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
    received: str
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
    if ending.received not in ("", NOT_PASSED) or not ending.code or ending.stopped:
        return before
    weight = _FAILS_TWICE if ending.received else 1
    counts = {node: before.node_failures.get(node, 0) + weight for node in ending.nodes}
    return replace(before, node_failures=counts)


def failed_twice(restarts: Restarts) -> tuple[str, ...]:
    """Return the nodes that the next start should do without."""
    counts = restarts.node_failures.items()
    return tuple(n for n, count in counts if count >= _FAILS_TWICE and n not in restarts.excluded)


def requeued(before: Restarts) -> Decision:
    """Return the decision if the user's script has requeued its job itself."""
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
        if ending.received == "USR1" and ending.step is None:
            text += " It got the signal before the time limit: to be restarted, exit with 1, not 0."
        return Decision(word="completed", text=text, restarts=before)
    if ending.received in _ENDED:
        word, text = _ENDED[ending.received]
        unsaved = "its ranks got the signal" if ending.step is None else "no checkpoint was saved"
        newest = "saved at" if ending.stopped else "the newest checkpoint is of"
        saved = f"{newest} step {ending.step:,}" if ending.step else unsaved
        return Decision(word=word, text=f"{text}; {saved}.", restarts=before)
    signalled = ending.received == "USR1" or ending.stopped
    unfit = ending.received == NOT_PASSED and not ending.mistake
    if (ending.mistake or not (ending.stepped or unfit)) and not signalled:
        text = f"failed: {ending.why}"
        if not ending.mistake:
            text = f"{text.rstrip('.')}. Not restarted: no start ever took a step."
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
        starts = "1 start" if count == 1 else f"{count} starts in a row"
        text = f"failed: {ending.why.rstrip('.')}. Not restarted: no newer checkpoint in {starts}."
        return Decision(word="failed", text=text, restarts=before)
    restarts = replace(
        before,
        restarts=before.restarts + 1,
        without_progress=count,
        step=max(before.step, ending.step or 0),
        excluded=(*before.excluded, *without),
    )
    if ending.step:
        follows = "continues from there" if signalled else f"continues from step {ending.step:,}"
    else:  # a script's checkpoints are unknown
        follows = "starts again" if ending.step is None else "starts over, without a checkpoint"
    if without:
        follows += f", and excludes {', '.join(without)}"
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
    received: str,
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
    failures = [failure for file, failure in read_failures(run) if _is_current(run, file.name)]
    failures.sort(key=lambda failure: (failure.get("lost_peer", False), failure.get("time", 0)))
    mistake = ""
    if wrong := next((failure for failure in failures if failure.get("code") == 2), None):
        prefix = f"[rank {wrong['rank']}] " if wrong["rank"] else ""
        mistake = f"{prefix}{wrong.get('message', '')}"
    # The watcher killed its ranks: how they ended tells nothing.
    hung = next((str(failure.get("message")) for failure in failures if failure.get("stalled")), "")
    lines = latest_start(log) if log else []
    # srun drops the ranks' last lines when it ends the others; their own files have them.
    own_files = run.glob(STDERR.format(rank="*")) if code else ()
    lines += last_words(path for path in own_files if _is_current(run, path.name))
    first = first_end(lines, failures)
    cause = None if first is None or first.is_effect else first
    killed = cause is not None and (cause.signal == "SIGKILL" or cause.code == 128 + signal.SIGKILL)
    if cause is not None and killed and not cause.said:
        memory = cause.memory or memory_word(lines, (last_start(run) or (0,))[0])
        cause = replace(cause, memory=memory)
    result = read_object(run / _RESULT) if _is_current(run, _RESULT) else {}
    why = ""
    if code == 0 and kind == "recipe" and _has_steps_left(run, step):
        code, why = 1, "srun ended with exit code 0 before the training did: a node was lost, or "
        why += "your code called sys.exit(0)"
    if result.get("status") == "failed":
        why = str(result.get("reason", "")).removeprefix("failed: ")
    if hung:
        code, cause = STALLED, None
    if cause and (cause.said or cause.signal or killed):
        why = cause.sentence
    stepped = step != 0 or (run / STEPPED).exists()
    if received == "LATE" and not hung:
        late = next((line for line in reversed(lines) if line.startswith(LATE)), LATE)
        begun_at = (run / BEGUN).stat().st_mtime if (run / BEGUN).exists() else 0.0
        silent = [f"longest silent: {sign.sentence}" for sign in last_signs(run, begun_at)[:1]]
        mistake = ""
        why = "; ".join([late.removeprefix(_OURS).partition(",")[0], *silent])
    # Exit code 2 is a user's mistake. What their code raised after some steps may not recur.
    again = bool(mistake) or code == 2 or (cause is not None and cause.comes_again)
    raised = stepped and any(failure.get("raised") for failure in failures)
    frames = cause.frames if cause and not mistake else ()
    nodes = [cause.node if cause else (result.get("stall") or {}).get("host") if hung else ""]
    messages = (line.removeprefix(_OURS) for line in reversed(lines) if line.startswith(_OURS))
    ending = Ending(
        code=code,
        received=received,
        step=step,
        saved=_is_current(run, _INDEX),
        stepped=stepped,
        mistake=again and not raised,
        stopped=result.get("status") == "stopped",
        why=mistake or hung or why or next(messages, "") or _meaning(code, cause),
        frames=frames,
        nodes=tuple(filter(None, nodes)),
    )
    if received != NOT_PASSED:
        return ending
    unfit = read_preflight(run, lines, first_node, num_nodes)
    return replace(
        ending,
        mistake=not unfit.nodes,
        why=unfit.why,
        frames=unfit.advice,
        nodes=tuple(filter(None, unfit.nodes)),
    )


@dataclass(frozen=True, kw_only=True)
class UnfitNodes:
    """Why the ranks of a start were not started."""

    why: str
    nodes: tuple[str, ...]
    """The nodes that are to blame; none if it is not a node's fault."""
    advice: tuple[str, ...] = ()


def read_preflight(run: Path, lines: Sequence[str], first_node: str, num_nodes: int) -> UnfitNodes:
    """Read what the check of the nodes has shown, from its table and the log's lines."""
    red = [row for row in read_object(run / PREFLIGHT).get("checks", ()) if row["status"] == "red"]
    red.sort(key=lambda row: not row["hosts"])
    if red:
        nodes = tuple(dict.fromkeys(host for row in red for host in row["hosts"]))
        if num_nodes == 1:
            nodes = (first_node,)
        elif len(nodes) == num_nodes:  # others would be no better
            nodes = ()
        why = "; ".join(f"{row['name']}: {row['found']}" for row in red)
        advice = tuple(f"  {row['name']}: {row['advice']}" for row in red)
        return UnfitNodes(why=f"the preflight: {why}", nodes=nodes, advice=advice)
    # Rank 0 has not come as far as to write the table.
    if lost := next(filter(None, map(_NOT_LAUNCHED.match, lines)), None):
        why = f"the preflight did not start on {lost[1]}: {lost[2]}"
        return UnfitNodes(why=why, nodes=(lost[1],))
    end = first_end(lines)
    if end is not None and (end.comes_again or end.rank == 0):
        nodes = () if end.comes_again else (end.node,)
        return UnfitNodes(why=f"the preflight: {end.sentence}", nodes=nodes)
    return UnfitNodes(why=f"the preflight did not end on {first_node}", nodes=(first_node,))


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


def settle(run: Path, decision: Decision, ending: Ending) -> None:
    """Keep the restarts in the run directory; write a failure's reason into result.json."""
    write_object(run / FILE, asdict(decision.restarts))
    for claim in run.glob(CLAIM.format(name="*")):  # of watchers that Slurm ended with their ranks
        claim.unlink(missing_ok=True)
    result = read_object(run / _RESULT)
    if decision.word == "failed" and (is_run(run) or not result):
        reason = f"failed: {ending.why}"
        result |= {"status": "failed", "reason": reason, "exit_code": ending.code}
        write_object(run / _RESULT, result)


def read_restarts(run: Path, job: int) -> Restarts:
    """Return the restarts of a job; those of another job of this run do not count."""
    try:
        restarts = msgspec.json.decode((run / FILE).read_bytes(), type=Restarts)
    except (OSError, RecursionError, msgspec.MsgspecError):
        return Restarts(job=job)
    return restarts if restarts.job == job else Restarts(job=job)


def _has_steps_left(run: Path, step: int | None) -> bool:
    """Whether a run has not completed at its newest checkpoint; without one nothing is known."""
    result = read_object(run / _RESULT)
    ended = result.get("status") == "completed" and int(result.get("steps", 0)) >= (step or 0)
    return bool(step) and not ended


def _is_current(run: Path, name: str) -> bool:
    """Whether a file is of this start, not of an earlier one."""
    try:
        return (run / name).stat().st_mtime_ns >= (run / BEGUN).stat().st_mtime_ns
    except FileNotFoundError:
        return False


def _meaning(code: int, cause: RankEnd | None) -> str:
    if cause is not None:
        return f"{cause.sentence}."
    if code == 128 + signal.SIGKILL:
        return "a rank was killed by SIGKILL (out of memory?)."
    if code > 128 and code - 128 in {int(number) for number in signal.Signals}:
        return f"a rank was ended by {signal.Signals(code - 128).name}."
    return f"the ranks ended with exit code {code}."
