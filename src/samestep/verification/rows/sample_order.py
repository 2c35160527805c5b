"""Order: every process holds the same samples, and the ranks share out those of one process."""

from dataclasses import replace

from samestep.ranks.world import World
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.exchange import RankFailure
from samestep.verification.fingerprints import sample_marks
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


def _look(tested: RecipeUnderTest, _world: World) -> list[str]:
    """Return the marks of the first samples as they are stored."""
    block = tested.batch(recipe=replace(tested.recipe, augment=None, transform=None))
    return sample_marks(block.inputs, block.targets)


def _explain(evidence: Evidence) -> Cause | None:
    reports = [r for ranks in evidence.reports.values() for r in ranks if r.num_samples]
    numbers = {report.num_samples for report in reports}
    marks = {tuple(marks) for marks in evidence.found_on_ranks(NAME, list[str])}
    differ = len(numbers) > 1 or (len(marks) > 1 and changing_part(evidence) != "dataset")
    return CAUSE if differ else None


def _explain_failure(_evidence: Evidence, failure: RankFailure) -> Cause | None:
    return CAUSE if "loaded data of different sizes" in failure.message else None


def _answer(evidence: Evidence) -> Check:
    if _explain(evidence):
        return cause_check(evidence, "the same data in every process", CAUSE)
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
