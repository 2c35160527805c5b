"""Ranks of a user's own script agree through files: whether the script connects them is its own."""

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.profiling.tracing import write_whole
from samestep.run.files import read_object

_LOOK_EVERY_S = 0.001
_JOIN_EVERY_S = 0.02
_MEET_WITHIN_S = 120.0


class Left(BaseException):
    """Rank 0, which this rank waits for, has ended after so many steps.

    It is raised within the script, whose own `except Exception` must not swallow it.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


@dataclass(kw_only=True)
class Meeting:
    """One rank among those that profile the same script into the same directory."""

    folder: Path
    rank: int = 0
    world_size: int = 1
    _token: str = field(default="", init=False)
    _asked: int = field(default=0, init=False)

    def join(self) -> None:
        """Find the other ranks of this very start: an earlier, killed one may have left files.

        Every rank makes up a name for itself. Rank 0 answers to those that it sees, under a token
        that begins the names of all files from then on, until each rank has seen its own name.

        Raises:
            UserError: a rank does not come.
        """
        if self.world_size == 1:
            return
        deadline = time.monotonic() + _MEET_WITHIN_S
        name = uuid.uuid4().hex
        if self.rank == 0:
            self.close()
            self._token = name
        while not (self._all_have_come() if self.rank == 0 else self._is_called(name)):
            if time.monotonic() > deadline:
                raise self._waited(self.folder / "meeting.json")
            time.sleep(_JOIN_EVERY_S)

    def agree(self, function: Callable[[], bool]) -> bool:
        """Return what a function says on rank 0; all ranks ask equally often, in order.

        Raises:
            Left: rank 0 will not say it any more.
            UserError: rank 0 does not say it.
        """
        if self.world_size == 1:
            return function()
        self._asked += 1
        path = self._path(f"agreed-{self._asked}")
        if self.rank == 0:
            said = function()
            write_whole(path, json.dumps(said).encode())
            return said
        return bool(self._read(path, self._path("ended")))

    def end(self, steps: int) -> None:
        """Let ranks that wait for this one know that it has ended after so many steps."""
        if self.world_size > 1 and self.rank == 0:
            write_whole(self._path("ended"), json.dumps(steps).encode())

    def tell(self, value: Any) -> None:
        """Leave what this rank found."""
        write_whole(self._path(f"found-{self.rank}"), json.dumps(value).encode())

    def told(self) -> list[Any]:
        """Return what each rank found, in rank order, once all have."""
        return [self._read(self._path(f"found-{rank}")) for rank in range(self.world_size)]

    def close(self) -> None:
        """Take the files away."""
        for path in self.folder.glob("meeting*.json"):
            path.unlink(missing_ok=True)

    def _all_have_come(self) -> bool:
        others = range(1, self.world_size)
        if all(self._path(f"joined-{rank}").exists() for rank in others):
            return True
        here = {rank: read_object(self._here(rank)).get("name") for rank in others}
        call = json.dumps({"token": self._token, "names": list(here.values())})
        write_whole(self.folder / "meeting.json", call.encode())
        return False

    def _is_called(self, name: str) -> bool:
        call = read_object(self.folder / "meeting.json")
        if name in call.get("names", []):
            self._token = str(call["token"])
            write_whole(self._path(f"joined-{self.rank}"), b"{}")
            return True
        # Rank 0 clears away what it finds at its start, this file perhaps too.
        if read_object(self._here(self.rank)).get("name") != name:
            write_whole(self._here(self.rank), json.dumps({"name": name}).encode())
        return False

    def _here(self, rank: int) -> Path:
        return self.folder / f"meeting-here-{rank}.json"

    def _path(self, name: str) -> Path:
        return self.folder / f"meeting-{self._token}-{name}.json"

    def _read(self, path: Path, ended: Path | None = None) -> Any:
        deadline = time.monotonic() + _MEET_WITHIN_S
        while not path.exists():
            if ended is not None and ended.exists() and not path.exists():
                raise Left(json.loads(ended.read_text()))
            if time.monotonic() > deadline:
                raise self._waited(path)
            time.sleep(_LOOK_EVERY_S)
        return json.loads(path.read_text())

    def _waited(self, path: Path) -> UserError:
        return UserError(
            f"Rank {self.rank} waited {_MEET_WITHIN_S:.0f} s for another rank, which was to write "
            f"in {path.parent}. Do all ranks take equally many optimizer steps, and do all see "
            "this directory?"
        )
