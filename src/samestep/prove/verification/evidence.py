"""What the starts handed back, and what a row of the table is made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from samestep.base.settings import Precision
from samestep.base.words import ranks
from samestep.core.learner.side_effects import Kind
from samestep.core.recipe import Accepted
from samestep.launch.ranks.world import World
from samestep.prove.verification.causes import NO_CAUSE, Cause
from samestep.prove.verification.recipe_under_test import RecipeUnderTest
from samestep.prove.verification.short_trainings import (
    MAIN,
    NUDGED,
    NUDGED_GRADIENT,
    NUDGED_IN_OWN,
    OWN_PRECISION,
    RankFailure,
    RankReport,
    RecipeFacts,
    ShortTraining,
    Start,
    left_free,
)
from samestep.prove.verification.trace import (
    LEAST,
    ROUNDING,
    Trace,
    TrainingDifference,
    difference,
    worst,
)

T = TypeVar("T")
Status = Literal["same", "accepted", "note", "skipped", "different"]
NOT_REACHED = "the ranks did not get that far"
LEFT_OUT = "skipped by --quick"
EQUAL = "equal to the last bit"
_TIMES = 30
"""The tolerance of losses, in multiples of what one rounding of the weights changes."""
OPTIMIZER_TIMES = 4
"""The tolerance after the first update, in multiples of what a rounding of gradients changes."""


@dataclass(frozen=True)
class Check:
    """The answer of one row of the table."""

    status: Status
    compared: str  # what was compared with what, or what was looked at
    difference: float | None = None  # the largest relative difference that was found
    tolerance: float | None = None  # the largest one that counts as rounding
    cause: Cause = NO_CAUSE
    first_step: int | None = None
    """The first step with a difference beyond the tolerance, counted from 1."""
    first_parameter: str | None = None
    what: str = ""
    """What differs in that step: the loss, a gradient, the name of a metric."""
    failure: RankFailure | None = None  # how the short training failed, if it did
    name: str = ""  # set where one row gives several checks

    @property
    def passed(self) -> bool:
        """Whether the training can still be called the same."""
        return self.status != "different"


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All that the starts handed back."""

    facts: RecipeFacts
    starts: Sequence[Start]
    with_death: Start | None = None
    """The start in which a rank dies, if there was one; it is not among the others."""
    traces: Mapping[tuple[int, str], list[Trace]]
    """(start, short training) → the trace of each rank; absent if a rank has none."""
    reports: Mapping[int, list[RankReport]]  # start → the report of each of its ranks
    ended: Mapping[int, str]  # start that failed → its error message
    chosen: Precision  # the precision of the user's settings
    accepts: frozenset[Accepted] = frozenset()
    tolerance: float | None = None  # the user's own, for losses
    quick: bool = False

    @property
    def reference(self) -> Trace:
        """The training of one process; only the first row is judged without it."""
        return self.traces[0, MAIN][0]

    @property
    def several(self) -> list[Start]:
        """The starts of several ranks."""
        return [start for start in self.starts if start.world_size > 1]

    @property
    def bits(self) -> bool:
        """Whether everything must be equal to the last bit, by virtual ranks."""
        return self.facts.virtual_ranks is not None

    @property
    def exact(self) -> float:
        """Tolerance of what is compared in the exact precision."""
        if self.bits:
            return 0.0
        usual, least = ROUNDING[self.facts.exact], LEAST[self.facts.exact]
        moved = self.nudged()
        return usual if moved is None else min(usual, max(least, _TIMES * moved))

    def nudged(self) -> float | None:
        """Return the losses' largest change by one rounding of the weights, if that was tried."""
        nudged = self.trace(0, NUDGED)
        if nudged is None:
            return None
        return difference(self.reference, nudged, 0.0, losses_only=True).largest

    def by_optimizer(self, training: str = MAIN) -> float:
        """Return the difference that the user's optimizer may make of rounding; 0 if not tried."""
        usual, nudged = self.reference, self.trace(0, NUDGED_GRADIENT)
        if training == OWN_PRECISION and (in_own := self.trace(0, NUDGED_IN_OWN)):
            usual, nudged = self.traces[0, OWN_PRECISION][0], in_own
        if nudged is None:
            return 0.0
        losses_only = self.losses_only(training)
        return OPTIMIZER_TIMES * difference(usual, nudged, 0.0, losses_only=losses_only).largest

    def trace(self, place: int, training: str) -> Trace | None:
        """Return rank 0's trace of a short training, if there is one."""
        return next(iter(self.traces.get((place, training), [])), None)

    def traces_of_several(self) -> list[tuple[Start, list[Trace]]]:
        """Return the traces of all ranks of each start of several that came to its end."""
        traces = ((start, self.traces.get((start.place, MAIN), [])) for start in self.several)
        return [(start, of_ranks) for start, of_ranks in traces if of_ranks]

    def result(self, row: str, kind: type[T]) -> T | None:  # noqa: ARG002 - for type checkers
        """Return the result of a row's experiment in the first process, if there is any."""
        return cast("T | None", self.facts.results.get(row))

    def results_on_ranks(self, row: str, kind: type[T]) -> list[tuple[str, T]]:  # noqa: ARG002
        """Return each process as "rank 1 of 2", with the result of a row's experiment there."""
        return [
            (f"rank {rank} of {start.world_size}", cast("T", report.results[row]))
            for start in self.starts
            for rank, report in enumerate(self.reports.get(start.place, ()))
            if row in report.results
        ]

    def tolerance_of(self, training: str) -> float:
        """Return the tolerance of a short training's comparison."""
        if self.tolerance is not None:
            return self.tolerance
        return max(self.before_updates(training), self.by_optimizer(training))

    def before_updates(self, training: str) -> float:
        """Return the tolerance of what no update has touched: the loss and gradients of step 1."""
        return ROUNDING[self.chosen] if training == OWN_PRECISION else self.exact

    def losses_only(self, training: str = MAIN) -> bool:
        """Whether only losses decide: without float64, or with the user's tolerance."""
        rounded = training == OWN_PRECISION or self.facts.exact != "fp64"
        return (rounded and not self.bits) or self.tolerance is not None

    def compare(
        self, trace: Trace, training: str = MAIN, *, reference: Trace | None = None
    ) -> TrainingDifference:
        """Compare a training with one process, by everything that was kept or only by losses."""
        first = self.before_updates(training) if self.tolerance is None else None
        return difference(
            reference or self.reference,
            trace,
            self.tolerance_of(training),
            losses_only=self.losses_only(training),
            before_updates=first,
        )

    def compare_starts(
        self, training: str, *, reference: Trace | None = None
    ) -> dict[Start, TrainingDifference]:
        """Compare a short training of all starts that ran it with that of one process."""
        traces = {start: self.trace(start.place, training) for start in self.starts}
        return {s: self.compare(t, training, reference=reference) for s, t in traces.items() if t}

    def not_compared(self) -> str:
        """Return why nothing was compared with several ranks, if nothing was."""
        if not self.several:
            return "only one number of ranks"
        compared = any((start.place, MAIN) in self.traces for start in self.several)
        return "" if compared else NOT_REACHED

    def failures(self, *, training: str = "", place: int | None = None) -> list[RankFailure]:
        """Return the failures of a short training or of a start, causes before their effects."""
        failures = [
            failure
            for start, reports in self.reports.items()
            for failure in (failure for report in reports for failure in report.failures)
            if place in (None, start) and training in ("", failure.training)
        ]
        return sorted(failures, key=lambda failure: failure.lost_peer)

    def died(self, place: int) -> bool:
        """Whether a start ended before one of its ranks could say why."""
        return place in self.ended and not self.failures(place=place)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A row of the table: what is run for it, and how it is judged and explained."""

    name: str
    answer: Callable[[Evidence], Check | list[Check]]
    """Judges the evidence. A difference whose check names no cause is explained by other rows."""
    training: ShortTraining | None = None  # what starts train for this row
    thorough: bool = False  # whether `--quick` leaves it out
    experiment: Callable[[RecipeUnderTest], Any] | None = None
    """Of the first process; `Evidence.result` returns its result, unless None."""
    rank_experiment: Callable[[RecipeUnderTest, World], Any] | None = None
    """Of every rank of every start: see `Evidence.results_on_ranks`."""
    explain: Callable[[Evidence], Cause | None] | None = None
    """Returns this row's cause if it was found, for differences in other rows."""
    suspect: Callable[[Evidence], Cause | None] | None = None
    """Returns what may be the cause of a difference that no row explains."""
    with_virtual_ranks: bool = True
    """False if what it checks makes no difference with virtual ranks, whose shares are fixed."""
    explain_failure: Callable[[Evidence, RankFailure], Cause | None] | None = None
    """Returns this row's cause if a failure shows it."""


