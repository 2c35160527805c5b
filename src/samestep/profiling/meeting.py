"""Ranks of a user's own script agree through files: whether the script connects them is its own."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.errors import UserError
from samestep.profiling.tracing import write_whole

_LOOK_EVERY_S = 0.001
_MEET_WITHIN_S = 120.0


@dataclass(kw_only=True)
class Meeting:
    """One rank among those that profile the same script into the same directory."""

    folder: Path
    rank: int = 0
    world_size: int = 1
    _asked: int = field(default=0, init=False)

    def agree(self, function: Callable[[], bool]) -> bool:
        """Return what a function says on rank 0; all ranks ask equally often, in order."""
        if self.world_size == 1:
            return function()
        self._asked += 1
        path = self.folder / f"agreed-{self._asked}.json"
        if self.rank == 0:
            said = function()
            write_whole(path, json.dumps(said).encode())
            return said
        return bool(self._read(path))

    def tell(self, value: Any) -> None:
        """Leave what this rank found."""
        write_whole(self.folder / f"found-{self.rank}.json", json.dumps(value).encode())

    def told(self) -> list[Any]:
        """Return what each rank found, in rank order, once all have."""
        return [self._read(self.folder / f"found-{rank}.json") for rank in range(self.world_size)]

    def close(self) -> None:
        """Take the files away."""
        for path in [*self.folder.glob("agreed-*.json"), *self.folder.glob("found-*.json")]:
            path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Any:
        deadline = time.monotonic() + _MEET_WITHIN_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise UserError(
                    f"Rank {self.rank} waited {_MEET_WITHIN_S:.0f} s for {path}, which another rank"
                    " was to write. Do all ranks take equally many optimizer steps, and do all "
                    "see this directory?"
                )
            time.sleep(_LOOK_EVERY_S)
        return json.loads(path.read_text())
