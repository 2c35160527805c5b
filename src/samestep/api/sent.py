"""Hand a call over to the ranks that it starts: written for them alone, read by each of them.

A recipe that was made in a notebook is in no file, so it goes by value, through cloudpickle. That
file lies in a private temporary folder and is gone with the ranks; it never gets into a run.
"""

import io
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import cloudpickle

from samestep.api.as_rank import train_as_rank
from samestep.api.asked import Asked, request_of
from samestep.api.unsendable import why_not
from samestep.errors import UserError
from samestep.execution.pictures import end_while_drawing
from samestep.ranks.process import RankLog
from samestep.run.records import Record

SENT = "--sent"
"""Stands before the file of a call, where ranks are told of it by their arguments."""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A call, and what a rank needs to carry it out."""

    asked: Asked
    records: Path | None = None
    """Where rank 0 leaves the records of a training for whoever called."""


def send(sent: Sent, file: Path) -> None:
    """Write a call where only this user's processes read it.

    Raises:
        UserError: the recipe holds something that cannot be sent to another process.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(sent)
        main = cloudpickle.dumps(pickler.of_main)
    except Exception as error:
        raise UserError(why_not(sent.asked.recipe, sent.asked.keywords, error)) from error
    file.touch(mode=0o600)
    # Apart: what the call imports is looked for on the caller's path, which is read before.
    file.write_bytes(cloudpickle.dumps(sys.path) + main + buffer.getvalue())


def receive(file: Path) -> Sent:
    """Return the call that this rank was started for.

    Raises:
        UserError: it cannot be read here.
    """
    with file.open("rb") as content:
        sys.path[:] = [*dict.fromkeys((*cloudpickle.load(content), *sys.path))]
        try:
            vars(sys.modules["__main__"]).update(cloudpickle.load(content))
            sent = cloudpickle.load(content)
        except Exception as error:
            raise UserError(
                f"The recipe could not be read in another process: {type(error).__name__}: "
                f"{error}. What it uses has to be importable there, or be defined where the recipe "
                "is."
            ) from error
    assert isinstance(sent, Sent)
    return sent


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes what it takes of the caller's `__main__`.

    The ranks' own has it then too, so that what is made of it can go from rank to rank, and from
    loader workers to a rank, as between processes of one script.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        named = isinstance(value, type | types.FunctionType) and value.__module__ == "__main__"
        if named and value.__qualname__ == value.__name__ != "<lambda>":
            self.of_main[value.__name__] = value
        return super().reducer_override(value)


class RecordFile:
    """What rank 0 shows, left in a file for the process that has called."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def show(self, record: Record) -> None:
        """Leave one record."""
        self._file = self._file or self._path.open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")

    def result(self, path: Path, result: dict[str, Any]) -> None:
        """Leave nothing: whoever called reads the run."""


def train_sent(file: Path, log: RankLog) -> int:
    """Train as a rank that `samestep.train` has started; return the exit code."""
    sent = receive(file)
    assert sent.records is not None
    outcome = train_as_rank(request_of(sent.asked), RecordFile(sent.records), log.move_to)
    code = 128 + outcome.signum if outcome.signum else 0
    end_while_drawing(code)
    return code
