"""The run directory: plain files that rank 0 writes; whether a run is open, and how it ended.

What is recorded of the machine and the environment is an allow-list, without secrets.
"""

import contextlib
import datetime as dt
import json
import math
import os
import platform
import re
import secrets
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from samestep.base.errors import UserError, listed
from samestep.base.machine import usable_cores
from samestep.base.plugins import __version__
from samestep.base.run.files import (
    Held,
    cannot_write,
    hold,
    open_regular,
    read_object,
    write_object,
)
from samestep.base.run.records import RUN_FORMAT, Record, check_format
from samestep.base.run.summary import (
    SUMMARY,
    GrowingSummary,
    State,
    Summary,
    SummaryFile,
    catch_up,
    check_ours,
    first_start,
    read_growing,
)

# What is recorded of the environment. Everything else may hold a secret.
_ALLOWED = re.compile(
    r"(?!SLURM_SPANK)(NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|SLURM|OMP|MKL|CUDA|OMPI_COMM_WORLD|PMI)_[A-Z0-9_]+"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
# Whole words of a name: TOKENIZERS_PARALLELISM holds none.
_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH|COOKIE|JWT)S?(_|$)",
    re.IGNORECASE,
)


def describe_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the machine, the command and the variables on an allow-list."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "cores_usable": len(usable_cores()),
        "command": _without_secrets(sys.argv),
        "variables": {
            name: value
            for name, value in sorted(environment.items())
            if _ALLOWED.fullmatch(name) and not names_secret(name)
        },
    }


