"""Download the files of a data set, resuming transfers that were cut off; keep no wrong bytes.

The bytes gather in a `.part` file next to the final one. It outlives the program, so a restart asks
only for the rest; the file gets its name only when its MD5 is right.
"""

import contextlib
import filecmp
import hashlib
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import requests
import urllib3.exceptions
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from samestep.base.errors import UserError
from samestep.core.data.catalog import RemoteDataset, RemoteFile, find_dataset

# A mirror is asked again as long as bytes come; two tries in a row without any are enough.
_NUM_BARREN_TRIES = 2

# Small, so that little is lost when the line breaks in the middle of a chunk.
_CHUNK_BYTES = 4096


def download(
    name: str, folder: Path, *, mirrors: Sequence[str] | None = None, timeout_s: float = 30.0
) -> list[Path]:
    """Bring all files of a data set into a folder; files that are there and right stay untouched.

    Where nothing came, no folder is left that was not there before.

    An archive is verified, unpacked in place and kept, so that its files can be checked and
    repaired without the network.

    A second program that downloads into the same folder waits for the first one, where the file
    system can lock a folder; on one that cannot (NFS), let one program download at a time.

    `mirrors` are base addresses to use in place of the catalog's, tried in this order; one that
    stays silent for `timeout_s` is given up. The paths of all files come in the catalog's order.
    """
    dataset = find_dataset(name)
    bases = []
    for mirror in mirrors or dataset.mirrors:
        if not re.match(r"https?://[^/]", mirror):
            raise UserError(
                f"The mirror {mirror!r} is not a web address.\n"
                "Write the address of the folder that holds the files: https://host/folder/"
            )
        bases.append(mirror if mirror.endswith("/") else f"{mirror}/")
    paths = []
    try:
        with _made_folder(folder), _locked(folder):
            for file in dataset.files:
                transfer = Transfer(file=file, folder=folder, timeout_s=timeout_s)
                if not transfer.is_done():
                    good = _fetch(dataset, transfer, bases)
                    # The mirror that works goes first: one that is gone costs its timeout once.
                    bases = [good, *(base for base in bases if base != good)]
                if file.unpack:
                    unpack(transfer.path, folder)
                paths.append(transfer.path)
    except OSError as problem:
        raise UserError(
            f"The data folder {folder} cannot be used: {problem.strerror or problem}.\nFree some "
            "space, make it writable, or choose another with --data-dir."
        ) from problem
    return paths


def _fetch(dataset: RemoteDataset, transfer: "Transfer", bases: Sequence[str]) -> str:
    """Bring one file and return the base address that gave it; raise UserError if none did."""
    file = transfer.file
    folder = transfer.folder
    problems = []
    for base in bases:
        try:
            transfer.fetch(base + file.name)
        except MirrorError as problem:
            problems.append(f"  {base}{file.name}: {problem}")
        else:
            return base
    by_hand = (*dataset.mirrors, *bases)[0] + file.name  # the catalog's, even where --mirror fails
    own_mirror = f"samestep data get {dataset.name} --data-dir {folder} --mirror URL"
    raise UserError(
        f"{file.name} of {dataset.name} could not be downloaded to {folder}:\n"
        + "\n".join(problems)
        + "\nCheck the network (on a cluster, often only the login nodes have one) and run the "
        "same command again: it resumes the download.\nOr download the file by hand, for "
        f"example from {by_hand}, and put it into {folder}\nOr name a mirror of yours, the address "
        f"of a folder with the files: {own_mirror}"
    )


