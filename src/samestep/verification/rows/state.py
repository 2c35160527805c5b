"""State outside the module: what a forward remembers that no checkpoint holds."""

from dataclasses import dataclass

from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.module_outputs import ModuleDifference, first_difference
from samestep.verification.recipe_under_test import RecipeUnderTest, held_model
from samestep.verification.rows.left_free import answer, left_free

NAME = "state"
CAUSE = "state outside the module"


@dataclass(frozen=True, kw_only=True)
class OutsideState:
    """What a forward draws from or remembers outside of weights and buffers."""

    generators: list[str]
    """Of Python and NumPy, those that forward or loss draws from."""
    own_generators: list[str]
    """Lines that draw from a `torch.Generator` of their own, which goes on from step to step."""
    remembers: ModuleDifference | None
    """The first module whose output differs in a second forward with the same inputs."""


def _look(tested: RecipeUnderTest) -> OutsideState:
    step = tested.free_step
    return OutsideState(
        generators=sorted(step.seen.generators),
        own_generators=step.own_generators,
        remembers=_remembering(tested) if tested.held_forward else None,
    )


def _remembering(tested: RecipeUnderTest) -> ModuleDifference | None:
    """Return the first module whose output changes though weights, buffers and inputs do not."""
    block = tested.batch()
    model = held_model(tested, block)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return first_difference(tested, model, block.inputs, block.inputs, state=state)


def remembers(evidence: Evidence) -> ModuleDifference | None:
    """Return the first module that remembers something, if one does."""
    found = evidence.found(NAME, OutsideState)
    return found.remembers if found else None


def _explain(evidence: Evidence) -> Cause | None:
    found = remembers(evidence)
    if found is None:
        return None
    return Cause(
        CAUSE,
        f"{found.module} gives something else ({found.difference:.0e}) in a second forward with "
        "equal weights, buffers and inputs: it keeps a number or a generator that is neither "
        "parameter nor buffer.",
        "Keep it with register_buffer(), so that checkpoints hold it, and change it once per step.",
    )


def _answer(evidence: Evidence) -> Check:
    found = evidence.found(NAME, OutsideState)
    if found and not found.remembers and found.own_generators:
        lines = ", ".join(filter(None, found.own_generators))
        where = f" ({lines})" if lines else ""
        cause = Cause(
            CAUSE,
            f"The model or the loss draws from a torch.Generator of its own{where}, "
            "which goes on from step to step: no checkpoint holds it, so a resumed run draws other "
            "numbers, and each rank has one.",
            "Draw without generator=: torch's own is seeded in every step.",
        )
        return cause_check(evidence, "no generator that goes on by itself", cause)
    if found and not found.remembers and found.generators:
        cause = Cause(
            CAUSE,
            f"The model or the loss draws from {' and '.join(found.generators)}, whose state "
            "differs on every rank and after a stop; with it held still the difference is gone.",
            "Draw from torch, which is seeded in every step, or from what all ranks have alike, "
            "such as the weights or the inputs.",
        )
        return answer(evidence, "state", "draws as they are", cause)
    difference = found.remembers.difference if found and found.remembers else None
    return cause_check(evidence, "a second forward gives the same", _explain(evidence), difference)


ROW = TableRow(name=NAME, look=_look, training=left_free("state"), answer=_answer, explain=_explain)
