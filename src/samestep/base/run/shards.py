"""The parts of a sharded checkpoint: each rank writes its own, any number of ranks reads them.

PyTorch's distributed checkpoint (DCP) writes and reads the tensors. All else that a checkpoint
holds is in the file next to them, where a placeholder stands for each tensor.
"""

import contextlib
import errno
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from samestep.base.errors import UserError
from samestep.base.run.files import cannot_write, check_room, sha256_of, sync_path
from samestep.base.run.host_copy import map_state

_MARK = "in shards: "
"""How a placeholder begins; the type and the shape follow: "in shards: float32 64 128"."""
_METADATA = ".metadata"
_SAFE_CLASSES = {
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # their home in Python 3.13
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("ChunkStorageMetadata", "TensorStorageMetadata"),
    },
}
"""What the index of DCP is made of. It is a pickle, and any other class could run code."""


def split(content: Any) -> tuple[Any, dict[str, DTensor]]:
    """Return a state with a placeholder for each sharded tensor, and these by the names in them."""
    shards: dict[str, DTensor] = {}

    def mark(path: str, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        shards[path] = leaf
        return " ".join([_MARK + str(leaf.dtype).removeprefix("torch."), *map(str, leaf.shape)])

    return map_state(mark, content), shards


def local_parts(shards: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """Return this rank's parts of sharded tensors, on their device."""
    return {name: shard.to_local().detach() for name, shard in shards.items()}


def with_parts(shards: Mapping[str, DTensor], parts: Mapping[str, Tensor]) -> dict[str, DTensor]:
    """Return sharded tensors of which this rank's parts are others, such as copies on the host."""
    # By its class: `from_local` would move the parts to the mesh's device.
    return {
        name: DTensor(parts[name], s._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # noqa: SLF001
        for name, s in shards.items()
    }


def write(
    folder: Path, shards: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, str]:
    """Write the parts of all ranks into a folder; return each file's SHA-256 on every rank.

    All ranks of the group call it, from any thread, if no one else uses the group meanwhile. None
    is a single process. What was in the folder goes.

    Raises:
        UserError: a rank cannot write, as on a full disk; all ranks raise it.
    """
    rank = 0 if group is None else dist.get_rank(group)
    problem: list[tuple[str, str] | None] = [None]
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            # PyTorch's writer would make a removed run's folders anew.
            if not folder.parent.is_dir():
                missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
                raise cannot_write(folder, missing)
            check_room(folder.parent, sum(s.numel() * s.itemsize for s in shards.values()))
        except UserError as error:
            problem = [(error.what, error.remedy)]
    if group is not None:
        dist.broadcast_object_list(problem, src=0, group=group)
    if problem[0] is not None:
        raise UserError(problem[0][0], remedy=problem[0][1], on_all_ranks=True)
    writer = FileSystemWriter(folder)
    writer.fs = _ShardFiles()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a process without a group, which is not a mistake
            dcp.state_dict_saver.save(
                dict(shards), storage_writer=writer, process_group=group, no_dist=group is None
            )
    except dcp.api.CheckpointException as error:
        causes = [cause for _, (cause, _) in sorted(error.failures.items())]
        os_errors = [cause for cause in causes if isinstance(cause, OSError)]
        unknown = OSError(errno.EIO, str(causes[0] if causes else error).splitlines()[0])
        if rank == 0:  # all have ended by now; what they wrote would fill the disk
            shutil.rmtree(folder, ignore_errors=True)
        cause = os_errors[0] if os_errors else unknown
        raise cannot_write(folder, cause) from cause
    mine = [*folder.glob(f"__{rank}_*"), *([folder / _METADATA] if rank == 0 else [])]
    hashes = {path.name: sha256_of(path) for path in mine}
    if rank == 0:
        sync_path(folder)
        sync_path(folder.parent)
    gathered: list[Any] = [hashes]
    if group is not None:
        gathered = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, hashes, group=group)
    return {name: digest for s in gathered for name, digest in sorted(s.items())}


class _KeptError(io.BufferedWriter):
    """A file that keeps the error that torch's own writer hides behind one of its own."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class _ShardFiles(FileSystem):
    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as file:
                yield file
            return
        stream = _KeptError(io.FileIO(path, mode))
        try:
            with stream:
                yield stream
        except Exception:
            if stream.error is not None:
                raise stream.error from None
            raise


def verify(folder: Path, files: Mapping[str, str]) -> None:
    """Check the files of a sharded checkpoint against their hashes.

    Raises:
        UserError: a file is missing or damaged; it names the rank that wrote the file, and the
            first parameter in it.
    """
    for name, digest in files.items():
        path = folder / name
        try:
            actual = sha256_of(path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        else:
            if actual == digest:
                continue
            reason = f"is damaged: its SHA-256 is {actual[:12]}…, the index says {digest[:12]}…"
        raise UserError(f"{path}{_what_is_in(folder, name)} {reason}.")


def read(folder: Path, content: Any, mesh: DeviceMesh | None) -> Any:
    """Return a state with its tensors in place of the placeholders.

    With a mesh they are sharded over it as FSDP does, and this rank reads only its part; without
    one they are whole. All lie on the CPU.

    Raises:
        UserError: the folder is not a checkpoint that can be loaded safely.
    """
    wanted: dict[str, Tensor] = {}

    def make(path: str, leaf: Any) -> Any:
        if not (isinstance(leaf, str) and leaf.startswith(_MARK)):
            return leaf
        dtype, *shape = leaf.removeprefix(_MARK).split()
        wanted[path] = _empty([*map(int, shape)], getattr(torch, dtype), mesh)
        return wanted[path]

    filled = map_state(make, content)
    if not wanted:
        return filled
    reader = _Reader(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in `write`
            dcp.state_dict_loader.load(
                cast("dict[str, Any]", wanted), storage_reader=reader, no_dist=True
            )
    except dcp.api.CheckpointException as error:
        cause = next((cause for cause, _ in error.failures.values()), error)
        if isinstance(cause, UserError):
            raise cause from error
        raise UserError(f"{folder} cannot be loaded: {cause}") from error
    return filled


class _Reader(FileSystemReader):
    """Reads DCP's index without running anything that somebody put into it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # At once: DCP would print a traceback of an index that is missing, and look for another.
        self._index: Metadata = _metadata(folder)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        if self._index.storage_meta is not None:
            self._index.storage_meta.load_id = self.load_id
        return self._index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_safe = name in _SAFE_CLASSES.get(module, ())
        loaded = super().find_class(module, name) if is_safe or module == "torch" else None
        if is_safe or isinstance(loaded, torch.dtype):
            return loaded
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def _metadata(folder: Path) -> Any:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(cast("BinaryIO", file)).load()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    except Exception as error:  # whatever a damaged pickle raises
        raise UserError(f"{path} cannot be loaded safely: {error}.") from error
    good = isinstance(metadata, Metadata) and all(
        isinstance(t, TensorStorageMetadata) for t in metadata.state_dict_metadata.values()
    )
    parts = (part.relative_path for part in (metadata.storage_data or {}).values()) if good else ()
    if not good or any("/" in place or "\\" in place for place in parts):
        raise UserError(f"{path} is not an index of tensors that samestep wrote.")
    return metadata


def _what_is_in(folder: Path, name: str) -> str:
    """Return the rank that wrote a file, and the first parameter in it, for a message."""
    rank = name.removeprefix("__").split("_")[0]
    if name == _METADATA:
        return ""
    try:
        stored = _metadata(folder).storage_data
    except UserError:
        return f" (of rank {rank})"
    here = [(p.offset, index.fqn) for index, p in stored.items() if p.relative_path == name]
    return f" (of rank {rank}, from {min(here)[1].replace('/', '.')} on)" if here else ""


def _empty(shape: list[int], dtype: torch.dtype, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return torch.empty(shape, dtype=dtype)
    if not shape:  # a single number has no rows to share out
        number = torch.empty(shape, dtype=dtype)
        return DTensor.from_local(number, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    full = torch.empty(shape, dtype=dtype, device="meta")
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    part = Shard.local_shard_size_and_offset(shape[0], size, rank)[0]
    local = torch.empty([part, *shape[1:]], dtype=dtype)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
