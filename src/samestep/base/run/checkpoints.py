"""Checkpoint files: written whole or not at all, and hashed. `loading` reads them."""

import contextlib
import hashlib
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch.utils.serialization import config as torch_config

from samestep.base.run.files import write_atomically
from samestep.base.run.host_copy import bytes_of, on_host
from samestep.base.trees import map_tensors

FORMAT = 1
"""What this version writes and reads; a file says which one it is in."""
_HASHED_AT_ONCE = _SMALL = 1 << 20
"""Bytes."""


class _Writer(io.RawIOBase):
    """Pass bytes on; keep the error that torch's own writer would hide."""

    def __init__(self, file: BinaryIO, grown: Callable[[], None]) -> None:
        self._file, self._grown = file, grown
        self._new = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._new += len(data)
        if self._new >= _HASHED_AT_ONCE:  # a small tensor is written in a dozen calls
            self._grown()
            self._new = 0
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
        sha256, chunk = hashlib.sha256(), memoryview(bytearray(_HASHED_AT_ONCE))
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
        if bytes_of(state) <= _SMALL:  # no thread is worth its start
            _dump(state, whole := io.BytesIO())
            file.write(whole.getbuffer())
            return hashlib.sha256(whole.getbuffer()).hexdigest()
        following = _FileHash(Path(file.name))
        writer = _Writer(file, following.grown)
        try:
            _dump(state, cast("BinaryIO", writer))
            file.flush()
            os.fsync(file.fileno())  # the hash continues meanwhile
        except Exception:
            with contextlib.suppress(OSError):
                following.end()
            if writer.error is not None:
                raise writer.error from None
            raise
        return following.end()  # it has closed the file, which Windows does not rename before

    return write_atomically(folder / name, write)


def _dump(state: dict[str, Any], file: BinaryIO) -> None:
    # A CRC of each tensor takes time (docs/project/log.md), and the file gets a SHA-256.
    # `patch` holds for this thread only.
    with torch_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
        torch.save(on_host(state), file)


def why_not_kept(state: Any) -> str:
    """Return why a checkpoint with this state could not be loaded; nothing if it could.

    Tensors may be large, and only the rest can be of any type.
    """
    if _is_plain(state):
        return ""
    try:
        torch.save(map_tensors(lambda _: torch.empty(0), state), file := io.BytesIO())
        file.seek(0)
        torch.load(file, weights_only=True)  # objects of other classes could run code
    except Exception as error:
        return why_not_loaded(error)
    return ""


_PLAIN = {torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, type(None), torch.dtype}
_DEEPEST = 32


def _is_plain(state: Any, depth: int = 0) -> bool:
    """Whether a state is made of what every checkpoint may hold; to try it takes 100 times that."""
    kind = type(state)
    if kind in _PLAIN:
        return True
    if depth > _DEEPEST:
        return False
    if kind in (dict, OrderedDict):
        return all(type(k) in _PLAIN and _is_plain(v, depth + 1) for k, v in state.items())
    return kind in (list, tuple) and all(_is_plain(one, depth + 1) for one in state)


def why_not_loaded(error: Exception) -> str:
    """Return what PyTorch met in a file, without its advice, which would run code in the file."""
    text = str(error).strip() or type(error).__name__
    if met := re.search(r"GLOBAL (\S+)", text):  # "Unsupported global: GLOBAL my.Class was not …"
        return f"objects of {met[1]}"
    met = re.search(r"WeightsUnpickler error: (.+)", text)
    line = (met[1] if met else text).splitlines()[0]
    found = [sentence for sentence in line.split(". ") if "weights_only" not in sentence]
    return ". ".join(found).rstrip(".") or type(error).__name__
