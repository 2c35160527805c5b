"""State outside the module: what a forward remembers that no checkpoint holds."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from samestep.data.trees import map_leaves
from samestep.errors import listed
from samestep.verification.difference import relative
from samestep.verification.evidence import Cause, Check, Evidence, TableRow, cause_check
from samestep.verification.hidden import Hidden, find_hidden, other_batch
from samestep.verification.module_outputs import ModuleDifference, first_difference
from samestep.verification.recipe_under_test import RecipeUnderTest, held_model
from samestep.verification.rows.left_free import answer, left_free

NAME = "state"
CAUSE = "state outside the module"
IN_LOSS = "state in the loss"
CLOCK = "forward or loss that reads the clock"
OPTIMIZER = "state outside the optimizer's own"
DRAWS = "the optimizer draws"
LEARNED = "a learned parameter outside the model"
_REGISTER = (
    "Keep it with register_buffer(), so that checkpoints hold it, and change it once per step."
)
_CLOCKS = ("time.", "datetime.")


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
    hidden: Hidden | None = None


def _look(tested: RecipeUnderTest) -> OutsideState:
    step = tested.free_step
    return OutsideState(
        generators=sorted(step.seen.generators),
        own_generators=step.own_generators,
        remembers=_remembering(tested),
        loss=_change_of_loss(tested),
        hidden=find_hidden(tested),
    )


def _change_of_loss(tested: RecipeUnderTest) -> float | None:
    """Return how much the loss changes from call to call, if it does."""
    if (held := tested.held_forward) is None:
        return None

    def loss_of(factor: float) -> float:
        outputs = map_leaves(lambda o: o * factor if o.is_floating_point() else o, held.outputs)
        return float(tested.loss(outputs, held.block.targets))

    first, second, _, *others = map(loss_of, (1, 1, 0.5, 1, 1))  # others between, as in a bank
    others.append(second)
    change = max(relative(first, other) for other in others)
    return change if change > tested.rounding else None


def _remembering(tested: RecipeUnderTest) -> ModuleDifference | None:
    """Return the first module whose output changes though weights, buffers and inputs do not."""
    block, other = tested.batch(), other_batch(tested)
    model = held_model(tested, block)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    twice, restore = (block.inputs, block.inputs), partial(model.load_state_dict, state)
    if found := first_difference(tested, model, *twice, restore=restore):
        return found
    between: list[Any] = []

    def after_others() -> None:
        if between:  # the first pass is over
            with torch.no_grad():
                tested.forward(model, between.pop())
        else:
            between.append(other.inputs)
        restore()

    return first_difference(tested, model, *twice, restore=after_others)


def remembers(evidence: Evidence) -> ModuleDifference | None:
    """Return the first module that remembers something, if one does."""
    found = evidence.found(NAME, OutsideState)
    return found.remembers if found else None


def change_of_loss(evidence: Evidence) -> float | None:
    """Return how much the loss of equal outputs changes when it is called again, if it does."""
    found = evidence.found(NAME, OutsideState)
    return found.loss if found else None


def hidden_of(evidence: Evidence) -> Hidden:
    """Return what a step keeps, draws or asks for beside what checkpoints hold."""
    found = evidence.found(NAME, OutsideState)
    return (found and found.hidden) or Hidden()


def _suspect(evidence: Evidence) -> Cause | None:
    """Return what may be the cause of a difference that no experiment explains."""
    hidden = hidden_of(evidence)
    if hidden.draws:
        why = f"The optimizer's step draws from {listed(hidden.draws)}: each rank, and a resumed "
        advice = "Draw from torch's own generator in step(): samestep seeds it alike on all ranks."
        return Cause(DRAWS, f"{why}run, may draw other numbers.", advice)
    if hidden.optimizer:
        return Cause(
            OPTIMIZER,
            f"Each step changes {listed(hidden.optimizer)}, and no checkpoint holds it: a resumed "
            "run begins without it.",
            "Keep it in self.state[parameter], which checkpoints hold.",
        )
    if hidden.kept:
        return Cause(
            CAUSE,
            f"Forward or loss changes {listed(hidden.kept)}: a plain attribute, which no "
            "checkpoint holds and each rank has its own of.",
            _REGISTER,
        )
    if hidden.learned:
        return Cause(
            LEARNED,
            f"The loss depends on {listed(hidden.learned)}, which is not among the model's "
            "parameters: its gradient is not added up over ranks, and no checkpoint holds it.",
            "Make it an nn.Parameter of the model, so that the optimizer gets it. The model may "
            "return it beside its outputs for the loss.",
        )
    return None


def _explain(evidence: Evidence) -> Cause | None:
    found, change = remembers(evidence), change_of_loss(evidence)
    hidden = hidden_of(evidence)
    clocks = [f"{what} in {line}" for what, line in hidden.asks.items() if what.startswith(_CLOCKS)]
    if clocks and (found or change):
        return Cause(
            CLOCK,
            f"Forward or loss reads {listed(clocks)}, and gives something else each time.",
            "Compute from inputs, weights and buffers alone.",
        )
    named = f" It changes {listed(hidden.kept)}." if hidden.kept else ""
    if found is None and change is not None:
        return Cause(
            IN_LOSS,
            f"The loss gives something else ({change:.0e}) when it is called again with equal "
            "outputs and targets: it keeps a number from call to call. No checkpoint holds that, "
            f"each rank has one, and evaluations change it too.{named}",
            "Compute the loss from outputs and targets alone. What has to change over the steps "
            "may be a buffer of the model, which returns it beside its outputs.",
        )
    if found is None:
        return None
    return Cause(
        CAUSE,
        f"{found.place} gives something else ({found.difference:.0e}) in a second forward with "
        "equal weights, buffers and inputs: it keeps a number or a generator that no checkpoint "
        f"holds.{named}",
        _REGISTER,
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
    check, suspect = cause_check(evidence, compared, _explain(evidence), difference), None
    if check.status == "same":
        suspect = _suspect(evidence)
    # What an optimizer draws from the generators that samestep seeds is no mistake.
    if suspect is None or suspect.name == DRAWS:
        return check
    return replace(check, status="note", cause=suspect)


ROW = TableRow(
    name=NAME,
    look=_look,
    training=left_free("state"),
    answer=_answer,
    explain=_explain,
    suspect=_suspect,
)
