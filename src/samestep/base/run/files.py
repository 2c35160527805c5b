"""Write files atomically: after a crash the old or the new file is there, complete."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from samestep.base.errors import UserError
from samestep.base.words import size

_T = TypeVar("_T")


def write_atomically(path: Path, write: Callable[[BinaryIO], _T], *, sync: bool = True) -> _T:
    """Write a file under a temporary name, sync it, then rename it; return what `write` does.

    Without `sync`, a machine that crashes may leave an empty file; a process that dies may not.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            result = write(file)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
        if sync:
            sync_path(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing is there
            temporary.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error) from error
        raise
    return result


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, where the system can do that."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_text(path: Path, text: str, *, sync: bool = True) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda file: file.write(text.encode()), sync=sync)


def write_object(path: Path, table: Mapping[str, Any], *, sync: bool = True) -> None:
    """Write a JSON object atomically."""
    write_text(path, json.dumps(table, indent=2) + "\n", sync=sync)


_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 32 << 10
"""What stays free after a checkpoint, for the records and the index."""
_WHAT_HELPS = {
    errno.ENOSPC: "Free some space",
    errno.EDQUOT: "Delete files of yours, or ask for a larger quota",
    errno.EIO: "Check the disk, or the connection to the file server",
    errno.ENAMETOOLONG: "Choose a shorter name",
    errno.EFBIG: "Raise the limit on file sizes (ulimit -f), or use a disk for larger files",
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.EROFS: "Check the disk, and mount it writable",
}
THEN_RESUME = ", then resume the run"
_ARE_WHOLE = "; earlier checkpoints are intact"
_AHEAD_BYTES = 64 << 20


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file. The disk reads ahead while it is computed."""
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(_CHUNK_BYTES))
    done = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            if done % _AHEAD_BYTES == 0 and hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):  # only advice
                    place = done + _AHEAD_BYTES if done else 0
                    ahead = _AHEAD_BYTES if done else 2 * _AHEAD_BYTES
                    os.posix_fadvise(file.fileno(), place, ahead, os.POSIX_FADV_WILLNEED)
            digest.update(chunk[:count])
            done += count
    return digest.hexdigest()


def _users_text(path: Path) -> str:
    # The read of a pipe would wait for ever.
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"{path} cannot be read: it is not a file.")
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error


def toml_of(path: Path) -> dict[str, Any]:
    """Return the table in a TOML file that the user has written.

    Raises:
        UserError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(_users_text(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error
    except RecursionError as error:
        raise UserError(f"{path} is not valid TOML: it is nested too deeply.") from error


def yaml_of(path: Path) -> dict[str, Any]:
    """Return the table in a YAML file that the user has written.

    Raises:
        UserError: it cannot be read, or is not plain YAML 1.2.
    """
    try:
        from ruamel.yaml import YAML  # noqa: PLC0415 - an extra
        from ruamel.yaml.error import YAMLError  # noqa: PLC0415
    except ImportError as error:
        install = "pip install 'samestep[yaml]'"
        raise UserError(f"{path} is YAML, which needs a package: {install}") from error
    try:
        table = YAML(typ="safe", pure=True).load(_users_text(path))
        # A node that holds itself would be read for ever.
        json.dumps(table, default=str, skipkeys=True)
    except (YAMLError, ValueError, RecursionError) as error:
        about = str(getattr(error, "problem", None) or error).splitlines()[0].rstrip(".")
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is not valid YAML: {about}{place}.") from error
    if not isinstance(table, dict | None):
        raise UserError(f"{path} holds a {type(table).__name__}, not names with their values.")
    return {str(name): value for name, value in (table or {}).items()}


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; to open a FIFO would wait for its writer."""
    flags = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return file


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if it is missing or damaged."""
    try:
        with open_regular(path) as file:
            value = json.loads(file.read(), parse_constant=lambda _: None)  # NaN is not JSON
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Held(Exception):  # noqa: N818 - it is not an error by itself
    """A file is locked by the process that it names."""


def hold(path: Path) -> BinaryIO:
    """Open a file and lock it for this process; the lock ends with it, however it ends."""
    file = path.open("a+b")
    try:
        import fcntl  # noqa: PLC0415 - absent on Windows
    except ImportError:
        return file
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read().decode().strip() or "another process"
        file.close()
        raise Held(owner) from None
    except OSError:
        pass  # a file system without locks: nothing to hold, and no reason to refuse
    try:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        file.flush()
    except OSError:  # a full disk; to close it tries to write again
        with contextlib.suppress(OSError):
            file.close()
        raise
    return file


def shown_path(path: Path) -> str:
    """Return a path as a user would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def check_output(path: Path, flag: str, endings: Sequence[str]) -> None:
    """Check that a flag names a file that can be written, before anything is computed for it."""
    if path.suffix not in endings:
        *others, last = endings
        names = f"{', '.join(others)} or {last}"
        raise UserError(f"{flag} {path}: the name must end in {names}.")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {path.parent}.")


def check_room(folder: Path, bytes_needed: int) -> None:
    """Check that a file of this size fits on the disk of a folder, before anything is written.

    Raises:
        UserError: less than this and a small margin is free, as on a disk that is full.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return  # the write will tell
    if free < (needed := bytes_needed + _SPARE_BYTES):
        raise UserError(
            f"The disk is full: a checkpoint and a margin take {size(needed)}, "
            f"and {size(free)} are free in {folder}. Nothing was written.",
            remedy=_what_helps(errno.ENOSPC, folder),
        )


def cannot_write(
    path: Path, error: OSError, *, instead: str = "choose another directory"
) -> UserError:
    """Return the message for a file that could not be written; `instead` is for a directory."""
    problem, there = f"{path} could not be written", path.parent
    if not _is_folder(there):  # it could not be made, or was removed
        there = next(folder for folder in path.absolute().parents if _is_folder(folder))
    if error.errno == errno.ENOSPC:
        problem = f"The disk is full: {problem} ({_free(there)} in {there})."
    elif error.errno == errno.EDQUOT:
        problem = f"Your quota of this disk is used up: {problem}."
    else:
        problem += f": {error.strerror or error}."
    # A disk that fails under a run is mounted read-only; a new run may begin elsewhere.
    if error.errno in _WHAT_HELPS and (error.errno != errno.EROFS or _is_of_run(path.parent)):
        return UserError(problem, remedy=_what_helps(error.errno, path.parent))
    run = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    if not _is_folder(run) and (run != path.parent or path.name == "result.json"):
        return UserError(
            f"{problem} {run} was removed or renamed while the run was open.",
            remedy="If it was renamed, resume it by its new name. Otherwise start again; if "
            "something cleans up this folder, choose a run directory elsewhere.",
        )
    if there == path.parent:
        return UserError(problem, remedy=f"Check the directory's permissions, or {instead}.")
    if error.errno == errno.EACCES:
        return UserError(problem, remedy=f"Check the permissions of {there}, or {instead}.")
    return UserError(problem, remedy=f"{path.parent} is not a directory; {instead}.")


def _is_folder(path: Path) -> bool:
    with contextlib.suppress(OSError):  # a folder above it may not be searched
        return path.is_dir()
    return False


def _free(folder: Path) -> str:
    disk = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if disk is not None and disk.f_files and not disk.f_favail:
        return "no inodes free"
    return f"{size(shutil.disk_usage(folder).free)} free"


def _what_helps(number: int, folder: Path) -> str:
    """Return what to do after an error of a disk; where the folder is of a run, to resume it."""
    if not _is_of_run(folder):
        return f"{_WHAT_HELPS[number]}."
    announced = any((place / "index.json").is_file() for place in (folder, folder / "checkpoints"))
    return f"{_WHAT_HELPS[number]}{THEN_RESUME}{_ARE_WHOLE * announced}."


def _is_of_run(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any((place / "events.jsonl").is_file() for place in (folder, folder.parent))
    return False
