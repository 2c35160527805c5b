"""Where matches come from: a folder, a zip or a tar of JSON files; nothing is unpacked to disk."""

import hashlib
import lzma
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NoReturn

from samestep.errors import UserError

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
    if start.startswith(b"PK"):
        return _archive(path, _zip)
    if start.startswith(_TAR_MAGIC) or start[257:262] == b"ustar":
        return _archive(path, _tar)
    if start.lstrip().startswith(b"{"):
        status = path.stat()
        stamp = _digest([f"{path.name} {status.st_size} {status.st_mtime_ns}"])
        names = (path.name,)
        return MatchFiles(path, stamp, lambda: names, lambda: iter([(path.name, _content(path))]))
    raise UserError(
        f"{path} is not a folder, zip, tar (also .gz, .bz2, .xz) or JSON file. Name what "
        "cricsheet.org offers as JSON with --data-dir."
    )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}. Make it readable, or remove it."
        ) from error


def _wanted(name: str) -> bool:
    """Whether a file is a match. macOS leaves files with a leading dot, which are not."""
    return name.endswith(".json") and not PurePosixPath(name).name.startswith(".")


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()


def _raise(error: OSError) -> NoReturn:
    raise error


def _folder(path: Path) -> MatchFiles:
    lines = []
    for place, _folders, files in os.walk(path, onerror=_raise):
        for file in filter(_wanted, files):
            whole = os.path.join(place, file)  # noqa: PTH118 - once a file
            status = os.stat(whole)  # noqa: PTH116 - once a file
            name = os.path.relpath(whole, path)
            lines.append((name, f"{name} {status.st_size} {status.st_mtime_ns}"))
    lines.sort()
    names = tuple(name for name, _ in lines)
    _check_any(path, names)

    def read() -> Iterator[Document]:
        for name in names:
            yield name, _content(path / name)

    return MatchFiles(path, _digest([line for _, line in lines]), lambda: names, read)


def _archive(path: Path, entries: Callable[[Path, bool], Iterator[Document]]) -> MatchFiles:
    """Return an archive as a source; `entries` yields its files, with content if asked to."""

    def checked(content: bool) -> Iterator[Document]:
        try:
            yield from entries(path, content)
        except (*_BROKEN, OSError, RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"{path} cannot be read to its end: {error}. It is truncated or damaged; download "
                "it again."
            ) from error

    def list_names() -> tuple[str, ...]:
        names = [_checked(path, name) for name, _ in checked(content=False)]
        wanted = tuple(filter(_wanted, names))
        _check_any(path, wanted)
        return wanted

    def read() -> Iterator[Document]:
        return (each for each in checked(content=True) if _wanted(each[0]))

    status = path.stat()
    return MatchFiles(path, _digest([f"{status.st_size} {status.st_mtime_ns}"]), list_names, read)


def _checked(path: Path, name: str) -> str:
    """Return a name in an archive."""
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts or ":" in "".join(pure.parts[:1]):
        raise UserError(
            f"{path} holds a file named {name!r}, which leads out of the archive. It is not one "
            "of Cricsheet's; download it again from cricsheet.org."
        )
    return name


def _check_any(path: Path, names: object) -> None:
    if not names:
        raise UserError(
            f"There are no matches in {path}: no file in it ends in .json. Name a folder of "
            "Cricsheet's JSON files, their zip or a tar with --data-dir."
        )


def _check_size(path: Path, name: str, size: int) -> None:
    """Check before it is read into memory that a file is no larger than a match can be."""
    if size > _MOST_BYTES and _wanted(name):
        raise UserError(
            f"{path} holds {name!r} of {size:,} bytes, which is too large for a match. It is not "
            "one of Cricsheet's; download it again from cricsheet.org."
        )


def _zip(path: Path, content: bool) -> Iterator[Document]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                wanted = content and _wanted(entry.filename)
                _check_size(path, entry.filename, entry.file_size)
                yield entry.filename, archive.read(entry) if wanted else b""


def _tar(path: Path, content: bool) -> Iterator[Document]:
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.isreg():
                _check_size(path, entry.name, entry.size)
                file = archive.extractfile(entry) if content and _wanted(entry.name) else None
                yield entry.name, file.read() if file else b""
        # tarfile takes an archive that is cut between two files for a whole one, and does not look
        # at the end of what is compressed.
        assert archive.fileobj is not None
        if archive.fileobj.tell() < archive.offset + tarfile.BLOCKSIZE:
            raise EOFError("its end is missing")
        while archive.fileobj.read(1 << 16):
            pass
