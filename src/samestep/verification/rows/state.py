"""State outside the module: what a forward remembers that no checkpoint holds."""

from dataclasses import dataclass
from functools import partial

from samestep.verification.difference import relative
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.module_outputs import ModuleDifference, first_difference
from samestep.verification.recipe_under_test import RecipeUnderTest, held_model
from samestep.verification.rows.left_free import answer, left_free

NAME = "state"
CAUSE = "state outside the module"
IN_LOSS = "state in the loss"


@dataclass(frozen=True, kw_only=True)
class OutsideState:
    """What a forward draws from or remembers outside of weights and buffers."""

    generators: list[str]
    """Of Python and NumPy, those that forward or loss draws from."""
    own_generators: list[str]
    """Lines that draw from a `torch.Generator` of their own, which goes on from step to step."""
    remembers: ModuleDifference | None
    """The first module whose output differs in a second forward with the same inputs."""
    loss: float | None = None
    """How much the loss of equal outputs changes when it is called again, if it does."""


def _look(tested: RecipeUnderTest) -> OutsideState:
    step = tested.free_step
    return OutsideState(
        generators=sorted(step.seen.generators),
        own_generators=step.own_generators,
        remembers=_remembering(tested) if tested.held_forward else None,
        loss=_change_of_loss(tested),
    )


def _change_of_loss(tested: RecipeUnderTest) -> float | None:
    """Return how much the loss changes from call to call, if it does."""
    if (held := tested.held_forward) is None:
        return None
    first, *others = (float(tested.loss(held.outputs, held.block.targets)) for _ in range(3))
    change = max(relative(first, other) for other in others)
    return change if change > tested.rounding else None


def _remembering(tested: RecipeUnderTest) -> ModuleDifference | None:
    """Return the first module whose output changes though weights, buffers and inputs do not."""
    block = tested.batch()
    model = held_model(tested, block)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    twice, restore = (block.inputs, block.inputs), partial(model.load_state_dict, state)
    return first_difference(tested, model, *twice, restore=restore)


def remembers(evidence: Evidence) -> ModuleDifference | None:
    """Return the first module that remembers something, if one does."""
    found = evidence.found(NAME, OutsideState)
    return found.remembers if found else None


def change_of_loss(evidence: Evidence) -> float | None:
    """Return how much the loss of equal outputs changes when it is called again, if it does."""
    found = evidence.found(NAME, OutsideState)
    return found.loss if found else None


def _explain(evidence: Evidence) -> Cause | None:
    found, change = remembers(evidence), change_of_loss(evidence)
    if found is None and change is not None:
        return Cause(
            IN_LOSS,
            f"The loss gives something else ({change:.0e}) when it is called again with equal "
            "outputs and targets: it keeps a number from call to call. No checkpoint holds that, "
            "each rank has one, and evaluations change it too.",
            "Compute the loss from outputs and targets alone. What has to change over the steps "
            "may be a buffer of the model, which returns it beside its outputs.",
        )
    if found is None:
        return None
    return Cause(
        CAUSE,
        f"{found.place} gives something else ({found.difference:.0e}) in a second forward with "
        "equal weights, buffers and inputs: it keeps a number or a generator that no checkpoint "
        "holds.",
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
    # Virtual ranks seed Python's and NumPy's generators, too.
    if found and not found.remembers and found.generators and not evidence.bits:
        cause = Cause(
            CAUSE,
            f"The model or the loss draws from {' and '.join(found.generators)}, whose state "
            "differs on every rank and after a stop; with it held still the difference is gone.",
            "Draw from torch, which is seeded in every step, or from what all ranks have alike, "
            "such as the weights or the inputs.",
        )
        return answer(evidence, "state", "draws as they are", cause)
    difference = found.remembers.difference if found and found.remembers else None
    difference = change_of_loss(evidence) if difference is None else difference
    compared = "a second forward" if evidence.bits else "a second forward gives the same"
    return cause_check(evidence, compared, _explain(evidence), difference)


ROW = TableRow(name=NAME, look=_look, training=left_free("state"), answer=_answer, explain=_explain)
