"""One rank of a world that is only spoken of: nothing is started, and nobody else is there."""

import pickle
from dataclasses import dataclass
from typing import TypeVar

from samestep.ranks.world import World

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ImaginedWorld(World):
    """A world in which every other rank would say what this one says.

    What is built with it takes the sizes and shares of the whole world, and needs one process.
    """

    @property
    def connected(self) -> bool:
        """Never: a collective returns its input."""
        return False

    def gather(self, value: T) -> list[T]:
        """Return this rank's value for every rank, each one of its own, as if it had been sent."""
        sent = pickle.dumps(value)
        return [value, *(pickle.loads(sent) for _ in range(1, self.world_size))]  # noqa: S301