@contextlib.contextmanager
def _made_folder(folder: Path) -> Iterator[None]:
    """Make the folder, with those above it; those that are still empty after a failure go again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        # One that has a file by now, or another program's, stays; so do those above it.
        with contextlib.suppress(OSError):
            for path in new:
                path.rmdir()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    import fcntl  # noqa: PLC0415 - Windows has none

    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems lock no folders; the hash check still guards the files.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def unpack(archive: Path, folder: Path) -> None:
    """Bring the files of a tar archive into a folder, each whole; those there and right stay."""
    if not hasattr(tarfile, "data_filter"):
        raise UserError("To unpack archives safely, Python 3.11.4 or newer is needed.")
    try:
        # In the folder itself, so that a file is renamed within one file system.
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as place,
            tarfile.open(archive) as tar,
        ):
            tar.extractall(place, filter="data")
            for new in sorted(path for path in Path(place).rglob("*") if path.is_file()):
                final = folder / new.relative_to(place)
                if final.is_file() and filecmp.cmp(new, final, shallow=False):
                    continue
                final.parent.mkdir(parents=True, exist_ok=True)
                new.replace(final)
    except (tarfile.TarError, EOFError) as problem:
        raise UserError(
            f"{archive} is damaged: {problem}. Delete it and download it again."
        ) from problem


class MirrorError(Exception):
    """This mirror cannot give the file; the next one may."""


class _CutOffError(Exception):
    """The transfer ended early; the same mirror may send the rest."""


@contextlib.contextmanager
def _bar(name: str, done: int, total: int) -> Iterator[Callable[[int], object]]:
    """Draw the progress of a transfer if the error stream is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    speed = (TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    console = Console(stderr=True)
    with Progress(*columns, *speed, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, completed=done, total=total)
        yield lambda num_bytes: bar.advance(task, num_bytes)


@dataclass(kw_only=True)
class Transfer:
    """One file on its way from a mirror into a folder, where its bytes gather in a `.part` file."""

    file: RemoteFile
    folder: Path
    timeout_s: float
    """How long the server may stay silent."""

    def __post_init__(self) -> None:
        self.path = self.folder / self.file.name
        self.part = self.folder / f"{self.file.name}.part"

    def is_done(self) -> bool:
        """Whether the file is there with the right bytes."""
        return self.path.exists() and _md5(self.path) == self.file.md5

    def fetch(self, url: str) -> None:
        """Bring the file from a mirror; raise MirrorError if it is gone, too slow or wrong."""
        continues = self._num_bytes() > 0
        if not continues or _md5(self.part) != self.file.md5:
            self._fill(url)
        if continues and _md5(self.part) != self.file.md5:
            # The wrong bytes may be the old ones, so this mirror gets a chance to send them all.
            self.part.unlink()
            self._fill(url)
        if (actual := _md5(self.part)) != self.file.md5:
            self.part.unlink()
            raise MirrorError(f"wrong bytes: their MD5 is {actual}, expected {self.file.md5}")
        self.part.replace(self.path)

    def _fill(self, url: str) -> None:
        """Ask for the missing bytes until all are there or the mirror sends no more."""
        most = self._num_bytes()
        num_barren = 0
        while True:
            try:
                return self._append(url)
            except _CutOffError as problem:
                num_barren = 0 if self._num_bytes() > most else num_barren + 1
                if num_barren == _NUM_BARREN_TRIES:
                    raise MirrorError(str(problem)) from problem
            most = max(most, self._num_bytes())

    def _append(self, url: str) -> None:
        start = self._num_bytes()
        # The bytes as they lie there: a server may offer to unpack or to pack them on the way.
        headers = {"Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with requests.get(url, headers=headers, stream=True, timeout=self.timeout_s) as answer:
                self._write(answer, start)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as problem:
            silent = isinstance(problem, requests.Timeout | urllib3.exceptions.TimeoutError)
            reason = f"no answer for {self.timeout_s:g} s" if silent else _root_cause(problem)
            raise _CutOffError(f"{reason}, {self._num_bytes()} bytes arrived") from problem

    def _write(self, answer: requests.Response, start: int) -> None:
        sent_from = 0
        if answer.status_code == requests.codes.partial_content:
            match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
            sent_from = int(match[1]) if match else -1
        refused = answer.status_code == requests.codes.requested_range_not_satisfiable
        if (refused and start) or sent_from not in (0, start):
            # The part file is longer than the file, or the server counts otherwise: begin anew.
            self.part.unlink(missing_ok=True)
            raise _CutOffError("the server cannot continue a transfer")
        if answer.status_code not in (requests.codes.ok, requests.codes.partial_content):
            raise MirrorError(f"the server says {answer.status_code} {answer.reason}")
        length = answer.headers.get("Content-Length")
        expected = sent_from + int(length) if length else self.file.size_bytes
        mode = "ab" if sent_from else "wb"
        with self.part.open(mode) as out, _bar(self.file.name, sent_from, expected) as count:
            for chunk in answer.raw.stream(_CHUNK_BYTES, decode_content=False):
                out.write(chunk)
                out.flush()  # a killed program keeps what has arrived
                count(len(chunk))
            os.fsync(out.fileno())
        if self._num_bytes() < expected:
            raise _CutOffError(f"cut off after {self._num_bytes()} of {expected} bytes")

    def _num_bytes(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _root_cause(problem: BaseException) -> str:
    """Dig the operating system's words out of the layers of requests and urllib3."""
    words = str(problem)
    link: BaseException | None = problem
    while link is not None:
        words = (link.strerror if isinstance(link, OSError) else None) or words
        link = link.__cause__ or link.__context__
    return words
