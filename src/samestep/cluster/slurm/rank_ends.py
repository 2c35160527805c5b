"""What the ranks of one start did last, and how they ended.

While they run, each node writes a file every few seconds, with how long ago each of its ranks ended
a step. When they end, srun prints a line for each failed task, in the order in which they ended;
torchrun prints a summary with the time of each. A rank that raised has left a file, or a traceback
in the log. The first rank that did not end because of another one is the cause.
"""

import contextlib
import itertools
import linecache
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from samestep.base.errors import LOST_PEER
from samestep.base.run.files import read_object
from samestep.base.words import duration
from samestep.launch.ranks.process import FAILURE
from samestep.launch.ranks.watched import HEARTBEAT

STDERR = ".stderr-rank-{rank}"
"""In a run directory: the standard error of a script's rank in its latest start."""

_START = re.compile(r"samestep: job \d+, start \d+")
_SRUN = re.compile(r"srun: error: (\S+): tasks? ([0-9,-]+): (.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
LATE = "samestep: the ranks had not ended"  # the job's script says it before it kills them
# From here on Slurm or the script kills; which line Slurm prints depends on its version.
_ABORTED = re.compile(rf"srun: (Job step aborted|.*Terminating StepId=)|{LATE}")
_TORCHRUN = re.compile(
    r"time +: (?P<time>\S+)\n.*host +: (?P<host>\S+)\n"
    r".*rank +: (?P<rank>\d+) .*\n.*exitcode +: (?P<code>-?\d+)"
)
_SIGNALS = {signal.strsignal(number): number.name for number in signal.Signals}
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:,? in (?P<name>.+))?')
_CRASH = "Current thread 0x"  # faulthandler's stack follows, the innermost line first
_OOM = re.compile(
    r"oom[-_ ]kill|Out Of Memory", re.IGNORECASE
)  # the kernel's word in Slurm's lines
_LIBRARY = re.compile(r"-packages/|/lib/python3\.|^<")
# Errors that end every start in the same way, whatever is in the run directory.
_SAME_AGAIN = re.compile(
    r"(ModuleNotFoundError|ImportError|SyntaxError|IndentationError)\b"
    r"|samestep: failed: |FATAL: |.*(execve\(\)|error: pyxis: )"
)
# Of Slurm's version 2 of cgroups, and of version 1; the limit is the job's on one node.
_CGROUPS = (
    "system.slice/*slurmstepd.scope/job_{job}/memory.events",
    "memory/slurm/uid_*/job_{job}/memory.oom_control",
)
_SACCT_S = 10.0
_LABEL = re.compile(r"^ *\d+: ")
_USER_ERROR = 2  # what to mend comes first, as after wrong arguments
_NOT_FOUND = (126, 127)  # a shell's exit codes for a program that cannot be run


