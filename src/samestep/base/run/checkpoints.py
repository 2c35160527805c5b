"""Checkpoint files: written whole or not at all, hashed; verified, and mapped to be read.

A checkpoint of gigabytes is resumed by all ranks of a node at once. They map one file, so its pages
are in memory once for all of them, and each rank copies only what it keeps.
"""

import contextlib
import hashlib
import io
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.utils.serialization import config as torch_config

from samestep.base.errors import UserError, listed
from samestep.base.run.files import check_room, write_atomically
from samestep.base.run.host_copy import bytes_of, map_state, on_host
from samestep.base.run.index import Entry, shards_of, verify
from samestep.base.trees import map_tensors

FORMAT = 1
"""What this version writes and reads; a file says which one it is in."""
_HASHED_AT_ONCE = 1 << 20
"""Bytes."""
_SMALL = 1 << 20
"""Bytes of tensors: up to here a state is put together and hashed in memory."""


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
        self._grown = threading.Event()
        self._whole = False
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
                intact = self._whole  # asked first: what is written meanwhile is read the next time
                while count := self._file.readinto(chunk):
                    sha256.update(chunk[:count])
                if intact:
                    return sha256.hexdigest()
                self._grown.wait()
                self._grown.clear()


def save(folder: Path, name: str, state: dict[str, Any]) -> str:
    """Write a checkpoint file, if it fits, and return its SHA-256; it is not announced yet."""
    num_bytes = bytes_of(state)
    check_room(folder, num_bytes)

    def write(file: BinaryIO) -> str:
        if num_bytes <= _SMALL:  # a thread that hashes would cost more than it saves
            buffer = io.BytesIO()
            _dump(state, buffer)
            file.write(buffer.getbuffer())
            return hashlib.sha256(buffer.getbuffer()).hexdigest()
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
    if is_plain(state):
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


def is_plain(state: Any, depth: int = 0) -> bool:
    """Whether a state is made of what every checkpoint may hold; to try it takes 100 times that."""
    kind = type(state)
    if kind in _PLAIN:
        return True
    if depth > _DEEPEST:
        return False
    if kind in (dict, OrderedDict):
        return all(type(k) in _PLAIN and is_plain(v, depth + 1) for k, v in state.items())
    return kind in (list, tuple) and all(is_plain(item, depth + 1) for item in state)


def why_not_loaded(error: Exception) -> str:
    """Return PyTorch's reason without its advice, which would run code in the file."""
    text = str(error).strip() or type(error).__name__
    if met := re.search(r"GLOBAL (\S+)", text):  # "Unsupported global: GLOBAL my.Class was not …"
        return f"objects of {met[1]}"
    met = re.search(r"WeightsUnpickler error: (.+)", text)
    line = (met[1] if met else text).splitlines()[0]
    sentences = [sentence for sentence in line.split(". ") if "weights_only" not in sentence]
    return ". ".join(sentences).rstrip(".") or type(error).__name__


_LARGE = ("model", "ema", "optimizer", "state")
"""The parts with nearly all of a checkpoint's bytes."""


