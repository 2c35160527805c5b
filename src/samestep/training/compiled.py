"""Whole optimizer steps as one compiled graph, and the choice of what is compiled.

A small model spends its time between the operations, not in them. Compiling forward, loss,
backward, clipping and update together, for several steps at once, removes what lies between.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from samestep.data.blocks import Block
from samestep.data.trees import map_leaves, narrow, tree_leaves
from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.run.records import Record
from samestep.settings import Settings
from samestep.training.eager_only import why_only_eager
from samestep.training.phases import Phases
from samestep.training.plan import Plan
from samestep.training.precision import autocast
from samestep.training.step import EagerStep, StepResult, Trainee
from samestep.training.threads import is_small

# Measured on small models: 4 steps a graph give most of the gain, 16 no more than 8, and the
# time to compile grows with their number.
_STEPS_PER_GRAPH = 8


Compiles = Literal["nothing", "model", "step"]


def what_compiles(settings: Settings, world: World, model: nn.Module, *, plain: bool) -> Compiles:
    """Return what `--compile` can compile here: whole steps where one process does all of them.

    Ranks reduce gradients between backward and update, the scaler of fp16 decides on the host
    whether to update, and of the recipe only model and loss can be in the graph (`plain`): else
    it is the model alone.

    Raises:
        UserError: compiling was asked for where there is no C++ compiler.
    """
    if settings.compile == "off":
        return "nothing"
    if world.device.type == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
        raise UserError(
            "--compile on needs a C++ compiler, and neither g++ nor clang++ is on the PATH. "
            "Install one (Debian: apt install g++), or use --compile off."
        )
    one_type = len({p.dtype for p in model.parameters()}) == 1
    whole = not world.connected and settings.precision != "fp16" and one_type
    # The graph's rates are of the weights' type.
    whole = whole and plain and settings.ema is None and settings.param_dtype != "bf16"
    return "step" if whole else "model"


def make_step(
    compiles: Compiles,
    trainee: Trainee,
    settings: Settings,
    world: World,
    plan: Plan,
    steps_per_block: int,
    phases: Phases,
) -> EagerStep:
    """Return what takes the steps: eager, the model compiled, or whole steps compiled."""
    if compiles == "step":
        return WholeStep(trainee, settings, world, plan, steps_per_block, phases)
    kind = ModelStep if compiles == "model" else EagerStep
    return kind(trainee, settings, world, plan.batch_size, phases)


class ModelStep(EagerStep):
    """Steps of a model whose forward and backward are compiled; the rest is as it was."""

    _to_compile = True
    why = ""
    """Why whole steps are not compiled, where they could have been."""

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take one step; odd sizes run uncompiled rather than compile another graph."""
        if block.rows % self._batch_size:
            with torch.compiler.set_stance("force_eager"):
                return super().__call__(block, step, lrs, want_norm=want_norm)
        if not self._to_compile:
            return super().__call__(block, step, lrs, want_norm=want_norm)
        self._to_compile = False
        before = time.perf_counter()
        with self._phases.left_out(), explained():
            result = super().__call__(block, step, lrs, want_norm=want_norm)
        what = "the model's forward and backward; optimizer and all-reduce are not compiled"
        return replace(result, notes=(_note(what + self.why, 0, time.perf_counter() - before),))


class WholeStep(EagerStep):
    """Compile whole steps; an incomplete batch, and what is left of a group, run eagerly."""

    def __init__(
        self,
        trainee: Trainee,
        settings: Settings,
        world: World,
        plan: Plan,
        steps_per_block: int,
        phases: Phases,
    ) -> None:
        super().__init__(trainee, settings, world, plan.batch_size, phases)
        self._compiled_model: ModelStep | None = None
        self._was_whole, phases.whole = phases.whole, True
        if is_small(trainee.model):
            self.steps_per_call = _steps_per_graph(settings, plan, steps_per_block)
        self._accumulate = plan.accumulate
        self._graph: _Graph | None = None

    def __call__(self, block: Block, step: int, lrs: list[float], *, want_norm: bool) -> StepResult:
        """Take the steps of a block: as many as a graph holds, or one."""
        if self._compiled_model is not None:
            return _one_by_one(self._compiled_model, block, step, lrs, want_norm=want_norm)
        whole = block.rows == self._batch_size * self._accumulate
        if block.num_steps != self.steps_per_call or not whole:
            return super().__call__(block, step, lrs, want_norm=want_norm)
        if self._graph is None and (why := self._why_not(block, step)):
            self._compile_model(why)
            return self(block, step, lrs, want_norm=want_norm)
        self._seed(step)
        shape = (block.num_steps, self._accumulate, self._batch_size)
        inputs, targets = _fold(block.inputs, shape), _fold(block.targets, shape)
        if self._graph is not None:
            try:
                result = self._graph.run(inputs, targets, lrs)
            except Exception as error:
                self._tell(error, inputs, targets)
            self._phases.lap("step")
            return result
        before = time.perf_counter()
        self._graph = _Graph(self._trainee, self._settings, self._world.device)
        with self._phases.left_out(), explained():
            result = self._graph.run(inputs, targets, lrs)
        what = f"{block.num_steps} steps: forward, loss, backward, clipping, optimizer in one graph"
        note = _note(what, block.num_steps, time.perf_counter() - before)
        return replace(result, notes=(note,))

    def _why_not(self, block: Block, step: int) -> str:
        """Return why whole steps cannot be compiled, or nothing."""
        inputs, targets = (narrow(t, 0, self._batch_size) for t in (block.inputs, block.targets))
        self._seed(step)
        try:
            why = why_only_eager(self._trainee, inputs, targets, self._settings.precision)
        except Exception as error:
            self._tell(error, inputs, targets)
        self._agreed = True
        return why

    def _compile_model(self, why: str) -> None:
        """Let the model alone be compiled from now on."""
        compiled = cast("nn.Module", torch.compile(self._trainee.model, dynamic=False))
        self._compiled_model = ModelStep(
            replace(self._trainee, wrapped=compiled),
            self._settings,
            self._world,
            self._batch_size,
            self._phases,
        )
        self._compiled_model.why = f"; whole steps are not, since {why}"
        self._phases.whole = self._was_whole


