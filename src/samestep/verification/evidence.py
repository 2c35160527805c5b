"""One row of the table, and the evidence that the rows are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from samestep.recipe import Accepted
from samestep.settings import Precision
from samestep.verification.difference import ROUNDING, Difference, difference
from samestep.verification.facts import Facts
from samestep.verification.messages import Failure, Told
from samestep.verification.situations import MAIN, PRECISION, Start
from samestep.verification.trace import Trace

Status = Literal["same", "accepted", "note", "skipped", "different"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question, and its answer."""

    name: str
    status: Status
    compared: str
    """What was compared with what, or what was looked at."""
    tolerance: float | None = None
    """Largest relative difference that is none."""
    difference: float | None = None
    """The largest that was met."""
    first_step: int | None = None
    """The first step with a difference beyond the tolerance, counted from 1."""
    first_parameter: str | None = None
    cause: str | None = None
    """The likely cause by its name."""
    why: str = ""
    """The cause in words: what of this recipe, and how that was found."""
    advice: str = ""

    @property
    def passed(self) -> bool:
        """Whether this is no reason to call the training different."""
        return self.status != "different"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the starts left, read back."""

    facts: Facts
    starts: Sequence[Start]
    traces: Mapping[tuple[int, str], list[Trace]]
    """(start, situation) → the trace of each rank; absent where one has none."""
    told: Mapping[int, list[Told]]
    """Start → what each of its ranks told."""
    ended: Mapping[int, str]
    """Start that failed → what was said of it."""
    chosen: Precision
    accepts: frozenset[Accepted]
    tolerance: float | None = None
    """The user's own, for losses."""

    @property
    def reference(self) -> Trace | None:
        """The training of one process."""
        found = self.traces.get((0, MAIN))
        return found[0] if found else None

    @property
    def middle(self) -> list[Start]:
        """The starts of several ranks."""
        return [start for start in self.starts if start.world_size > 1]

    @property
    def exact(self) -> float:
        """Tolerance of what is compared in the exact precision."""
        return ROUNDING[self.facts.exact]

    def trace(self, place: int, name: str) -> Trace | None:
        """Return rank 0's trace of a situation, if there is one."""
        found = self.traces.get((place, name))
        return found[0] if found else None

    def tolerance_of(self, name: str) -> float:
        """Return the tolerance of a situation's comparison."""
        own = ROUNDING[self.chosen] if name == PRECISION else self.exact
        return own if self.tolerance is None else self.tolerance

    def losses_only(self, name: str = MAIN) -> bool:
        """Whether a situation's losses alone decide: without float64, or as the user wants it."""
        rounded = name == PRECISION or self.facts.exact != "fp64"
        return rounded or self.tolerance is not None

    def compare(self, one: Trace, other: Trace, name: str = MAIN) -> Difference:
        """Compare two trainings, by all that was kept of them or by their losses alone."""
        return difference(one, other, self.tolerance_of(name), losses_only=self.losses_only(name))

    def uncompared(self) -> str:
        """Return why nothing was compared with several ranks, if nothing was."""
        if not self.middle:
            return "one size of ranks alone"
        came = any((start.place, MAIN) in self.traces for start in self.middle)
        return "" if came else "the ranks did not come so far"

    def failure(self, place: int) -> Failure | None:
        """Return how a start failed, from the rank that caused it."""
        found = [f for told in self.told.get(place, []) for f in told.failures]
        return min(found, key=lambda f: f.lost_peer, default=None)
