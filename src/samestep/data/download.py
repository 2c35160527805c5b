"""Download the files of a data set, through broken lines and restarts; keep no wrong bytes."""

import contextlib
import filecmp
import os
import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from samestep.data.catalog import RemoteDataset, find_dataset
from samestep.data.transfer import MirrorError, Transfer
from samestep.errors import UserError


def download(
    name: str, folder: Path, *, mirrors: Sequence[str] | None = None, timeout_s: float = 30.0
) -> list[Path]:
    """Bring all files of a data set into a folder; files that are there and right stay untouched.

    An archive is unpacked beside itself once its bytes are verified, and kept: with it, what was
    unpacked can be checked, and mended, without the network.

    A second program that downloads into the same folder waits for the first one, where the file
    system can lock a folder; on one that cannot (NFS), let one program download at a time.

    Args:
        name: A name of the catalog.
        folder: Where the files go; it is made if it does not exist.
        mirrors: Base addresses to use in place of the catalog's, tried in this order.
        timeout_s: How long a mirror may stay silent before it is given up.

    Returns:
        The paths of all files, in the catalog's order.

    Raises:
        UserError: The data set is unknown, a mirror's address is malformed, the folder cannot be
            written, or no mirror gave the right bytes. What arrived so far is kept for next time.
    """
    dataset = find_dataset(name)
    bases = [_base_address(each) for each in mirrors or dataset.mirrors]
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
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
            f"The data folder {folder} cannot be used: {problem.strerror or problem}.\n"
            "Make room there or make it writable, or name another one with --data-dir."
        ) from problem
    return paths


def _fetch(dataset: RemoteDataset, transfer: Transfer, bases: Sequence[str]) -> str:
    """Bring one file and return the base address that gave it; raise UserError if none did."""
    file, folder, problems = transfer.file, transfer.folder, []
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
        "same command again: it goes on with what has arrived.\n"
        f"Or fetch the file by hand, for example from {by_hand}, and put it into {folder}\n"
        f"Or name a mirror of yours, the address of a folder with the files: {own_mirror}"
    )


def _base_address(mirror: str) -> str:
    if not re.match(r"https?://[^/]", mirror):
        raise UserError(
            f"The mirror {mirror!r} is no web address.\n"
            "Write the address of the folder that holds the files: https://host/folder/"
        )
    return mirror if mirror.endswith("/") else f"{mirror}/"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder alone, so that two programs do not write to one `.part` file."""
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
    """Bring the files of a tar archive into a folder, each whole; those there and right stay.

    Raises:
        UserError: it is no archive, or it holds something that may not be unpacked: a path that
            leads out of the folder, a device, a link to elsewhere.
        OSError: the folder takes no more files.
    """
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
            f"{archive} cannot be unpacked: {problem}. Delete it and download it again."
        ) from problem
