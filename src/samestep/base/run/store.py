"""A store that a run is copied to and fetched from: any file system of fsspec, as s3://bucket/run.

A copy has the run's own names, so it is a run directory itself. fsspec, and what it needs for a
protocol, is imported only where a store is named.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from threading import Thread

from samestep.base.errors import UserError
from samestep.base.run.index import Index, parse_index

INDEX, RECORDS = "checkpoints/index.json", "events.jsonl"
FILES = (
    *("settings.toml", "environment.json", "recipe*.json", "recipe*.py", "script.py"),
    *("code/**/*.py", "tracking/*.json", "pictures/*", "system.jsonl", "summary.json"),
    *("result.json", RECORDS),
)
"""What is copied of a run besides its checkpoints, as patterns, the records last."""
_ANSWER_S = 10.0
"""How long a new run waits for the store's answer whether another run is there."""
_SECRET = re.compile(r"://[^@]*:[^@]*@|\?")


def address_of(mirror: object) -> str | None:
    """Return the store that `--mirror` names, if it names one."""
    return None if mirror in (None, "none") else str(mirror)


def check_address(address: str) -> None:
    """Check that this can be the address of a store, and that no secret is in it.

    It is written into settings, records and scripts.
    """
    if _SECRET.search(address) or ("@" in address and "://" not in address):
        raise UserError(
            "The address of a store holds a password or a query, and it would be written into the "
            "run. Leave them out: credentials belong where the store's client looks for them, such "
            "as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials, or fsspec's own "
            "configuration.",
            flags=["mirror", "resume"],
        )
    if not re.fullmatch(r"(?!memory:)[a-z][\w.+-]*://[^*\[\]]*[^/*\[\]]/*", address):
        raise UserError(
            f"{address!r} is not a store that outlives this process.",
            remedy="Write s3://BUCKET/RUN, or file:///FOLDER/RUN for a folder.",
            flags=["mirror", "resume"],
        )


def check_installed_for(address: str) -> None:
    """Check that the packages for a store are installed, by importing them."""
    protocol = address.partition("://")[0].rpartition("::")[2]
    try:
        import fsspec  # noqa: PLC0415 - an extra

        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        cause = error if error.name else error.__cause__
        package = (getattr(cause, "name", "") or protocol).partition(".")[0]
        extra = "'samestep[mirror]'" if package in ("fsspec", "s3fs") else package
        raise UserError(
            f"{protocol}:// needs the package {package}, which is not installed here: "
            f"pip install {extra}"
        ) from error
    except ValueError as error:
        raise UserError(f"{address}: fsspec knows no store of this kind.") from error


class Store:
    """The place of one run in a store. What fails raises what the store's client raises."""

    def __init__(self, address: str) -> None:
        import fsspec  # noqa: PLC0415 - an extra

        self.address = address.rstrip("/")
        self._files, self._root = fsspec.url_to_fs(self.address)

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """Return a file, or its first bytes; None if there is none."""
        try:
            content: bytes = self._files.cat_file(self._key(name), end=most)
        except FileNotFoundError:
            return None
        return content

    def index(self) -> Index:
        """Return the index of the copied checkpoints; empty if there is none yet."""
        text = self.read(INDEX)
        return Index() if text is None else parse_index(text, f"{self.address}/{INDEX}")

    def write(self, name: str, content: bytes) -> None:
        """Write a file, whole or not at all."""
        key = self._key(name)
        if self._files.async_impl:  # of an object store: an object is there once it is whole
            self._files.pipe_file(key, content)
            return
        self._make_folder(key)
        part = f"{key}.part"
        self._files.pipe_file(part, content)
        self._files.mv(part, key)

    def put(self, file: Path, name: str, moved: Callable[[], None]) -> None:
        """Copy a file there, in place; `moved` is called as it gets on, if the client tells."""
        from fsspec.callbacks import Callback  # noqa: PLC0415 - an extra

        key = self._key(name)
        self._make_folder(key)
        callback = Callback(hooks={"moved": lambda *_, **__: moved()})
        self._files.put_file(str(file), key, callback=callback)
        moved()

    def get(self, name: str, file: Path) -> None:
        """Copy a file from there."""
        self._files.get_file(self._key(name), str(file))

    def remove(self, name: str) -> None:
        """Delete a file, or all files of a folder."""
        with contextlib.suppress(FileNotFoundError):
            if not self._files.async_impl:
                self._files.rm(self._key(name), recursive=True)
                return
            for key in self._names(name) or [name]:  # not all stores delete several at once
                self._files.rm_file(self._key(key))

    def files(self) -> Iterator[str]:
        """Yield the names of what is copied besides checkpoints, in the order of `FILES`."""
        names = [name for name in self._names("") if ".." not in PurePosixPath(name).parts]
        for pattern in FILES:
            yield from (file for file in names if fnmatch(file, pattern.replace("**/", "")))

    def _names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        place = self._key(folder).rstrip("/")
        keys = self._files.find(place) if self._files.isdir(place) else []
        return [key[len(self._root) :].lstrip("/") for key in keys]

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, key: str) -> None:
        if not self._files.async_impl:  # object stores have none; it would make a bucket
            self._files.makedirs(key.rpartition("/")[0], exist_ok=True)


def check_mirror(mirror: str | None, *, new: bool, lost: Path | None = None) -> None:
    """Check that the mirror of a run can be written; for a new run, that no other one is there.

    A store that does not answer yet refuses no training. `lost`: where a run that may be the one
    in the store was to continue.
    """
    address = address_of(mirror)
    if address is None:
        return
    check_installed_for(address)
    indexes: list[Index] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # the mirror says so if it stays like that
            indexes.append(Store(address).index())

    if not new:
        return
    asking = Thread(target=ask, daemon=True)  # some clients try for minutes
    asking.start()
    asking.join(_ANSWER_S)
    if any(index.checkpoints for index in indexes):
        remedy = f" with --resume {address}"
        if lost is not None:
            get = f"fs, r = fsspec.url_to_fs('{address}'); fs.get(r + '/', '{lost}/', recursive=1)"
            remedy = f': fetch it by python -c "import fsspec; {get}", then start with resume=True'
        raise UserError(
            f"--mirror {address} has another run.",
            remedy=f"Choose another address, or continue that run{remedy}",
            flags=["mirror"],
        )
