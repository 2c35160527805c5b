"""What a forward remembers, draws or asks for that no checkpoint holds, and which module does."""

import contextlib
import copy
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep.base.errors import is_users, listed
from samestep.base.trees import leaves_of, map_leaves, tree_leaves
from samestep.core.data.order import Block
from samestep.core.learner import side_effects
from samestep.prove.verification import causes
from samestep.prove.verification.causes import Cause
from samestep.prove.verification.evidence import (
    Check,
    Evidence,
    TableRow,
    cause_check,
    left_free_check,
)
from samestep.prove.verification.recipe_under_test import RecipeUnderTest, draws_in_words
from samestep.prove.verification.short_trainings import left_free
from samestep.prove.verification.trace import largest_apart, relative


class ModuleDifference(NamedTuple):
    """Where two forward passes differ first."""

    module: str
    difference: float  # relative to the largest output
    before: str = ""
    """The first module within it whose inputs differ: the difference is made before that one."""

    @property
    def place(self) -> str:
        """The module in words."""
        return f"{self.module}, before it calls {self.before}," if self.before else self.module


class ModuleCall(NamedTuple):
    """The inputs and outputs of a module in a forward pass."""

    name: str  # empty for the model itself
    inputs: list[Tensor]
    outputs: list[Tensor]


def first_difference(
    tested: RecipeUnderTest,
    model: nn.Module,
    *inputs: Any,
    rows: int | None = None,
    packed: bool = False,
    restore: Callable[[], object] = lambda: None,
) -> ModuleDifference | None:
    """Return the first module with another output, if the model's own output differs at all.

    The first few rows of two inputs are compared, or all; of `packed` samples, which lie one behind
    the other along some axis, the last ones, which are all that the second input has. `restore` is
    called before each pass.
    """
    passes = []
    with contextlib.suppress(Exception):  # modules that do not run each time, or fail on a size
        for batch in inputs:
            restore()
            passes.append(module_calls(tested, model, batch, rows))
        first, second = passes
        if packed:
            first = [_cut(*pair) for pair in zip(first, second, strict=True)]
            for calls in (first, second):  # without single numbers, as a model's own mean loss is
                calls[:] = [c._replace(outputs=[x for x in c.outputs if x.dim()]) for c in calls]
        return first_at_fault(first, second, tested.rounding, type(model).__name__)
    return None


def first_at_fault(
    calls: Sequence[ModuleCall], others: Sequence[ModuleCall], rounding: float, model: str
) -> ModuleDifference | None:
    """Return the first module that made another output of equal inputs; None if the last did not.

    A module whose inputs differ already only passes on what a module around it has made.
    """
    pairs = list(zip(calls, others, strict=True))
    if not pairs or _apart(pairs[-1][0].outputs, pairs[-1][1].outputs) <= rounding:
        return None
    other_inputs = ""
    for call, other in pairs:
        if _apart(call.inputs, other.inputs) > rounding:
            other_inputs = other_inputs or call.name
        elif (difference := _apart(call.outputs, other.outputs)) > rounding:
            is_within = not call.name or other_inputs.startswith(f"{call.name}.")
            before = other_inputs if is_within else ""
            return ModuleDifference(call.name or model, difference, before)
    return None


def module_calls(
    tested: RecipeUnderTest, model: nn.Module, inputs: Any, rows: int | None = None
) -> list[ModuleCall]:
    """Return all modules' calls as they return, of tensors only the first `rows` if given."""
    calls: list[ModuleCall] = []
    inputs_of_running: list[list[Tensor]] = []

    def begin(_module: nn.Module, *arguments: Any) -> None:
        leaves = [leaf[:rows] if leaf.dim() else leaf for leaf in _tensors(arguments)]
        inputs_of_running.append(leaves)

    def end(name: str, output: Any) -> None:
        leaves = _tensors(output)
        if rows is not None:
            leaves = [leaf[:rows] for leaf in leaves if leaf.dim() and len(leaf) >= rows]
        calls.append(ModuleCall(name, inputs_of_running.pop(), leaves))

    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(begin, with_kwargs=True))
            after = module.register_forward_hook(lambda _m, _i, out, name=name: end(name, out))
            hooks.enter_context(after)
        tested.forward(model, inputs)
    return calls