def git_commit(folder: Path) -> str:
    """Return the commit that a folder's repository is at; "" where there is none.

    It is read from git's own files: to ask git takes longer than a short training.
    """
    for parent in (folder, *folder.parents):
        if not (parent / ".git").is_dir():
            continue
        try:
            head = (parent / ".git" / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            name = head.removeprefix("ref: ")
            if (parent / ".git" / name).is_file():
                return (parent / ".git" / name).read_text().strip()
            packed = (parent / ".git" / "packed-refs").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return ""
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    return ""


def names_secret(name: str) -> bool:
    """Whether a variable or a flag is named like a secret: WANDB_API_KEY, --hf-token."""
    return bool(_SECRET.search(re.sub(r"[-.]", "_", name.lstrip("-"))))


def _without_secrets(command: list[str]) -> list[str]:
    """Return a command without the values of flags that are named like a secret."""
    shown: list[str] = []
    hides_next = False
    for word in command:
        name, equals, _value = word.partition("=")
        secret = name.startswith("-") and names_secret(name)
        shown.append("…" if hides_next else f"{name}=…" if secret and equals else word)
        hides_next = secret and not equals
    return shown


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    import torch  # noqa: PLC0415 - readers of a run need no torch

    packages = {
        "samestep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    return packages | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def new_run_path(recipe: str, root: Path = Path("runs")) -> Path:
    """Return a new directory's name: runs/<recipe>-<date>-<time>-<short id>."""
    now = dt.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return root / f"{recipe}-{now}-{secrets.token_hex(2)}"


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    try:
        return (path / "settings.toml").is_file()
    except PermissionError:
        raise
    except OSError:  # a name that no file can have
        return False


_OTHERS = frozenset({".log", ".out", ".err", ".sh", ".sbatch", ".stall", ".toml"})
"""Suffixes of a job's files, which may be in the directory before the run begins."""


_ANOTHER = "choose another with --run-dir"


def check_free(path: Path) -> Path:
    """Refuse a directory with files that do not belong to a run; return it."""
    try:
        names = sorted(entry.name for entry in path.iterdir() if entry.name[0] != ".")
    except (FileNotFoundError, NotADirectoryError):
        return path
    except OSError as error:
        raise cannot_write(path, error, instead=_ANOTHER) from error
    known = {"checkpoints", "events.jsonl", "run.lock", "job.json", "rank-0.log"} & {*names}
    others = [name for name in names if Path(name).suffix not in _OTHERS]
    if path.resolve() == Path(path.resolve().anchor) or (others and not known):
        raise UserError(
            f"--run-dir {path} is not a run, and holds {len(others)} other files or folders: "
            f"{listed(others)}. Name a new directory, such as runs/first."
        )
    return path


def no_run(path: Path) -> UserError:
    """Return the message for a directory that holds no run."""
    if (path / "events.jsonl").is_file():
        return UserError(
            f"There is no run at {path}: its settings.toml is missing, though it has records. "
            "Restore the file from a backup; each checkpoint also has its text: "
            "torch.load(FILE)['made_with']."
        )
    from samestep.base.nearby import nearby  # noqa: PLC0415 - for messages only

    why = "it has no settings.toml" if path.is_dir() else "no such directory"
    name = "Name the directory of a run, like runs/ID."
    return UserError(f"There is no run at {path}: {why}. {name}{nearby(path, 'run')}")


def _written_ns(path: Path) -> int | None:
    """Return when a file was written last; None if there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


class Run:
    """The open directory of a run. Only one process at a time has it open."""

    def __init__(self, path: Path) -> None:
        check_format(first_start(path), path)  # before anything in it is touched
        check_ours(path)
        self.path = path
        self.checkpoints = path / "checkpoints"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = lock_run(path)
            with contextlib.ExitStack() as failed:
                failed.callback(self._lock.close)
                self._events = (path / "events.jsonl").open("a+b", buffering=0)
                self._events.seek(0)
                # A line that a kill tore off at the end is cut away.
                self._events.truncate(self._events.readall().rfind(b"\n") + 1)
                failed.pop_all()
        except OSError as error:
            raise cannot_write(path, error, instead=_ANOTHER) from error
        for torn in self.checkpoints.glob(".*.tmp"):
            torn.unlink(missing_ok=True)
        self._result_before = _written_ns(path / "result.json")
        self._summary = SummaryFile(path)

    def append(self, record: Record) -> None:
        """Add one record to events.jsonl, and keep summary.json."""
        left = memoryview(f"{_line(record)}\n".encode())
        end = self._events.seek(0, os.SEEK_END)
        try:
            # One write a line: a killed process leaves whole lines, or one torn at the very end.
            while left:
                left = left[self._events.write(left) :]  # a disk that gets full takes a part
            if record["event"] == "stop":
                os.fsync(self._events.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next record would follow a torn one
                self._events.truncate(end)
            raise cannot_write(self.path / "events.jsonl", error) from error
        self._summary.add(record)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json, unless this is a failure after the watcher has written who hung.

        The watcher ends the ranks one by one, and the others fail because they lose these.
        """
        path = self.path / "result.json"
        is_new = _written_ns(path) != self._result_before
        if result.get("status") == "failed" and is_new and "stall" in read_object(path):
            return
        write_object(path, plain(result))
        self._summary.end(result)

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Write environment.json: versions, the machine, and the variables that are allowed."""
        table = {**describe_environment(os.environ), **facts}
        write_object(self.path / "environment.json", table)

    def close(self) -> None:
        """Close the files and let another process open the run."""
        self._events.close()
        self._lock.close()


_FINITE = json.JSONEncoder(allow_nan=False)


def _line(record: Record) -> str:
    try:
        return _FINITE.encode(record)
    except (TypeError, ValueError):  # rare: a NaN, or a mapping that is not a dict
        return json.dumps(plain(record))


def plain(value: Any) -> Any:
    """Replace NaN and infinity by None: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    return value


_held: dict[Path, BinaryIO] = {}
"""The locks of this process, by run. Opening and closing such a file again would drop the lock."""


def lock_run(path: Path) -> BinaryIO:
    """Hold a run for this process; the lock ends with it, however it ends."""
    own = _held.get(path.resolve())
    if own is not None and not own.closed:
        raise UserError(
            f"{path} is open in this process already. Leave its `with` or close() its logger, "
            "or name another directory."
        )
    try:
        _held[path.resolve()] = hold(path / "run.lock")
        return _held[path.resolve()]
    except Held as owner:
        raise UserError(f"{path} is in use by {owner}. Wait for its end, or stop it.") from None


def is_written(path: Path) -> bool:
    """Whether a process of this machine has the run open; the lock is tested, not taken.

    A process of another machine is seen if the file system passes locks on.
    """
    own = _held.get(path.resolve())
    if own is not None and not own.closed:
        return True
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return False
    # struct flock: type, whence, start, length, process; the order is macOS's or that of Linux.
    shape, place = ("@qqihh", 3) if sys.platform == "darwin" else ("@hhqqi4x", 0)
    asked = [fcntl.F_WRLCK if number == place else 0 for number in range(5)]
    try:
        with open_regular(path / "run.lock") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(shape, *asked))
    except OSError:
        return False
    return bool(struct.unpack(shape, answer)[place] != fcntl.F_UNLCK)


SWEEP = "sweep.json"
"""In the folder of a sweep: each training's settings, by the name of its directory."""

STEPPED = ".stepped"
"""A file of the run directory that is touched while steps are taken.

events.jsonl has a record every `log_every` steps; whether a job of Slurm moves has to show sooner.
"""
_EVERY_S = 2.0


class Heartbeat:
    """Touch a file of the run every few seconds."""

    def __init__(self, run: Path) -> None:
        self._path = run / STEPPED
        self._next = 0.0

    def beat(self) -> None:
        """Record that a step was taken."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + _EVERY_S
            with contextlib.suppress(OSError):  # a full disk ends no training
                self._path.touch()


_FRESH_S = 120.0
"""A run on another machine counts as running if it wrote within this time."""


def read_summary(run: Path) -> tuple[Summary, list[str]]:
    """Return a run in short, as far as it can be read, and what is damaged.

    Its state is that of now, such as `killed`. Without summary.json its records tell.
    """
    damage: list[str] = []
    try:
        with open_regular(run / SUMMARY) as file:
            summary = msgspec.convert(json.loads(file.read()), Summary)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        if not isinstance(error, FileNotFoundError):
            damage.append(f"{SUMMARY} is damaged, or not samestep's")
        summary = _by_records(run, damage)
    else:
        if summary.format > RUN_FORMAT:
            damage.append(f"its run format {summary.format} is newer than this samestep")
        if not (run / "events.jsonl").exists():
            damage.append("events.jsonl is missing")
    if summary.state == "running" or is_written(run):
        summary.state, summary.reason = _state_now(run)
    if summary.state in ("running", "killed"):
        catch_up(summary, run)
    return summary, damage


def _by_records(run: Path, damage: list[str]) -> Summary:
    growing, has_result = GrowingSummary(run), (run / "result.json").exists()
    if has_result and not read_object(run / "result.json"):
        damage.append("result.json is damaged")
    try:
        growing, events = read_growing(run)
        if (events.num_read or events.torn) and not growing.summary.starts:
            damage.append("events.jsonl has no start record")
        damage += [
            f"line {number} of {run / 'events.jsonl'} is damaged" for number in events.damaged[:1]
        ]
        if not events.num_read and has_result and (run / "checkpoints").is_dir():
            damage.append("events.jsonl is missing")
        growing.complete()
    except OSError as error:
        damage.append(f"events.jsonl cannot be read: {error.strerror}")
    except UserError as error:  # a newer format, or a damaged index of the checkpoints
        damage.append(error.what.partition(", and")[0])
    return growing.summary


def _state_now(run: Path) -> tuple[State, str]:
    """Return the state of a run that has not recorded its end, and the reason."""
    if is_written(run):
        return "running", ""
    # Who has started the ranks, or watches them, may have written it.
    written, result_written = (_written_ns(run / n) or 0 for n in ("events.jsonl", "result.json"))
    result = read_object(run / "result.json")
    if result.get("status") == "failed" and result_written >= written:
        return "failed", str(result.get("reason") or "")
    return ("running" if _lives_elsewhere(run) else "killed"), ""


def _lives_elsewhere(run: Path) -> bool:
    """Whether another machine opened the run and has written lately.

    Some file systems do not pass locks on to other machines.
    """
    try:
        with open_regular(run / "run.lock") as file:
            owner = file.read().decode().rpartition(" on ")[2].strip()
    except (OSError, UnicodeDecodeError):
        return False
    quiet_s = seconds_since_sign(run)
    return owner not in ("", socket.gethostname()) and quiet_s is not None and quiet_s < _FRESH_S


def seconds_since_sign(run: Path) -> float | None:
    """Return the seconds since a run's last step or record; None if it never had one."""
    times = [_written_ns(run / name) or 0 for name in (STEPPED, "events.jsonl")]
    return max(0.0, time.time() - max(times) / 1e9) if any(times) else None
