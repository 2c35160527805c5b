"""What `--compile on` compiles: whole optimizer steps, or only the model.

A small model spends its time between the operations, not in them. Compiling forward, loss,
backward, clipping and update together, for several steps at once, removes what lies between.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from samestep.base.errors import UserError
from samestep.base.phases import Phases
from samestep.base.run.records import Record
from samestep.base.settings import Settings
from samestep.base.trees import map_leaves, narrow, tree_leaves
from samestep.core.data.order import Block
from samestep.core.learner.apply import call
from samestep.core.learner.device import is_small
from samestep.core.plan import Plan
from samestep.core.training.evaluation import evaluation_batch
from samestep.core.training.step import CallModel, EagerStep, Objective, plain_call
from samestep.core.training.step_graph import StepGraph, why_only_eager
from samestep.core.training.work import Learner, Step, StepResult, Work
from samestep.launch.ranks import watched
from samestep.launch.ranks.world import World

# Measured on small models: 4 steps a graph give most of the gain, 16 no more than 8, and the
# time to compile grows with their number.
_STEPS_PER_GRAPH = 8


def only_of_sizes(sizes: frozenset[int], call_model: CallModel) -> CallModel:
    """Wrap the call of a compiled model: micro-steps of other sizes than these run uncompiled."""

    def call_part(part: Block) -> Any:
        if part.rows in sizes:
            return call_model(part)
        with torch.compiler.set_stance("force_eager"):
            return call_model(part)

    return call_part


class ModelStep:
    """Steps of any kind with the model's forward and backward compiled.

    Micro-steps of a size that no full batch has run uncompiled rather than compile another graph.
    """

    steps_per_call = 1

    def __init__(self, step: Step, settings: Settings, phases: Phases, why: str) -> None:
        """Take steps whose wrapped model is compiled; `why` says why whole steps are not."""
        self._step = step
        self._phases = phases
        self._to_compile = True
        added = "all-reduce" if settings.virtual_ranks is None else "tree of sums"
        subject = "the model's" if settings.strategy == "ddp" else "each block's"
        self.what = f"{subject} forward and backward; optimizer and {added} are not compiled"
        if why:
            self.what += f"; whole steps are not, since {why}"

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take one step; the first is timed, since it compiles."""
        if not self._to_compile:
            return self._step(block, step, lrs, want_norm=want_norm)
        self._to_compile = False
        before = time.perf_counter()
        with self._phases.left_out(), explained(), watched.within(watched.COMPILING):
            result = self._step(block, step, lrs, want_norm=want_norm)
        return replace(result, notes=(_note(self.what, 0, time.perf_counter() - before),))


class WholeStep(EagerStep):
    """Steps compiled as a whole; incomplete batches and rests of a group run eagerly."""

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        world: World,
        plan: Plan,
        steps_per_block: int,
        phases: Phases,
    ) -> None:
        super().__init__(learner, settings, world, plan.micro_batch_size, phases)
        self._plan = plan
        self._compiled_model: ModelStep | None = None
        self._was_whole, phases.whole = phases.whole, True
        if is_small(learner.model):
            self.steps_per_call = _steps_per_graph(settings, plan, steps_per_block)
        self._graph: StepGraph | None = None
        self._next = -1
        """The step after those of the last graph."""

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the steps of a block: as many as a graph holds, or one."""
        if self._compiled_model is not None:
            results = [
                self._compiled_model(
                    single, step + number, lrs[number : number + 1], want_norm=want_norm
                )
                for number, single in enumerate(block.singles())
            ]
            norms = [norm for result in results for norm in result.grad_norms or ()]
            return StepResult(
                [loss for result in results for loss in result.losses],
                norms or None,
                seen=[outputs for result in results for outputs in result.seen],
                notes=tuple(note for result in results for note in result.notes),
            )
        is_full_batch = block.rows == self._plan.global_batch_size
        if block.num_steps != self.steps_per_call or not is_full_batch:
            return super().__call__(block, step, lrs, want_norm=want_norm)
        if self._graph is None and (why := self._why_not(block, step)):
            # From now on compile only the model.
            compiled = cast("nn.Module", torch.compile(self._learner.model, dynamic=False))
            self._compiled_model = self._with(compiled, why)
            self._phases.whole = self._was_whole
            return self(block, step, lrs, want_norm=want_norm)
        self._objective.seeds.begin(step)
        shape = (block.num_steps, block.rows)
        inputs, targets = _fold(block.inputs, shape), _fold(block.targets, shape)
        if self._graph is not None:
            try:
                unchanged = self._goes_on(block, step)
                result = self._graph.run(inputs, targets, lrs, step, unchanged=unchanged)
            except Exception as error:
                self._objective.explain(error, inputs, targets)
            self._next = step + block.num_steps
            self._phases.lap("step")
            return result
        before = time.perf_counter()
        self._graph = StepGraph(
            self._learner, self._settings, self._world.device, self._batch_size, step
        )
        with self._phases.left_out(), explained(), watched.within(watched.COMPILING):
            result = self._graph.run(inputs, targets, lrs, step)
        what = f"{block.num_steps} steps: forward, loss, backward, clipping, optimizer in one graph"
        what += self._graph.device_phrase()
        note = _note(what, block.num_steps, time.perf_counter() - before)
        return replace(result, notes=(note,))

    def _with(self, compiled: nn.Module, why: str) -> ModelStep:
        """Return a step with a compiled model, as whole steps cannot be compiled."""
        settings, world = self._settings, self._world
        learner = replace(self._learner, wrapped=compiled)
        call_model = only_of_sizes(self._plan.full_micro_steps(), plain_call(learner))
        objective = Objective(learner, settings, world, call_model=call_model)
        step = EagerStep(learner, settings, world, self._batch_size, self._phases, objective)
        return ModelStep(step, settings, self._phases, why)

    def _goes_on(self, block: Block, step: int) -> bool:
        """Whether these steps follow the last graph's, with nothing in between."""
        every = self._settings.eval_every_steps
        evaluated = block.first_step == 0 or (every and step % every == 0)
        return self._learner.alone and step == self._next and not evaluated

    def _why_not(self, block: Block, step: int) -> str:
        """Try a step; return why whole steps cannot be compiled, or ''."""
        inputs, targets = (narrow(t, 0, self._batch_size) for t in (block.inputs, block.targets))
        self._objective.seeds.begin(step)
        try:
            why = why_only_eager(self._learner, inputs, targets, self._settings.precision)
        except Exception as error:
            self._objective.explain(error, inputs, targets)
        self._objective.agreed = True
        return why


