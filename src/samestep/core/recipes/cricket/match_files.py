"""Where matches come from: a folder, a zip or a tar of JSON files; nothing is unpacked to disk."""

import hashlib
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NoReturn

from samestep.base.errors import UserError

Document = tuple[str, bytes]
"""The name of a file within the source, and its content."""

_MOST_BYTES = 1 << 26
"""Of a match in an archive; real ones have a few hundred thousand."""
_TAR_MAGIC = (b"\x1f\x8b", b"\xfd7zXZ\x00", b"BZh")
_BROKEN = (zipfile.BadZipFile, tarfile.TarError, EOFError, lzma.LZMAError, zlib.error)


@dataclass(frozen=True)
class MatchFiles:
    """JSON files in a fixed order."""

    path: Path
    stamp: str
    """A digest of sizes and times of change."""
    list_names: Callable[[], tuple[str, ...]]
    """Returns the names of the files; at least one."""
    read: Callable[[], Iterator[Document]]
    """Opens it, and yields the files in the order of the names."""


def open_match_files(path: Path) -> MatchFiles:
    """Return the JSON files of a folder, a zip or a tar, or one JSON file."""
    try:
        if path.is_dir():
            return _folder(path)
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise UserError(
            f"{error.filename or path} cannot be read: {error.strerror or error}. Name a folder of "
            "readable JSON files of Cricsheet, their zip or a tar with --data-dir."
        ) from error
    status = path.stat()
    stamp = f"{status.st_size} {status.st_mtime_ns}"
    if start.startswith(b"PK"):
        return _archive(path, _digest([stamp]), _zip)
    if start.startswith(_TAR_MAGIC) or start[257:262] == b"ustar":
        return _archive(path, _digest([stamp]), _tar)
    if start.lstrip().startswith(b"{"):
        return _listed(path, path.parent, [(path.name, f"{path.name} {stamp}")])
    raise UserError(
        f"{path} is not a folder, zip, tar (also .gz, .bz2, .xz) or JSON file. Name what "
        "cricsheet.org offers as JSON with --data-dir."
    )


def _is_match(name: str) -> bool:
    """Whether a file is a match. macOS leaves files with a leading dot, which are not."""
    return name.endswith(".json") and not PurePosixPath(name).name.startswith(".")


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _raise(error: OSError) -> NoReturn:
    raise error


def _folder(path: Path) -> MatchFiles:
    stamped = []
    for place, _folders, files in os.walk(path, onerror=_raise):
        for file in filter(_is_match, files):
            whole = os.path.join(place, file)  # noqa: PTH118 - once per file
            status = os.stat(whole)  # noqa: PTH116 - once per file
            name = os.path.relpath(whole, path)
            stamped.append((name, f"{name} {status.st_size} {status.st_mtime_ns}"))
    _check_any(path, stamped)
    return _listed(path, path, sorted(stamped))


def _listed(path: Path, folder: Path, files: list[tuple[str, str]]) -> MatchFiles:
    """Return files of a folder, each with its stamp, as a source."""
    names = tuple(name for name, _ in files)

    def read() -> Iterator[Document]:
        for name in names:
            try:
                yield name, (folder / name).read_bytes()
            except OSError as error:
                raise UserError(
                    f"{folder / name} cannot be read: {error.strerror or error}. Make it readable, "
                    "or remove it."
                ) from error

    return MatchFiles(path, _digest(stamp for _, stamp in files), lambda: names, read)


Entries = Iterator[tuple[str, int, Callable[[], bytes]]]
"""Files of an archive: the name, the size, and what reads the content."""


def _archive(path: Path, stamp: str, entries: Callable[[Path], Entries]) -> MatchFiles:
    def documents(content: bool) -> Iterator[Document]:
        try:
            for name, size, read in entries(path):
                _check_name(path, name)
                if not _is_match(name):
                    continue
                if size > _MOST_BYTES:  # before it is read into memory
                    raise UserError(
                        f"{path} holds {name!r} of {size:,} bytes, which is too large for a match. "
                        "It is not one of Cricsheet's; download it again from cricsheet.org."
                    )
                yield name, read() if content else b""
        except (*_BROKEN, OSError, RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"{path} cannot be read to its end: {error}. It is truncated or damaged; download "
                "it again."
            ) from error

    def list_names() -> tuple[str, ...]:
        names = tuple(name for name, _ in documents(content=False))
        _check_any(path, names)
        return names

    return MatchFiles(path, stamp, list_names, lambda: documents(content=True))


def _check_name(path: Path, name: str) -> None:
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or ":" in "".join(pure.parts[:1]):
        raise UserError(
            f"{path} holds a file named {name!r}, which leads out of the archive. It is not one "
            "of Cricsheet's; download it again from cricsheet.org."
        )


def _check_any(path: Path, names: Sized) -> None:
    if not len(names):
        raise UserError(
            f"There are no matches in {path}: no file in it ends in .json. Name a folder of "
            "Cricsheet's JSON files, their zip or a tar with --data-dir."
        )


def _zip(path: Path) -> Entries:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                yield entry.filename, entry.file_size, partial(archive.read, entry)


def _tar(path: Path) -> Entries:
    def content(entry: tarfile.TarInfo) -> bytes:
        file = archive.extractfile(entry)
        return file.read() if file else b""

    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.isreg():
                yield entry.name, entry.size, partial(content, entry)
        # tarfile takes an archive that is cut between two files for a whole one, and does not look
        # at the end of what is compressed.
        assert archive.fileobj is not None
        if archive.fileobj.tell() < archive.offset + tarfile.BLOCKSIZE:
            raise EOFError("its end is missing")
        while archive.fileobj.read(1 << 16):
            pass