def failed(compared: str, failures: Sequence[RankFailure]) -> Check:
    """Return the check of what failed first."""
    first = failures[0]
    return Check("different", compared, first_step=first.step or None, failure=first)


def failed_start(evidence: Evidence, compared: str, place: int) -> Check:
    """Return the check of a start that ended before its ranks had trained."""
    ended = RankFailure(training=MAIN, step=0, message=evidence.ended.get(place, "it ended"))
    return failed(compared, [*evidence.failures(place=place), ended])


def measured(
    compared: str, difference: TrainingDifference, tolerance: float, cause: Cause | None = None
) -> Check:
    """Return the check of a measured difference, with its cause if the row knows it itself."""
    tolerance = tolerance if difference.allowed is None else difference.allowed
    same = difference.largest <= tolerance
    if same and tolerance == 0:
        compared = f"{EQUAL}: {compared}"
    return Check(
        "same" if same else "different",
        compared,
        difference.largest,
        tolerance,
        cause if cause and not same else NO_CAUSE,
        difference.first_step,
        difference.first_parameter,
        difference.what,
    )


def cause_check(
    evidence: Evidence,
    compared: str,
    cause: Cause | None,
    difference: float | None = None,
    **first: Any,
) -> Check:
    """Return the check of a row whose experiment found its cause, or found none."""
    tolerance = None if difference is None else evidence.exact
    if cause is None:
        compared = f"{EQUAL}: {compared}" if evidence.bits else compared
        return Check("same", compared, difference, tolerance, **first)
    # Where losses decide, by the user's tolerance, a cause is only a note.
    status: Status = "different" if evidence.tolerance is None else "note"
    return Check(status, compared, difference, tolerance, cause, **first)