class LastSign(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank did last, as its node wrote it."""

    rank: int
    host: str = ""
    step: int | None = None
    """The last step that ended; None for a script, whose steps have no numbers."""
    phase: str | None = None
    call: str | None = None  # the collective that it is in, or was in last
    age_s: float = 0.0  # since the rank's last step, collective or line

    @property
    def sentence(self) -> str:
        """Who it is, since when it is silent, and where it stands."""
        step = f"; last step {self.step:,}" if self.step else ""
        where = f" in {self.call or self.phase}" if self.call or self.phase else ""
        return f"rank {self.rank} on {self.host}: nothing for {duration(self.age_s)}{where}{step}"


class _Pulse(msgspec.Struct):
    """The file of a node."""

    host: str
    ranks: list[LastSign]


def last_signs(run: Path, since: float = 0.0) -> list[LastSign]:
    """Return all ranks' last signs, the longest silent first; `since` leaves out earlier starts."""
    signs: list[LastSign] = []
    for path in run.glob(HEARTBEAT.format(node="*")):
        try:
            pulse = msgspec.json.decode(path.read_bytes(), type=_Pulse)
            written = path.stat().st_mtime  # by the file server's clock, as `since` is
        except (OSError, RecursionError, msgspec.MsgspecError):
            continue  # it is being replaced, or of another version
        if written >= since:
            signs += (msgspec.structs.replace(sign, host=pulse.host) for sign in pulse.ranks)
    # Of ranks that wait for each other, the one that began to wait last is not a cause.
    return sorted(signs, key=lambda sign: (-sign.age_s, sign.rank))


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    node: str = ""
    code: int | None = None
    signal: str = ""
    said: str = ""  # the error that it raised
    frames: tuple[str, ...] = ()  # the user's own lines that led to it, the innermost first
    memory: str = ""  # who saw it run out of memory
    is_effect: bool = False  # whether another rank's end, or Slurm, ended it
    at: float = 0.0  # when it raised, in seconds since the epoch; 0 if unknown

    @property
    def sentence(self) -> str:
        """The end as the user reads it."""
        who = f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"
        if self.said:
            return f"{who}: {self.said}"
        if self.memory:
            return f"{who} ran out of memory and was killed ({self.memory})"
        if self.signal == "SIGKILL":
            return f"{who} was killed by SIGKILL (out of memory?)"
        if self.code == 128 + signal.SIGKILL:
            return f"{who} ended with exit code 137: SIGKILL (out of memory?)"
        if self.signal:
            return f"{who} was ended by {self.signal}"
        return f"{who} ended with exit code {self.code}"

    @property
    def comes_again(self) -> bool:
        """Whether the next start would end in the same way, before it could do anything."""
        return self.code in (_USER_ERROR, *_NOT_FOUND) or _SAME_AGAIN.match(self.said) is not None


def latest_start(log: Path) -> list[str]:
    """Return the lines of the latest start in a job's log; none if it cannot be read."""
    lines = _last_lines(log, 1 << 20)
    starts = [number for number, line in enumerate(lines) if _START.match(line)]
    return lines[starts[-1] + 1 :] if starts else lines


def last_words(paths: Iterable[Path]) -> list[str]:
    """Return the last lines of ranks' standard error, labelled as in a job's log."""
    return [
        f"{path.name.rpartition('-')[2]}: {line}"
        for path in paths
        for line in _last_lines(path, 1 << 14)
    ]


def _last_lines(path: Path, num_bytes: int) -> list[str]:
    """Return the lines in the last bytes of a file; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def lines_of(rank: int, lines: Sequence[str]) -> list[str]:
    """Return a rank's lines without their label; srun pads labels to the width of the longest."""
    # PyTorch adds its own label to a traceback once the ranks have met.
    label = re.compile(rf" *{rank}: (?:\[rank{rank}\]: ?)?(.*)", re.DOTALL)
    return [match[1] for line in lines if (match := label.match(line))]


def first_end(lines: Sequence[str], failures: Sequence[dict[str, Any]] = ()) -> RankEnd | None:
    """Return the end of the rank that failed first and by itself; None if unknown."""
    raised = {int(failure["rank"]): failure for failure in failures}
    ends = _ends_by_torchrun(lines) or list(_ends_by_srun(lines))
    ends = [_with_reason(end, raised.get(end.rank), lines) for end in ends]
    # A rank that raised may still wait, or hang, when another's end is noticed.
    ended = {end.rank for end in ends}
    ends += [
        _with_reason(RankEnd(rank=rank, code=failure.get("code")), failure, lines)
        for rank, failure in sorted(raised.items(), key=lambda item: item[1].get("time", 0))
        if rank not in ended
    ]
    # The likeliest to be the cause, among equals the first. C++ libraries often abort when another
    # rank is lost, and a rank's last lines may be lost when Slurm ends it.
    return min(
        ends,
        key=lambda e: (e.is_effect, e.signal == "SIGABRT", not (e.said or e.signal), e.at),
        default=None,
    )


def read_failures(run: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the failures that ranks of any start wrote into a run directory, with their files."""
    files = ((path, read_object(path)) for path in run.glob(FAILURE.format(rank="*")))
    return [(path, failure) for path, failure in files if "rank" in failure]


def _ends_by_srun(lines: Sequence[str]) -> Iterator[RankEnd]:
    aborted = False
    for line in lines:
        aborted = aborted or _ABORTED.match(line) is not None
        match = _SRUN.match(line)
        if match is None:
            continue
        node, tasks, text = match.groups()
        exited = _EXITED.match(text)
        memory = "srun: Out Of Memory" if _OOM.search(text) else ""
        name = "SIGKILL" if memory else _SIGNALS.get(text.partition(" (")[0], text)
        killed_by = "" if exited else name
        parts = (part.partition("-") for part in tasks.split(","))  # such as 0,3-5
        spans = (range(int(first), int(last or first) + 1) for first, _, last in parts)
        for rank in itertools.chain.from_iterable(spans):
            yield RankEnd(
                rank=rank,
                node=node,
                code=int(exited[1]) if exited else None,
                signal=killed_by,
                memory=memory,
                is_effect=killed_by == "SIGTERM" or (aborted and killed_by == "SIGKILL"),
            )


def _ends_by_torchrun(lines: Sequence[str]) -> list[RankEnd]:
    ends = []
    for match in sorted(_TORCHRUN.finditer("\n".join(lines)), key=lambda match: match["time"]):
        code = int(match["code"])
        end = RankEnd(rank=int(match["rank"]), node=match["host"], code=code)
        if code < 0:
            name = _SIGNALS.get(signal.strsignal(-code), "a signal")
            end = replace(end, code=None, signal=name, is_effect=name == "SIGTERM")
        ends.append(end)
    return ends


def _with_reason(end: RankEnd, failure: dict[str, Any] | None, lines: Sequence[str]) -> RankEnd:
    # A rank that raised may abort when Python exits while threads of its process group still run.
    aborted = end.signal == "SIGABRT"
    if end.signal and not aborted and not (failure is not None and end.signal == "SIGTERM"):
        return replace(end, frames=_crash_frames(lines_of(end.rank, lines) or lines))
    if failure is not None:  # also if the rank was ended while it waited to report
        said, *more = str(failure.get("message", "")).splitlines() or [""]
        frames = tuple(line for line in more if line.startswith("  at "))
        effect, at = bool(failure.get("lost_peer")), float(failure.get("time", 0))
        return replace(end, said=said, frames=frames, is_effect=effect, at=at)
    of_rank = lines_of(end.rank, lines)
    said, frames = _last_error(of_rank if of_rank or aborted else lines)
    if not said and not aborted:
        # Slurm may lose its last lines, but other ranks printed the same.
        bare = (_LABEL.sub("", line) for line in lines)
        said = next((line for line in bare if _SAME_AGAIN.match(line)), "")
    frames = frames or (_crash_frames(of_rank or lines) if aborted else ())
    return replace(end, said=said, frames=frames, is_effect=bool(LOST_PEER.search(said)))


def _crash_frames(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the user's lines of the stack that faulthandler printed of a crash."""
    begins = [n for n, line in enumerate(lines) if line.startswith(_CRASH)]
    frames = []
    for line in lines[begins[-1] + 1 :] if begins else ():
        if (match := _FRAME.match(line)) is None:
            break
        if not _LIBRARY.search(match["file"]):
            source = linecache.getline(match["file"], int(match["line"])).strip()
            shown = f"  at {match['file']}:{match['line']} in {match['name']}"
            frames.append(f"{shown}: {source}" if source else shown)
    return tuple(frames)


def memory_word(lines: Sequence[str], job: int, cgroups: Path = Path("/sys/fs/cgroup")) -> str:
    """Return the evidence that a job ran out of memory: Slurm's log, the kernel, sacct, or ""."""
    if any(_OOM.search(line) for line in lines if line.startswith("slurmstepd")):
        return "Slurm saw the kernel's oom-kill"
    for events in (p for pattern in _CGROUPS for p in cgroups.glob(pattern.format(job=job))):
        for line in _last_lines(events, 4096):
            if kills := re.fullmatch(r"oom_kill ([1-9]\d*)", line):
                return f"the cgroup counts {kills[1]} oom_kill"
    words = ["sacct", f"--jobs={job}", "--noheader", "--parsable2", "--format=State"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # not every site keeps accounts
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_SACCT_S)
        if "OUT_OF_ME" in done.stdout:
            return "sacct says OUT_OF_MEMORY"
    return ""


def _last_error(lines: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the error of the last traceback, or a launcher's refusal, and the user's lines."""
    begins = [n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    if not begins:
        return next((line for line in lines if _SAME_AGAIN.match(line)), ""), ()
    frames: list[str] = []
    is_users = False
    for line in lines[begins[-1] + 1 :]:
        if line and not line.startswith(" "):
            return line, tuple(reversed(frames))
        if match := _FRAME.match(line):
            is_users = not _LIBRARY.search(match["file"])
            name = f" in {match['name']}" if match["name"] else ""
            frames += [f"  at {match['file']}:{match['line']}{name}"] if is_users else []
        elif is_users:  # the source line, before the ^^^^ below it
            frames[-1] += f": {line.strip()}"
            is_users = False
    return "", tuple(reversed(frames))
