"""Send a call to the ranks that it starts.

cloudpickle sends recipes by value, as one made in a notebook has no file. The call's file is in a
private temporary folder and is deleted when the ranks end; it is never copied into a run.
"""

import functools
import io
import json
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, Self

import cloudpickle

from samestep.api.call import Call
from samestep.errors import UserError, defined_at
from samestep.recipe import Recipe
from samestep.run.records import Record

CALL_FILE = "--call-file"
"""Precedes the file of a call in the arguments of a rank."""
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class SentCall:
    """A call, and what a rank needs to carry it out."""

    call: Call
    records: Path | None = None
    """Where rank 0 leaves the records of a training for the caller."""


def send(sent: SentCall, file: Path) -> None:
    """Write a call to a file that only this user can read."""
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    try:
        pickler.dump(sent)
        main = cloudpickle.dumps(pickler.of_main)
    except Exception as error:
        raise UserError(_why_not(sent.call.recipe, sent.call.keywords, error)) from error
    file.touch(mode=0o600)
    # Three pickles: the caller's path comes first, as the call's imports need it.
    file.write_bytes(cloudpickle.dumps(sys.path) + main + buffer.getvalue())


def receive(file: Path) -> SentCall:
    """Return the call that this rank was started for."""
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
    assert isinstance(sent, SentCall)
    return sent


class _CallPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Notes the classes and functions that it takes from the caller's `__main__`.

    The ranks put them into their own `__main__`, so that ranks and loader workers can exchange
    their instances.
    """

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, value: Any) -> Any:
        named = isinstance(value, type | types.FunctionType) and value.__module__ == "__main__"
        if named and value.__qualname__ == value.__name__ != "<lambda>":
            self.of_main[value.__name__] = value
        return super().reducer_override(value)


class ScreenFile:
    """Rank 0's screen for a caller in another process: the records, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def show(self, record: Record) -> None:
        """Append one record."""
        self._file = self._file or self._path.open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")

    def result(self, path: Path, result: dict[str, Any]) -> None:
        """Do nothing: the caller reads the run."""


def _why_not(recipe: Recipe | None, keywords: Mapping[str, Any], error: Exception) -> str:
    """Say which value cannot be sent to another process, and what to write instead."""
    parts = [(f"{name}=", value) for name, value in keywords.items()]
    if recipe is not None:
        parts += [(f"Recipe({f.name}=…)", getattr(recipe, f.name)) for f in fields(recipe)]
    for what, value in parts:
        if not _can_be_sent(value):
            name, culprit = _culprit(value)
            place = defined_at(value) if callable(value) else ""
            uses = f"{what}{place} uses {name!r}, " if name else f"{what} is "
            kind, instead = _about(culprit)
            return (
                f"{uses}{kind}, which cannot be sent to the processes of the ranks. "
                f"{instead}, or train with nproc=1."
            )
    return f"The recipe cannot be sent to the processes of the ranks: {error}."


def _culprit(value: Any) -> tuple[str, Any]:
    """Return the innermost object that cannot be sent, and the name that the user gave it."""
    name = ""
    for _ in range(_DEEPEST):
        found = next(((n, part) for n, part in _parts(value) if not _can_be_sent(part)), None)
        if found is None:
            break
        name, value = found[0] or name, found[1]
    return name, value


def _can_be_sent(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object, with their names if they have any."""
    if isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        yield from (("", value.__func__), ("self", value.__self__))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        used = _global_names(value.__code__)
        yield from ((name, part) for name, part in value.__globals__.items() if name in used)
        yield from (("", part) for part in value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, type):
        yield from ((name, part) for name, part in vars(value).items() if callable(part))
    elif isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("", part) for part in value)
    else:
        yield from getattr(value, "__dict__", {}).items()


def _global_names(code: types.CodeType) -> set[str]:
    """Return the global names that a function, or one inside it, may use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return {*code.co_names}.union(*map(_global_names, inner))


def _about(culprit: Any) -> tuple[str, str]:
    """Return what an object is, and what to do instead."""
    if isinstance(culprit, io.IOBase | io.TextIOBase):
        name = getattr(culprit, "name", None)
        kind = f"an open file ({name})" if name else "an open file"
        return kind, "Keep its path, and open it inside the function"
    if isinstance(culprit, types.GeneratorType):
        return "a generator", "Make it inside the function, or keep what it yields in a list"
    kind = f"an object of type {type(culprit).__module__}.{type(culprit).__qualname__}"
    return kind, "Make it inside the function that uses it"
