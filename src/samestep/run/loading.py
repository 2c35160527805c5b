"""Read checkpoint files: verified first, then mapped, so that the ranks of a node share the memory.

Large tensors of what is loaded lie in the mapped file. Copy what is kept and let the rest go: the
file may be deleted, and some file systems then lose what is mapped.
"""

import hashlib
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from samestep.errors import UserError
from samestep.run.checkpoints import FORMAT
from samestep.run.host_copy import map_state
from samestep.run.index import Entry, read_index, shards_of

_T = TypeVar("_T")
Newest = tuple[Entry, dict[str, Any], list[str]]

_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 1 << 16


def load(folder: Path, entry: Entry, *, verify: bool = True, mesh: Any = None) -> dict[str, Any]:
    """Return a checkpoint's content, on the CPU.

    Its hash is checked first; without `verify`, another rank has done so. Of a sharded checkpoint,
    `mesh` says of which tensors this rank holds a part; without one they are whole.

    Raises:
        UserError: a file is missing, damaged, or no checkpoint that this version can load.
    """
    path = folder / entry.path
    if verify:
        check_hash(path, entry.sha256)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # what it raises depends on what stands in the file
        raise UserError(f"{path} is no checkpoint that can be loaded safely: {error}") from error
    if not isinstance(state, dict) or "format" not in state:
        raise UserError(f"{path} is no checkpoint of samestep.")
    if state["format"] != FORMAT:
        raise UserError(
            f"{path} is in checkpoint format {state['format']}; this version of samestep reads "
            f"format {FORMAT}. Use the version that wrote it, or a newer one."
        )
    if entry.files:
        from samestep.run import shards  # noqa: PLC0415 - half a second, for FSDP alone

        parts = folder / shards_of(entry.path)
        if verify:
            shards.verify(parts, {Path(place).name: h for place, h in entry.files.items()})
        state = shards.read(parts, state, mesh)
    own: dict[str, Any] = map_state(lambda _, leaf: _out_of_file(leaf), state)
    return own


def check_hash(path: Path, sha256: str) -> None:
    """Check a file against its SHA-256; it is read once, in order.

    Raises:
        UserError: it cannot be read, or is damaged.
    """
    digest, chunk = hashlib.sha256(), memoryview(bytearray(_CHUNK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(chunk):
                digest.update(chunk[:count])
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if (found := digest.hexdigest()) != sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {found[:12]}…, the index says {sha256[:12]}…."
        )


def _out_of_file(leaf: Any) -> Any:
    """Return a copy of a small tensor: only large ones are worth the care."""
    small = isinstance(leaf, Tensor) and leaf.nbytes <= _SMALL_BYTES
    return leaf.clone() if small else leaf


def copied(content: _T) -> _T:
    """Return what was loaded in memory of its own, for those who keep it."""
    found: _T = map_state(lambda _, x: x.clone() if isinstance(x, Tensor) else x, content)
    return found


def load_newest(folder: Path, mesh: Any = None) -> Newest | None:
    """Return the newest checkpoint that verifies, and what was wrong with newer ones.

    Returns:
        Its entry, its content, and a message for each newer one that had to be passed over; None
        where no checkpoint was ever announced.
    """
    problems: list[str] = []
    for entry in sorted(read_index(folder).checkpoints, key=lambda entry: -entry.step):
        try:
            return entry, load(folder, entry, mesh=mesh), problems
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("No checkpoint of this run is whole. " + " ".join(problems))
    return None