def _cut(call: ModuleCall, part: ModuleCall) -> ModuleCall:
    """Return a call with only the last entries of each tensor, as many as that of a part has."""

    def last(whole: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        pairs = zip(whole, parts, strict=True)
        return [x[tuple(slice(-n or None, None) for n in part.shape)] for x, part in pairs]

    return ModuleCall(call.name, last(call.inputs, part.inputs), last(call.outputs, part.outputs))


def _tensors(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf.detach().clone() for leaf in leaves]


def _apart(tensors: list[Tensor], others: list[Tensor]) -> float:
    if len(tensors) != len(others):  # one module is given a state, say
        return math.inf
    pairs = [(a, b) for a, b in zip(tensors, others, strict=True) if a.shape == b.shape]
    return max((largest_apart(a, b) for a, b in pairs), default=0.0)


_CLOCK_MODULES = ("time.", "datetime.")
_CLOCKS = (time.time, time.time_ns, time.perf_counter, time.monotonic, time.process_time, os.getpid)
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
_RANK_CALLS = ("get_rank", "get_world_size")
_ENVIRONMENT = type(os.environ).__getitem__.__code__


@dataclass(frozen=True, kw_only=True)
class OutsideState:
    """What a step draws from, asks for or remembers that is in no checkpoint; most in words."""

    generators: list[str] = field(default_factory=list)
    """Of Python and NumPy, those that forward or loss draws from."""
    own_generators: list[str] = field(default_factory=list)
    """Lines that draw from a `torch.Generator` of their own, with state kept across steps."""
    remembers: ModuleDifference | None = None
    """The first module whose output differs in a second forward with the same inputs."""
    loss: float | None = None
    """How much the loss of equal outputs changes when it is called again, if it does."""
    kept: list[str] = field(default_factory=list)
    """Plain attributes that other samples in between leave changed, of the model or the loss."""
    counted: list[str] = field(default_factory=list)
    """Such attributes that checkpoints hold, as a module's extra state."""
    optimizer: list[str] = field(default_factory=list)
    """What each step of the optimizer changes outside its `state`."""
    draws: list[str] = field(default_factory=list)  # what the optimizer draws from, with the line
    learned: list[str] = field(default_factory=list)
    """Parameters that get a gradient and are not the model's."""
    asks: dict[str, str] = field(default_factory=dict)
    """What forward or loss asks its process for, a rank or the time → the line."""


def _look_for_state(tested: RecipeUnderTest) -> OutsideState:
    state = OutsideState(
        generators=sorted(tested.free_step.seen.generators),
        own_generators=tested.free_step.own_generators,
        remembers=_remembering(tested),
        loss=_change_of_loss(tested),
    )
    with contextlib.suppress(Exception):  # the short trainings say how it fails
        return replace(state, **find_hidden(tested))
    return state


def find_hidden(tested: RecipeUnderTest) -> dict[str, Any]:
    """Take a few steps of a recipe, and return what the forward and the optimizer hide."""
    return {**_of_forward(tested), **_of_optimizer(tested)}


def restoring(model: nn.Module, *, checkpointed: bool) -> Callable[[], None]:
    """Return a function that restores weights, buffers of any size, extra state of any kind."""
    tensors: list[tuple[dict[str, Any], str, Tensor | None]] = []
    extra: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        left_out = module._non_persistent_buffers_set if checkpointed else ()  # noqa: SLF001
        for held in (module._parameters, module._buffers):  # noqa: SLF001
            copies = {k: None if t is None else t.detach().clone() for k, t in held.items()}
            tensors += [(held, name, copies[name]) for name in copies if name not in left_out]
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append((module, copy.deepcopy(module.get_extra_state())))

    @torch.no_grad()
    def restore() -> None:
        for held, name, value in tensors:
            now = held.get(name)
            if now is None or value is None or now.shape != value.shape:
                held[name] = None if value is None else value.clone()
            else:
                now.copy_(value)
        for module, state in extra:
            module.set_extra_state(copy.deepcopy(state))

    return restore


def other_batch(tested: RecipeUnderTest) -> Block:
    """Return samples other than the first step's: the next ones, or some of them again."""
    return tested.batch(1) if tested.size.full > 1 else tested.part(tested.batch(), 0, 1)


def _of_forward(tested: RecipeUnderTest) -> dict[str, Any]:
    block, other = tested.batch(), other_batch(tested)
    model, loss = tested.held_model(), inspect.unwrap(tested.placed_loss)

    def forward(block: Block) -> Tensor:
        return tested.loss(tested.forward(model, block.inputs), block.targets)

    def prints() -> dict[str, str]:
        return {**side_effects.model_prints(model, loss), **side_effects.closure_prints(loss)}

    value, asks = _result_and_reads(lambda: forward(block))
    before, restore = prints(), restoring(model, checkpointed=True)
    forward(other)
    forward(block)
    # samestep's own wrapper around the model's forward is not the user's attribute.
    changed = [
        name for name in side_effects.differing(before, prints()) if not name.endswith(" forward")
    ]
    restore()
    leftover = [name for name in side_effects.differing(before, prints()) if name in changed]
    own = {id(p) for p in model.parameters()}
    learned = [_described(leaf, model, loss) for leaf in leaves_of(value) if id(leaf) not in own]
    counted = [name for name in changed if name not in leftover]
    return {"kept": leftover, "counted": counted, "asks": asks, "learned": learned}


def _of_optimizer(tested: RecipeUnderTest) -> dict[str, list[str]]:
    """Return an own optimizer's attributes outside its state, and the generators it draws from."""
    if tested.recipe.optimizer is None:
        return {}
    draws = side_effects.RandomDraws()
    prints = []
    for optimizer in tested.steps_of_optimizer():
        side_effects.watched(optimizer.step, draws)()
        prints.append(side_effects.optimizer_prints(optimizer))
    return {"optimizer": side_effects.differing(*prints), "draws": draws_in_words(draws)}


def _result_and_reads(function: Callable[[], Tensor]) -> tuple[Tensor, dict[str, str]]:
    """Return a function's result, and the clocks, ranks and settings that the user's lines read."""
    asked: dict[str, str] = {}

    def note(frame: FrameType, event: str, called: Any) -> None:
        call = ""
        code = frame.f_code
        if event == "c_call" and is_users(code.co_filename):
            name = getattr(called, "__qualname__", "")
            if called in _CLOCKS or name in ("datetime.now", "datetime.utcnow"):
                call = f"{called.__module__ or 'datetime'}.{called.__name__}()"
        elif event == "call" and code.co_name in _RANK_CALLS:
            call = f"{code.co_name}()"
        elif event == "call" and code is _ENVIRONMENT and frame.f_locals.get("key") in _OF_RANKS:
            call = f"os.environ[{frame.f_locals['key']!r}]"
        if call and (line := side_effects.users_line(frame)):
            asked.setdefault(call, line)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        return function(), asked
    finally:
        sys.setprofile(before)


def _described(leaf: Tensor, model: nn.Module, loss: object) -> str:
    """Return a parameter by the name under which the model or the loss has it, if that is found."""
    places = (
        ("the model's", vars(model)),
        ("the loss's", getattr(loss, "__dict__", {})),
        ("the global", getattr(loss, "__globals__", {})),
        ("the global", getattr(type(model).forward, "__globals__", {})),
    )
    for owner, names in places:
        for name, held in names.items():
            if any(each is leaf for each in (held if isinstance(held, list | tuple) else (held,))):
                return f"{owner} {name}"
    return f"a parameter of shape {tuple(leaf.shape)}"


def _change_of_loss(tested: RecipeUnderTest) -> float | None:
    """Return the loss's relative change from call to call, if it changes."""
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
    block, other, model = tested.batch(), other_batch(tested), tested.held_model()
    twice, restore = (block.inputs, block.inputs), restoring(model, checkpointed=True)
    between = iter((False, True))  # other samples come before the second pass

    def after_others() -> None:
        if next(between):
            with torch.no_grad():
                tested.forward(model, other.inputs)
        restore()

    difference = first_difference(tested, model, *twice, restore=restore)
    return difference or first_difference(tested, model, *twice, restore=after_others)


def state_of(evidence: Evidence) -> OutsideState:
    """Return the result of the experiment, an empty one where it failed."""
    return evidence.result(STATE.name, OutsideState) or OutsideState()


def _suspect(evidence: Evidence) -> Cause | None:
    """Return a possible cause of a difference that no experiment explains."""
    state = state_of(evidence)
    suspects = (
        *((causes.DRAWS, state.draws), (causes.OPTIMIZER, state.optimizer)),
        *((causes.ATTRIBUTE, state.kept), (causes.LEARNED, state.learned)),
    )
    return next((cause.of(names=listed(names)) for cause, names in suspects if names), None)


def _explain(evidence: Evidence) -> Cause | None:
    state = state_of(evidence)
    module, asks = state.remembers, state.asks.items()
    if module is None and state.loss is None:
        return None
    if clocks := [f"{call} in {line}" for call, line in asks if call.startswith(_CLOCK_MODULES)]:
        return causes.CLOCK.of(lines=listed(clocks))
    changes = f" It changes {listed(state.kept)}." if state.kept else ""
    if module is None:
        return causes.IN_LOSS.of(change=state.loss, kept=changes)
    return causes.OUTSIDE_MODULE.of(module=module.place, difference=module.difference, kept=changes)


def _state(evidence: Evidence) -> Check:
    state = state_of(evidence)
    module = state.remembers
    if module is None and state.own_generators:
        lines = ", ".join(filter(None, state.own_generators))
        cause = causes.OWN_GENERATOR.of(lines=f" ({lines})" if lines else "")
        return cause_check(evidence, "no generator of its own", cause)
    # Virtual ranks seed Python's and NumPy's generators, too.
    if module is None and state.generators and not evidence.bits:
        cause = causes.OTHER_GENERATORS.of(names=" and ".join(state.generators))
        return left_free_check(evidence, "state", "draws as they are", cause)
    compared = "a second forward" if evidence.bits else "a second forward gives the same"
    difference = module.difference if module else state.loss
    check = cause_check(evidence, compared, _explain(evidence), difference)
    suspect = _suspect(evidence) if check.status == "same" else None
    # An optimizer may draw from the generators that samestep seeds.
    if suspect is None or suspect.name == causes.DRAWS.name:
        return check
    return replace(check, status="note", cause=suspect)


STATE = TableRow(
    name="state",
    experiment=_look_for_state,
    training=left_free("state"),
    answer=_state,
    explain=_explain,
    suspect=_suspect,
)
