"""Fetch one file over HTTP, going on where an earlier transfer was cut off.

The bytes gather in a `.part` file beside the final one. It outlives the program, so a restart asks
only for the rest; it is handed over only when its MD5 is right.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import requests
import urllib3.exceptions
from tqdm import tqdm  # type: ignore[import-untyped]

from samestep.data.catalog import RemoteFile

# A mirror is asked again as long as bytes come; two tries in a row without any are enough.
_NUM_BARREN_TRIES = 2

# Small, so that little is lost when the line breaks in the middle of a chunk.
_CHUNK_BYTES = 4096


class MirrorError(Exception):
    """This mirror cannot give the file; the next one may."""


class _CutOffError(Exception):
    """The transfer ended early; the same mirror may send the rest."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One file on its way from a mirror into a folder."""

    file: RemoteFile
    folder: Path
    """Where it goes; its bytes gather there in a `.part` file."""
    timeout_s: float
    """How long the server may stay silent."""

    @property
    def part(self) -> Path:
        """Where the bytes gather."""
        return self.folder / f"{self.file.name}.part"

    @property
    def path(self) -> Path:
        """Where the file is once its bytes are verified."""
        return self.folder / self.file.name

    def is_done(self) -> bool:
        """Whether the file is there with the right bytes."""
        return self.path.exists() and _md5(self.path) == self.file.md5

    def fetch(self, url: str) -> None:
        """Bring the file from a mirror.

        Raises:
            MirrorError: The server is gone, too slow, or sent wrong bytes.
            OSError: The disk took no more bytes.
        """
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
        most, num_barren = self._num_bytes(), 0
        while True:
            try:
                return self._append(url)
            except _CutOffError as problem:
                num_barren = 0 if self._num_bytes() > most else num_barren + 1
                if num_barren == _NUM_BARREN_TRIES:
                    raise MirrorError(str(problem)) from problem
            most = max(most, self._num_bytes())

    def _append(self, url: str) -> None:
        """Ask once for the missing bytes and write what comes."""
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
        bar = tqdm(  # drawn if the error stream is a terminal
            None,
            self.file.name,
            expected,
            initial=sent_from,
            unit="B",
            unit_scale=True,
            disable=None,
        )
        with self.part.open("ab" if sent_from else "wb") as out, bar:
            for chunk in answer.raw.stream(_CHUNK_BYTES, decode_content=False):
                out.write(chunk)
                out.flush()  # a killed program keeps what has arrived
                bar.update(len(chunk))
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