def _steps_per_graph(settings: Settings, plan: Plan, steps_per_block: int) -> int:
    """Return the number of steps per graph: a power of two, as in a block.

    A group longer than the stretch between two evaluations or checkpoints would never be full.
    """
    full_steps = plan.num_samples // plan.global_batch_size
    dues = (settings.eval_every_steps, settings.checkpoint_every_steps)
    limits = (full_steps, plan.total_steps, *(due for due in dues if due))
    return 1 << (max(1, min(_STEPS_PER_GRAPH, steps_per_block, *limits)).bit_length() - 1)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn the compiler's own failures into a `UserError`; errors of the model pass."""
    try:
        yield
    except Exception as error:
        origin = type(error).__module__
        if not origin.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"--compile on: this model or loss cannot be compiled ({type(error).__name__}: "
            f"{reason.strip()}). Use --compile off, or remove code that depends on tensor values."
        ) from error


def _note(what: str, steps: int, seconds: float) -> Record:
    return {"event": "compile", "what": what, "steps_per_graph": steps, "seconds": seconds}


def _fold(tree: Any, shape: tuple[int, ...]) -> Any:
    return map_leaves(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), tree)


# An estimate, not a measurement: compiling takes some ten seconds, and a batch of a few
# milliseconds then takes perhaps a third less.
_LEAST_BATCHES = 10_000


class FullBatches:
    """A model compiled for one batch size; the shorter last batch runs uncompiled."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        self._model, self._batch_size = model, batch_size
        self._compiled = cast("nn.Module", torch.compile(model, dynamic=False))

    def __call__(self, inputs: Any) -> Any:
        """Return the model's outputs."""
        if len(tree_leaves(inputs)[0]) != self._batch_size:
            return call(self._model, inputs)
        with explained():
            return call(self._compiled, inputs, self._model)


def with_forward(work: Work) -> Work:
    """Return the work with a compiled forward for its evaluations, where that pays."""
    if work.validation is None or work.learner.own or work.learner.sharded:
        return work
    model, num_samples = work.learner.model, work.validation.num_samples
    forward = compiled_forward(model, work.settings, work.world, work.plan, num_samples)
    return replace(work, forward=forward)


def compiled_forward(
    model: nn.Module, settings: Settings, world: World, plan: Plan, num_samples: int
) -> FullBatches | None:
    """Return a compiled forward for evaluations, or None if compiling does not pay.

    The plan decides, not the clock, so that a run repeats itself. On the CPU a forward gains
    little, and compiling takes longest.
    """
    if settings.compile == "off" or world.device.type != "cuda":
        return None
    batch_size = evaluation_batch(settings, plan.micro_batch_size)
    every = settings.eval_every_epochs * plan.steps_per_epoch
    every = min(every, settings.eval_every_steps or every)
    batches = num_samples // world.num_parts // batch_size
    if plan.total_steps // every * batches < _LEAST_BATCHES:
        return None
    return FullBatches(model, batch_size)
