"""Checkpoint files: written whole or not at all, hashed, verified when they are loaded."""

import contextlib
import hashlib
import io
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from samestep.errors import UserError
from samestep.run.files import write_atomically
from samestep.run.host_copy import on_host
from samestep.run.index import Entry, read_index

FORMAT = 1
"""What this version writes and reads; a file says which one it is in."""


class _Writer(io.RawIOBase):
    """Pass bytes on; keep the error that torch's own writer would hide."""

    def __init__(self, file: BinaryIO, grown: Callable[[], None]) -> None:
        self._file, self._grown = file, grown
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._grown()
        return len(data)


class _FileHash:
    """The SHA-256 of a file that is still being written, computed by a thread that follows it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)  # before it has its last name
        self._grown, self._whole = threading.Event(), False
        helper = ThreadPoolExecutor(1)
        self._digest = helper.submit(self._follow)
        helper.shutdown(wait=False)

    def grown(self) -> None:
        """Hash what was written since."""
        self._grown.set()

    def end(self) -> str:
        """Return the hash of the complete file."""
        self._whole = True
        self._grown.set()
        return self._digest.result()

    def _follow(self) -> str:
        sha256, chunk = hashlib.sha256(), memoryview(bytearray(1 << 20))
        with self._file:
            while True:
                whole = self._whole  # asked first: what is written meanwhile is read the next time
                while count := self._file.readinto(chunk):
                    sha256.update(chunk[:count])
                if whole:
                    return sha256.hexdigest()
                self._grown.wait()
                self._grown.clear()


def save(folder: Path, name: str, state: dict[str, Any]) -> str:
    """Write a checkpoint file and return its SHA-256; it is not announced yet."""

    def write(file: BinaryIO) -> str:
        following = _FileHash(Path(file.name))
        writer = _Writer(file, following.grown)
        try:
            torch.save(on_host(state), cast("BinaryIO", writer))
            file.flush()
            os.fsync(file.fileno())  # the hash goes on meanwhile
        except Exception:
            with contextlib.suppress(OSError):
                following.end()
            if writer.error is not None:
                raise writer.error from None
            raise
        return following.end()  # it has closed the file, which Windows does not rename before

    return write_atomically(folder / name, write)


def why_not_kept(state: Any) -> str:
    """Return why a checkpoint with this state could not be loaded; nothing if it could."""
    try:
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)  # objects of other classes could run code
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Of torch's advice only what it met: "Unsupported global: GLOBAL my.Class was not …".
        met = re.search(r"GLOBAL (\S+)", str(error))
        return f"objects of {met[1]}" if met else lines[0].rstrip(".")
    return ""


def load(folder: Path, entry: Entry) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU, after checking its hash."""
    path = folder / entry.path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {found[:12]}…, the index says {entry.sha256[:12]}…."
        )
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # what it raises depends on what stands in the file
        raise UserError(f"{path} is no checkpoint that can be loaded safely: {error}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise UserError(f"{path} is no checkpoint of samestep.")
    if state["format"] != FORMAT:
        raise UserError(
            f"{path} is in checkpoint format {state['format']}; this version of samestep reads "
            f"format {FORMAT}. Use the version that wrote it, or a newer one."
        )
    return state


def load_newest(folder: Path) -> tuple[Entry, dict[str, Any], list[str]] | None:
    """Return the newest checkpoint that verifies, and what was wrong with newer ones.

    Returns:
        Its entry, its content, and a message for each newer one that had to be passed over; None
        where no checkpoint was ever announced.
    """
    problems: list[str] = []
    for entry in sorted(read_index(folder).checkpoints, key=lambda entry: -entry.step):
        try:
            return entry, load(folder, entry), problems
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("No checkpoint of this run is whole. " + " ".join(problems))
    return None