def load(
    folder: Path,
    entry: Entry,
    *,
    verified: bool = False,
    mesh: Any = None,
    own: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    Tensors under "model", "ema", "optimizer" and "state" lie in the mapped file: keep one
    only as a copy (`own_memory`), because a file that is deleted on another node takes its pages
    along. All others are copies. The mapping ends with the last of its tensors, so let the content
    go once it is restored. The parts of a sharded checkpoint are read over `mesh`, a DeviceMesh;
    without one they are put together.

    Args:
        folder: the run's checkpoints/.
        entry: what the index says of the checkpoint.
        verified: whether the hash is checked elsewhere; use nothing of the content before it is.
        mesh: over which sharded tensors are cut.
        own: what is copied besides, as "optimizer" or "state/adam".

    Raises:
        UserError: the file is missing, damaged, or no checkpoint that this version can load.
    """
    path = folder / entry.path
    if not verified:
        verify(folder, entry)
    state = read_file(path)
    if not isinstance(state, dict) or not isinstance(state.get("format"), int):
        raise UserError(f"{path} is not a checkpoint of samestep.")
    if state["format"] > FORMAT:
        raise NewerFormat(
            f"{path} was written by a newer samestep: it is in checkpoint format "
            f"{state['format']}, and this version reads format {FORMAT}.",
            remedy="Update samestep here: pip install --upgrade samestep.",
        )
    _check_parts(path, state, entry)
    if entry.files:
        from samestep.base.run import shards  # noqa: PLC0415 - half a second, only for FSDP

        state = shards.read(folder / shards_of(entry.path), state, mesh)
    own = tuple(f"{path}/" for path in own)
    content: dict[str, Any] = own_memory(
        state, lambda path: path.split("/")[0] not in _LARGE or path.startswith(own)
    )
    return content


class NewerFormat(UserError):  # noqa: N818 - not an error of the file
    """A checkpoint is whole, and of a later version than this one."""


_NEEDED = {
    "recipe": (
        *("classes", "model", "optimizer/state", "optimizer/param_groups", "order", "rng"),
        *("loss_sums", "schedule", "scaler", "watch/metric", "watch/mode"),
    ),
    "program": ("settings", "state", "order", "sums", "own"),
    "pytorch-lightning_version": ("state_dict", "loops", "optimizer_states", "lr_schedulers"),
}
"""The parts that a checkpoint must hold, by the key that only checkpoints of its kind have."""


def _check_parts(path: Path, state: Mapping[str, Any], entry: Entry) -> None:
    """Check that a file with the right hash has what is needed to continue from it."""
    kinds = [kind for kind in _NEEDED if kind in state] or ["recipe"]
    needed = [part for kind in kinds for part in (kind, *_NEEDED[kind])]
    needed += [f"position/{name}" for name in ("step", "epoch", "step_in_epoch", "samples")]
    held = state.get("optimizer")
    if held and isinstance(held, Mapping) and not {"state", "param_groups"} & held.keys():
        needed = [part for part in needed if not part.startswith("optimizer/")]  # its own form
    if missing := [part.replace("/", ".") for part in needed if not _has(state, part)]:
        raise UserError(f"{path} is not a whole checkpoint: it lacks {listed(missing)}.")
    if (step := state["position"]["step"]) != entry.step:
        raise UserError(f"{path} is of step {step}; the index says step {entry.step}.")


def _has(state: Mapping[str, Any], part: str) -> bool:
    first, _, inner = part.partition("/")
    value = state.get(first)
    return first in state and (not inner or (isinstance(value, Mapping) and _has(value, inner)))


def read_file(path: Path) -> Any:
    """Return the contents of a file, memory-mapped if possible."""
    try:
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    # The second way is for file systems without mmap, and it names what is wrong with a file.
    for maps in (True, False):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=maps)
        except Exception as error:  # what it raises depends on what stands in the file
            if not maps:
                raise UserError(
                    f"{path} is not a checkpoint that can be loaded safely: "
                    f"{why_not_loaded(error)}."
                ) from error
    raise AssertionError


def own_memory(value: Any, chosen: Callable[[str], bool] = lambda _: True) -> Any:
    """Return a part of a checkpoint with copies of its tensors, those at the `chosen` paths.

    Those that are one stay one.
    """
    copies: dict[int, Tensor] = {}

    def copy(path: str, leaf: Any) -> Any:
        if not (isinstance(leaf, Tensor) and chosen(path)):
            return leaf
        if id(leaf) not in copies:
            with torch.no_grad():
                copies[id(leaf)] = leaf.clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return map_state(copy, value)


def without_tensors(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content without its large parts, to keep once they are restored."""
    return {name: part for name, part in content.items() if name not in _LARGE}
