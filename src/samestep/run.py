"""The run directory: everything about one run as plain files, written by rank 0 alone."""

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from samestep.errors import UserError
from samestep.files import Held, cannot_write, hold, write_text
from samestep.version import __version__

Record = dict[str, Any]
"""One line of events.jsonl: `event` first, then its numbers."""

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


def new_run_path(recipe: str, root: Path = Path("runs")) -> Path:
    """Return a new directory's name: runs/<recipe>-<date>-<time>-<short id>."""
    now = dt.datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return root / f"{recipe}-{now}-{secrets.token_hex(2)}"


def is_run(path: Path) -> bool:
    """Whether a directory holds a run."""
    return (path / "settings.toml").is_file()


class Run:
    """The open directory of a run. Only one process at a time has it open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = lock_run(path)
            self._events = _open_events(path / "events.jsonl")
        except OSError as error:
            raise cannot_write(path, error) from error
        for torn in self.checkpoints.glob(".*.tmp"):
            torn.unlink(missing_ok=True)

    def append(self, record: Record) -> None:
        """Add one record to events.jsonl.

        Raises:
            UserError: it could not be written.
        """
        line = json.dumps({key: _plain(value) for key, value in record.items()}) + "\n"
        rest = memoryview(line.encode())
        end = self._events.seek(0, os.SEEK_END)
        try:
            # One write a line: a killed process leaves whole lines, or one torn at the very end.
            while rest:
                rest = rest[self._events.write(rest) :]  # a disk that gets full takes a part
            if record["event"] in ("checkpoint", "stop"):
                os.fsync(self._events.fileno())
        except OSError as error:
            self._events.truncate(end)  # else the next record would follow a torn one
            raise cannot_write(self.path / "events.jsonl", error) from error

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        table = {key: _plain(value) for key, value in result.items()}
        write_text(self.path / "result.json", json.dumps(table, indent=2) + "\n")

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Write environment.json: versions, the machine, and the variables that are allowed."""
        table = {**describe_environment(os.environ), **facts}
        write_text(self.path / "environment.json", json.dumps(table, indent=2) + "\n")

    def close(self) -> None:
        """Close the files and let another process open the run."""
        self._events.close()
        self._lock.close()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value


def lock_run(path: Path) -> BinaryIO:
    """Hold a run for this process; the lock ends with it, however it ends.

    Raises:
        UserError: another process holds it.
    """
    try:
        return hold(path / "run.lock")
    except Held as owner:
        raise UserError(
            f"{path} is being written by {owner}. Wait until it ends, or stop it first."
        ) from None


def is_written(path: Path) -> bool:
    """Whether a process of this machine has the run open; it is asked of the lock, not taken.

    A process of another machine is seen if the file system passes locks on.
    """
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return False
    # struct flock: type, whence, start, length, process; the order is macOS's or that of Linux.
    shape = "@qqihh" if sys.platform == "darwin" else "@hhqqi4x"
    place = 3 if sys.platform == "darwin" else 0
    asked = [0, 0, 0, fcntl.F_WRLCK, 0] if place else [fcntl.F_WRLCK, 0, 0, 0, 0]
    try:
        with (path / "run.lock").open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(shape, *asked))
    except OSError:
        return False
    return bool(struct.unpack(shape, answer)[place] != fcntl.F_UNLCK)


def _open_events(path: Path) -> BinaryIO:
    """Open the records for appending; a line that a kill tore off at the end is cut away."""
    file = path.open("a+b", buffering=0)
    size = file.seek(0, os.SEEK_END)
    end = size
    while end and not _ends_line(file, end):
        end -= 1
    if end < size:
        file.truncate(end)
    return file


def _ends_line(file: Any, end: int) -> bool:
    file.seek(end - 1)
    return bool(file.read(1) == b"\n")


def describe_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what may be recorded of a process's surroundings, by an allow-list."""
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


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    import torch  # noqa: PLC0415 - readers of a run need no torch

    found = {
        "samestep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a run as one uninterrupted run would have written them.

    A resumed run starts again from a checkpoint, so the records that an earlier attempt wrote for
    later steps are superseded: they are left out here, though they stay in the file.

    Raises:
        UserError: there is no run here.
    """
    file = path / "events.jsonl"
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} holds no run: {file} cannot be read.") from error
    # What follows the last newline was torn off by a kill.
    yield from as_uninterrupted(json.loads(line) for line in lines[:-1])


def as_uninterrupted(written: Iterable[Record]) -> list[Record]:
    """Leave out of a run's records those that a later attempt has superseded."""
    records: list[Record] = []
    for record in written:
        if record["event"] == "start" and not record["resumed"]:
            records = []  # killed before its first checkpoint, and begun anew
        if record["event"] == "resume":
            records = _up_to_checkpoint(records, record)
        records.append(record)
    return records


def _up_to_checkpoint(records: list[Record], resume: Record) -> list[Record]:
    """Leave out what a resumed run does again: all that came after its checkpoint.

    The end of an epoch has the same step as a checkpoint that a signal caused right before it, so
    the step alone does not tell. Where a kill came between the checkpoint and its record, nothing
    came after it.
    """
    kept = [r for r in records if r.get("step", 0) <= resume["step"]]
    path = f"checkpoints/{resume['checkpoint']}"
    saved = [i for i, r in enumerate(kept) if r["event"] == "checkpoint" and r["path"] == path]
    after = saved[-1] + 1 if saved else len(kept)
    again = ("step", "epoch", "evaluation", "checkpoint")
    return kept[:after] + [r for r in kept[after:] if r["event"] not in again]