def _one_by_one(
    take: EagerStep, block: Block, step: int, lrs: list[float], *, want_norm: bool
) -> StepResult:
    """Take the steps of a block one after the other."""
    results = [
        take(single, step + number, lrs[number : number + 1], want_norm=want_norm)
        for number, single in enumerate(block.singles())
    ]
    norms = [norm for result in results for norm in result.grad_norms or ()]
    return StepResult(
        [loss for result in results for loss in result.losses],
        norms or None,
        seen=[one for result in results for one in result.seen],
        notes=tuple(note for result in results for note in result.notes),
    )


def _steps_per_graph(settings: Settings, plan: Plan, steps_per_block: int) -> int:
    """Return how many steps there are in a row, at most, with nothing due between them.

    A larger group would never be full, and every step would run eagerly. A power of two, as the
    steps of a block are.
    """
    full_steps = plan.num_samples // plan.global_batch_size
    dues = (settings.eval_every_steps, settings.checkpoint_every_steps)
    limits = (full_steps, plan.total_steps, *(due for due in dues if due))
    return 1 << (max(1, min(_STEPS_PER_GRAPH, steps_per_block, *limits)).bit_length() - 1)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn what the compiler cannot do into a `UserError`; errors of the model itself pass."""
    try:
        yield
    except Exception as error:
        origin = type(error).__module__
        if not origin.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise UserError(
            f"--compile on: this model or loss cannot be compiled ({type(error).__name__}: "
            f"{reason.strip()}). Use --compile off, or take out what depends on values of tensors."
        ) from error


def _note(what: str, steps: int, seconds: float) -> Record:
    return {"event": "compile", "what": what, "steps_per_graph": steps, "seconds": seconds}


def _fold(tree: Any, shape: tuple[int, ...]) -> Any:
    if isinstance(tree, Tensor):
        return tree.reshape(*shape, *tree.shape[1:])
    return map_leaves(lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), tree)


class _Graph:
    """Steps as one compiled function of flat vectors.

    All weights are packed into one vector, and so is each kind of optimizer state, inside the
    graph: it then has few inputs to check, and an update is one loop. Model and optimizer stay
    the ordinary objects and are up to date after every call.
    """

    def __init__(self, trainee: Trainee, settings: Settings, device: torch.device) -> None:
        self._model, self._optimizer = trainee.model, trainee.optimizer
        self._loss, self._settings, self._device = trainee.loss, settings, device
        named = {n: p for n, p in trainee.model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        self._frozen = {
            n: p.detach() for n, p in trainee.model.named_parameters() if not p.requires_grad
        }
        self._shapes = [p.shape for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]
        group = trainee.optimizer.param_groups[0]
        adam = settings.optimizer != "sgd"
        self._betas: tuple[float, float] = group.get("betas", (0.0, 0.0))
        self._eps: float = group.get("eps", 0.0)
        self._keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",)
        if not adam and not settings.momentum:
            self._keys = ()
        self._update = self._adam if adam else self._sgd
        self._make_state()
        # The C++ wrapper spares Python's share of each kernel call; it serves CPUs alone.
        options: dict[str, Any] | None = {"cpp_wrapper": True} if device.type == "cpu" else None
        self._compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(
            self._steps, fullgraph=True, dynamic=False, options=options
        )

    def run(self, inputs: Any, targets: Any, lrs: list[float]) -> StepResult:
        """Take as many steps as there are learning rates.

        Args:
            inputs: (steps, accumulate, batch, …).
            targets: (steps, accumulate, batch, …).
            lrs: of each step.
        """
        states = [self._optimizer.state[p] for p in self._parameters]
        counts = [state["step"] for state in states if "step" in state]
        taken = float(counts[0]) if counts else 0.0
        owned = [[state[key] for state in states] for key in self._keys]
        weights = [p.detach() for p in self._parameters]
        buffers = dict(self._model.named_buffers())
        with torch.no_grad():
            losses, norms = self._compiled(
                weights, owned, self._rates(taken, lrs), buffers, inputs, targets
            )
            if counts:
                torch._foreach_add_(counts, len(lrs))
        return StepResult(losses.unbind(), norms)

    def _make_state(self) -> None:
        """Give the optimizer the state that its own first step would create: zeros."""
        for parameter in self._parameters:
            state = self._optimizer.state[parameter]
            if self._keys and self._keys[0] not in state:
                if "exp_avg" in self._keys:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
                state.update({key: torch.zeros_like(parameter) for key in self._keys})

    def _rates(self, taken: float, lrs: list[float]) -> Tensor:
        """Return what varies by step (steps, 3): lr / (1 - β₁ᵗ), √(1 - β₂ᵗ), lr.

        As a tensor, so that a schedule does not compile anew; from here, since the compiler
        would put the powers into the innermost loop.
        """
        first, second = self._betas
        rows = []
        for t, lr in enumerate(lrs, start=int(taken) + 1):
            rows.append([lr / (1 - first**t), (1 - second**t) ** 0.5, lr])
        dtype = self._parameters[0].dtype
        return torch.tensor(rows, dtype=torch.float64).to(self._device, dtype)

    def _steps(
        self,
        weights: list[Tensor],
        owned: list[list[Tensor]],
        rates: Tensor,
        live: dict[str, Tensor],
        inputs: Any,
        targets: Any,
    ) -> tuple[Tensor, Tensor]:
        """Take the steps: this is what gets compiled."""
        flat, state = _pack(weights), [_pack(tensors) for tensors in owned]
        buffers = live
        losses, norms = [], []
        for k in range(rates.shape[0]):
            gradient, loss, buffers = self._gradient(flat, buffers, inputs, targets, k)
            norm = torch.linalg.vector_norm(gradient)
            if self._settings.clip_norm is not None:
                # As torch.nn.utils.clip_grad_norm_ does it.
                gradient = gradient * torch.clamp(self._settings.clip_norm / (norm + 1e-6), max=1.0)
            flat, state = self._update(flat, gradient, state, rates[k])
            losses.append(loss)
            norms.append(norm)
        for packed, tensors in zip([flat, *state], [weights, *owned], strict=True):
            for tensor, piece in zip(tensors, torch.split(packed, self._sizes), strict=True):
                tensor.copy_(piece.view_as(tensor))
        for name, buffer in live.items():
            buffer.copy_(buffers[name])
        return torch.stack(losses), torch.stack(norms)

    def _gradient(
        self, flat: Tensor, buffers: dict[str, Tensor], inputs: Any, targets: Any, k: int
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return gradient, loss and buffers after the micro-steps of step k."""
        leaf = tree_leaves(inputs)[0]
        accumulate = leaf.shape[1]
        gradient, loss = torch.zeros_like(flat), torch.zeros((), device=flat.device)
        for m in range(accumulate):
            part, (value, buffers) = grad_and_value(self._forward, has_aux=True)(
                flat, buffers, _row(inputs, k, m), _row(targets, k, m), 1.0 / accumulate
            )
            gradient, loss = gradient + part, loss + value
        return gradient, loss, buffers

    def _forward(
        self, flat: Tensor, buffers: dict[str, Tensor], inputs: Any, targets: Any, weight: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        pieces = zip(self._names, torch.split(flat, self._sizes), self._shapes, strict=True)
        weights = {name: piece.view(shape) for name, piece, shape in pieces}
        after = {name: buffer.clone() for name, buffer in buffers.items()}  # BatchNorm's change
        with autocast(self._settings.precision, self._device):
            outputs = functional_call(self._model, {**self._frozen, **weights, **after}, (inputs,))
            loss = self._loss(outputs, targets)
        return loss * weight, after

    def _adam(
        self, flat: Tensor, gradient: Tensor, state: list[Tensor], rates: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), as torch.optim does it."""
        decay = self._settings.weight_decay
        if decay and self._settings.optimizer == "adamw":
            flat = flat * (1 - rates[2] * decay)
        elif decay:
            gradient = gradient + decay * flat
        mean = torch.lerp(state[0], gradient, 1 - self._betas[0])
        square = state[1] * self._betas[1] + gradient * gradient * (1 - self._betas[1])
        flat = flat - rates[0] * mean / (square.sqrt() / rates[1] + self._eps)
        return flat, [mean, square]

    def _sgd(
        self, flat: Tensor, gradient: Tensor, state: list[Tensor], rates: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """SGD with momentum, as torch.optim does it."""
        if self._settings.weight_decay:
            gradient = gradient + self._settings.weight_decay * flat
        if state:
            state = [state[0] * self._settings.momentum + gradient]
            gradient = state[0]
        return flat - rates[2] * gradient, state


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _row(tree: Any, k: int, m: int) -> Any:
    if isinstance(tree, Tensor):
        return tree[k, m]
    return map_leaves(lambda leaf: leaf[k, m], tree)
