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
from pathlib import Path
from typing import IO, Any

import cloudpickle

from samestep.base.errors import UserError, defined_at
from samestep.base.run.records import Record
from samestep.shell.api.call import Call
from samestep.show.reporting.progress import Nothing

CALL_FILE = "--call-file"
"""Precedes the file of a call in the arguments of a rank."""
RECORDS = "records.jsonl"
"""The file next to it in which rank 0 leaves the records of a training for the caller."""
_DEEPEST = 8


def send(call: Call, file: Path) -> None:
    """Write a call to a file that only this user can read."""
    buffer = io.BytesIO()
    pickler = _CallPickler(buffer)
    try:
        pickler.dump(call)
        main = cloudpickle.dumps(pickler.of_main)
    except Exception as error:
        raise UserError(_why_not(call, error)) from error
    file.touch(mode=0o600)
    # Three pickles: the caller's path comes first, as the call's imports need it.
    file.write_bytes(cloudpickle.dumps(sys.path) + main + buffer.getvalue())


def receive(file: Path) -> Call:
    """Return the call that this rank was started for."""
    with file.open("rb") as content:
        sys.path[:] = [*dict.fromkeys((*cloudpickle.load(content), *sys.path))]
        try:
            vars(sys.modules["__main__"]).update(cloudpickle.load(content))
            call = cloudpickle.load(content)
        except Exception as error:
            raise UserError(
                f"The recipe could not be read in another process: {type(error).__name__}: "
                f"{error}. All that it uses must be importable there, or be defined with the "
                "recipe."
            ) from error
    assert isinstance(call, Call)
    return call


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


class ScreenFile(Nothing):
    """Rank 0's screen for a caller in another process: the records, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None  # trackers and the mirror end later, and may tell something

    def tell(self, record: Record) -> None:
        """Append one record."""
        self._file = self._file or self._path.open("a", buffering=1, encoding="utf-8")
        self._file.write(json.dumps(record) + "\n")


def _why_not(call: Call, error: Exception) -> str:
    """Say which value cannot be sent to another process, and what to write instead."""
    parts = [(f"{name}=", value) for name, value in call.keywords.items()]
    if call.recipe is not None:
        parts += [(f"Recipe({name}=…)", value) for name, value in vars(call.recipe).items()]
    unsendable = next((part for part in parts if not _can_be_sent(part[1])), None)
    if unsendable is None:
        return f"The recipe cannot be sent to the processes of the ranks: {error}."
    what, value = unsendable
    place = defined_at(value) if callable(value) else ""
    name = ""  # that the user gave to the innermost object that cannot be sent
    for _ in range(_DEEPEST):
        inner = next((part for part in _parts(value) if not _can_be_sent(part[1])), None)
        if inner is None:
            break
        name, value = inner[0] or name, inner[1]
    kind = f"an object of type {type(value).__module__}.{type(value).__qualname__}"
    instead = "Make it inside the function that uses it"
    if isinstance(value, io.IOBase):
        named = getattr(value, "name", None)
        kind = f"an open file ({named})" if named else "an open file"
        instead = "Keep its path, and open it inside the function"
    elif isinstance(value, types.GeneratorType):
        kind = "a generator"
        instead = "Make it inside the function, or keep what it yields in a list"
    uses = f"{what}{place} uses {name!r}, " if name else f"{what} is "
    return (
        f"{uses}{kind}, which cannot be sent to the processes of the ranks. {instead}, or train "
        "with nproc=1."
    )


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
