"""The ranks of a user's own script agree through a store of their own, which `ranks.world` opens.

Whether and how the script connects its ranks is up to the script.
"""

from collections.abc import Callable
from datetime import timedelta

from samestep.errors import UserError
from samestep.ranks.launch import Launch
from samestep.ranks.world import Store, StoreTimeout, open_store

WITHIN_S = 120.0
_ENDED = "ended after "


class RankZeroEnded(BaseException):
    """Rank 0, whose answer this rank waits for, has ended after so many steps.

    It is raised within the script, whose own `except Exception` must not swallow it.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self.steps = steps


class ScriptRanks:
    """One rank among those that profile the same script."""

    def __init__(self, launch: Launch, within_s: float = WITHIN_S) -> None:
        self.rank, self.world_size = launch.rank, launch.world_size
        self.local_world_size = launch.local_world_size
        self._launch, self._within_s = launch, within_s
        self._asked = 0
        self._opened: Store | None = None

    def join(self) -> None:
        """Wait until all ranks are here.

        Raises:
            UserError: a rank does not come.
        """
        if self.world_size == 1:
            return
        try:
            self._opened = open_store(self._launch, self._within_s)
        except RuntimeError as error:
            raise self._waited("for rank 0 to listen") from error
        self._put(f"here-{self.rank}", "")
        for rank in range(self.world_size):
            self._get(f"here-{rank}", f"for rank {rank} to start")

    def agree(self, function: Callable[[], int]) -> int:
        """Return what a function says on rank 0; all ranks ask equally often, in order.

        Raises:
            RankZeroEnded: rank 0 will not answer any more.
            UserError: rank 0 does not answer.
        """
        if self.world_size == 1:
            return function()
        self._asked += 1
        key = f"answer-{self._asked}"
        if self.rank == 0:
            answer = function()
            self._put(key, str(int(answer)))
            return answer
        said = self._get(key, "for rank 0 to take as many optimizer steps as this rank")
        if said.startswith(_ENDED):
            raise RankZeroEnded(int(said.removeprefix(_ENDED)))
        return int(said)

    def end(self, steps: int) -> None:
        """Answer the next question of the other ranks: rank 0 has ended after so many steps."""
        if self.world_size > 1 and self.rank == 0:
            self._put(f"answer-{self._asked + 1}", f"{_ENDED}{steps}")

    def gather(self, found: str) -> list[str]:
        """Return what each rank found, in rank order, on rank 0; on other ranks an empty list.

        Raises:
            UserError: a rank has found nothing in time.
        """
        if self.rank != 0:
            self._put(f"found-{self.rank}", found)
            return []
        others = range(1, self.world_size)
        return [found, *(self._get(f"found-{r}", f"for the profile of rank {r}") for r in others)]

    def _put(self, key: str, value: str) -> None:
        assert self._opened is not None
        self._opened.set(f"profile/{key}", value)

    def _get(self, key: str, what: str) -> str:
        assert self._opened is not None
        try:
            self._opened.wait([f"profile/{key}"], timedelta(seconds=self._within_s))
        except StoreTimeout as error:
            raise self._waited(what) from error
        return self._opened.get(f"profile/{key}").decode()

    def _waited(self, what: str) -> UserError:
        return UserError(
            f"Rank {self.rank} waited {self._within_s:.0f} s {what}, at "
            f"{self._launch.master_addr}:{self._launch.master_port}. Start all "
            f"{self.world_size} ranks at once, and let all take equally many optimizer steps."
        )
