"""What takes the steps of a training: the plain step, and around it what recipe and settings ask.

Only this file knows all kinds of steps. Each is imported where a training needs it.
"""

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

from torch import nn

from samestep.base.errors import UserError
from samestep.base.phases import Phases
from samestep.base.settings import Settings
from samestep.core.data.keyed_random import RankSeeds
from samestep.core.data.order import Block
from samestep.core.learner.prepare import share_buffers
from samestep.core.plan import Plan
from samestep.core.training.step import CallModel, EagerStep, Objective, plain_call
from samestep.core.training.work import Learner, Step, StepResult
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World

Compiles = Literal["nothing", "model", "step"]
Around = Callable[[Block, int], AbstractContextManager[Any]]
"""(block, step) → the context in which the step is taken."""


def what_compiles(
    settings: Settings, world: World, model: nn.Module, *, own: Sequence[str]
) -> Compiles:
    """Choose between whole steps (in one process) and the model for `--compile`."""
    if settings.compile == "off":
        return "nothing"
    if world.device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "--compile on needs a C++ compiler, and neither g++ nor clang++ is on the PATH. "
            "Install one (Debian: apt install g++), or use --compile off."
        )
    # Virtual ranks add up gradients between backward and update.
    if settings.virtual_ranks is not None:
        return "model"
    return "model" if _why_not_whole_steps(settings, world, model, own) else "step"


def _why_not_whole_steps(
    settings: Settings, world: World, model: nn.Module, own: Sequence[str]
) -> str:
    """Return why whole steps cannot be compiled, as far as it shows without a batch, or ''."""
    mixed = settings.param_dtype == "bf16" or len({p.dtype for p in model.parameters()}) > 1
    reasons = {
        "the data is a stream": "stream" in own,
        f"the recipe has its own {', '.join(own)}": bool(own),
        "--ema reads the weights after each step": settings.ema is not None,
        "ranks reduce gradients between backward and update": world.connected,
        "the scaler of fp16 decides on the host whether to update": settings.precision == "fp16",
        # The graph's rates are of the weights' type.
        "not all weights are in the type of the learning rate": mixed,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def make_step(
    compiles: Compiles,
    learner: Learner,
    settings: Settings,
    world: World,
    plan: Plan,
    steps_per_block: int,
    phases: Phases,
) -> Step:
    """Return the step: eager, with a compiled model, or whole steps compiled."""
    if compiles == "nothing":
        return eager_step(learner, settings, world, plan.micro_batch_size, phases)
    from samestep.core.training import compiled  # noqa: PLC0415

    if compiles == "step":
        return compiled.WholeStep(learner, settings, world, plan, steps_per_block, phases)
    around_model = partial(compiled.only_of_sizes, plan.full_micro_steps())
    step = eager_step(learner, settings, world, plan.micro_batch_size, phases, around_model)
    why = ""
    if settings.virtual_ranks is None:
        why = _why_not_whole_steps(settings, world, learner.model, learner.own)
    return compiled.ModelStep(step, settings, phases, why)


def eager_step(
    learner: Learner,
    settings: Settings,
    world: World,
    batch_size: int,
    phases: Phases | None = None,
    around_model: Callable[[CallModel], CallModel] | None = None,
) -> Step:
    """Return an eager step in micro-steps of at most `batch_size` samples.

    `around_model` returns what calls the model, given what else would.
    """
    kind: type[EagerStep] = EagerStep
    seeds = RankSeeds(settings.seed, world)
    if world.virtual_ranks:
        from samestep.core.training import virtual_step  # noqa: PLC0415

        kind, seeds = virtual_step.VirtualStep, virtual_step.PartSeeds(settings.seed, world)
    elif world.elastic:
        from samestep.core.training.elastic_step import ElasticStep  # noqa: PLC0415

        kind = ElasticStep
    carried, model = learner.carried, learner.model
    call_model = (
        partial(carried.call, learner.wrapped) if carried is not None else plain_call(learner)
    )
    call_model = around_model(call_model) if around_model else call_model
    made_of = (learner, settings, world, seeds, call_model)
    if learner.over_batch:
        from samestep.core.training.whole_batch import WholeBatchLoss  # noqa: PLC0415

        objective: Objective = WholeBatchLoss(*made_of, batch_size=batch_size)
    elif learner.terms is not None:
        from samestep.core.training.loss_terms import TermMean  # noqa: PLC0415

        objective = TermMean(*made_of)
    else:
        objective = Objective(*made_of)
    step: Step = kind(learner, settings, world, batch_size, phases, objective)
    if carried is not None:
        step = StepWithin(step, carried.around_step)
    if any_sharded(model):
        step = StepWithin(step, lambda *_: _with_buffers_of_rank_0(model, world))
    if world.elastic and any(True for _ in model.buffers()):
        from samestep.core.training.elastic_step import unchanged_if_failed  # noqa: PLC0415

        step = StepWithin(step, lambda *_: unchanged_if_failed(model))
    return step


class StepWithin:
    """Steps that are taken within a context: state is carried on, or taken back if one fails."""

    steps_per_call = 1

    def __init__(self, step: Step, around: Around) -> None:
        self._step, self._around = step, around

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the one step of this block."""
        with self._around(block, step):
            return self._step(block, step, lrs, want_norm=want_norm)


@contextmanager
def _with_buffers_of_rank_0(model: nn.Module, world: World) -> Iterator[None]:
    share_buffers(model, world)  # DDP does it by itself
    yield


class RenewableStep:
    """Steps that are built anew where other parameters are trained from now on.

    DDP, a compiled graph and the update know only what was trained when they were made.
    """

    def __init__(self, first: Step, make: Callable[[], Step]) -> None:
        self._step, self._make = first, make
        self.steps_per_call = first.steps_per_call

    def renew(self) -> None:
        """Build them anew, once the old ones are gone: so are the hooks of their DDP."""
        del self._step
        gc.collect()
        self._step = self._make()
        self.steps_per_call = self._step.steps_per_call

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the steps of a block."""
        return self._step(block, step, lrs, want_norm=want_norm)