def training_check(
    evidence: Evidence,
    training: str,
    compared: str,
    differences: Mapping[Start, TrainingDifference] | None = None,
    sizes: str = "",
) -> Check:
    """Return the check of a short training; by default starts are compared with one process."""
    if failures := evidence.failures(training=training):
        return failed(compared, failures)
    if differences is None:
        differences = evidence.compare_starts(training)
    if not differences:
        return Check("skipped", NOT_REACHED)
    sizes = sizes or ranks(start.world_size for start in differences)
    tolerance = evidence.tolerance_of(training)
    return measured(f"{compared}: {sizes}", worst(differences.values()), tolerance)


def left_free_check(evidence: Evidence, kind: Kind, compared: str, cause: Cause) -> Check:
    """Return the check of the training that leaves one kind of random behaviour as it is."""
    name = left_free(kind).name
    alone, many = evidence.trace(0, name), evidence.trace(1, name)
    if alone is None or many is None:
        return Check("skipped", f"{compared}; {evidence.not_compared() or NOT_REACHED}")
    compared = f"{compared}, on {evidence.starts[1].world_size} ranks"
    difference = evidence.compare(many, name, reference=alone)
    check = measured(compared, difference, evidence.tolerance_of(MAIN), cause)
    if check.passed or kind == "state" or kind not in evidence.accepts:
        return check
    return replace(check, status="accepted", cause=replace(cause, advice=""))
