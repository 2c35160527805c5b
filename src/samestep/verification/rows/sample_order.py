"""Order: every process holds the same samples, and the ranks share out those of one process."""

from dataclasses import replace

from samestep.ranks.world import World
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.exchange import RankFailure, decoded
from samestep.verification.recipe_under_test import RecipeUnderTest
from samestep.verification.rows.augmentation import changing_part
from samestep.verification.short_trainings import MAIN

NAME = "order"
CAUSE = Cause(
    NAME,
    "Processes hold other samples in the same places: data() returns them in another order, or "
    "others, each time it is called.",
    "Sort what comes from a folder or a set, and give each generator in data() a fixed seed.",
)


RANK = "data that depends on the rank"
LENGTHS = "lengths that differ per rank"
_SHOWN = 4


def _look(tested: RecipeUnderTest, _world: World) -> list[str]:
    """Return the marks of the first samples as they are stored."""
    return tested.marks(replace(tested.recipe, augment=None, transform=None))


def _lengths(evidence: Evidence) -> dict[str, int]:
    """Return the numbers of samples that processes hold, the first of each number: they differ."""
    found: dict[str, int] = {}
    for start in sorted(evidence.starts, key=lambda start: -start.world_size):
        for rank, report in enumerate(evidence.reports.get(start.place, ())):
            if report.num_samples and report.num_samples not in found.values():
                found[f"rank {rank} of {start.world_size}"] = report.num_samples
    return found


def _explain(evidence: Evidence) -> Cause | None:
    if len(lengths := _lengths(evidence)) > 1:
        told = [f"{rank} holds {number:,}" for rank, number in lengths.items()]
        return Cause(
            LENGTHS,
            f"Processes have other numbers of training samples: {', '.join(told[:_SHOWN])}.",
            "Let data() return all samples in every process: samestep shares them out.",
        )
    marks = {tuple(marks) for marks in evidence.found_on_ranks(NAME, list[str])}
    if len(marks) < 2 or changing_part(evidence) == "dataset":
        return None
    return _by_rank(evidence) or CAUSE


def _by_rank(evidence: Evidence) -> Cause | None:
    """Return the cause if all processes of rank 0 hold the same, and other ranks something else."""
    first: list[str] | None = None
    other = ""
    for place, reports in evidence.reports.items():
        for rank, report in enumerate(reports):
            marks = decoded(report.found, NAME, list[str])
            if first is None:
                first = marks
            if marks is None or marks == first:
                continue
            if rank == 0:
                return None
            other = other or f"rank {rank} of {evidence.starts[place].world_size}"
    return Cause(
        RANK,
        f"{other} holds other values than rank 0 in the same places, and every process that was "
        "rank 0 holds the same: data() or the data set reads the rank.",
        "Let data() return the same in every process: samestep gives each rank its share.",
    )


def _explain_failure(evidence: Evidence, failure: RankFailure) -> Cause | None:
    if "loaded data of different sizes" not in failure.message:
        return None
    return _explain(evidence) or CAUSE


def _answer(evidence: Evidence) -> Check:
    if cause := _explain(evidence):
        return cause_check(evidence, "the same data in every process", cause)
    changing = "samples change when they are read" if changing_part(evidence) else ""
    if skipped := changing or evidence.not_compared():
        return Check("skipped", skipped)
    compared = "on all ranks that of one process"
    for start in evidence.several:
        traces = evidence.traces.get((start.place, MAIN), [])
        for step, marks in evidence.reference.samples.items() if traces else ():
            if [mark for trace in traces for mark in trace.samples.get(step, [])] != marks:
                return cause_check(evidence, compared, CAUSE, first_step=step)
    return Check("same", compared)


ROW = TableRow(
    name=NAME,
    look_on_rank=_look,
    answer=_answer,
    explain=_explain,
    explain_failure=_explain_failure,
)
