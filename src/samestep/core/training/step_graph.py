"""Optimizer steps as one compiled function, which a GPU replays as one CUDA graph."""

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from samestep.base.settings import Precision, Settings
from samestep.base.trees import map_leaves, map_tensors, tree_leaves
from samestep.core.learner.apply import call, takes_keywords
from samestep.core.learner.device import autocast, is_small
from samestep.core.learner.model_state import copied
from samestep.core.learner.side_effects import closure_prints, differing, model_prints
from samestep.core.training.metrics import StepOutputs
from samestep.core.training.step import check_loss
from samestep.core.training.work import Learner, StepResult

Kept = Sequence[list[Tensor]]
"""Groups of tensors that a function changes in place, so that they keep their addresses."""
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""(function) → what it returned, and what runs its kernels again into the same memory."""


@dataclass(frozen=True, slots=True)
class _Recording:
    kept: Kept
    """Held, lest their memory goes to other tensors at the same addresses."""
    addresses: list[int]
    fed: list[Tensor]
    """Where the graph reads what each call is fed with."""
    results: Any
    replay: Callable[[], None]


class Replayed:
    """A function whose kernels are captured at its first call and replayed at later ones.

    The first call runs the function, which also compiles and warms up; capturing runs nothing. So
    each call changes the kept tensors exactly once.
    """

    def __init__(
        self, function: Callable[[Kept, Any], Any], capture: Capture | None = None
    ) -> None:
        """Take a function of (kept, fed): tensors that it changes in place, and a tree of others.

        It must not make the host wait for the device. `capture` replaces CUDA's capturing in tests.
        """
        self._function, self._capture = function, capture or capture_on_cuda
        self._recording: _Recording | None = None
        self.why_not = ""
        """Why nothing is captured, once that has failed."""

    def __call__(self, kept: Kept, fed: Any) -> Any:
        """Return the function's result, in memory that the next call does not overwrite."""
        if self.why_not:
            return self._function(kept, fed)
        if self._recording is None or self._recording.addresses != _addresses(kept):
            return self._record(kept, fed)
        recording, leaves = self._recording, tree_leaves(fed)
        if _forms(leaves) != _forms(recording.fed):
            return self._function(kept, fed)
        for place, leaf in zip(recording.fed, leaves, strict=True):
            place.copy_(leaf)
        recording.replay()
        return map_tensors(torch.clone, recording.results)

    def _record(self, kept: Kept, fed: Any) -> Any:
        self._recording = None  # its memory may be needed now
        fed = map_leaves(torch.clone, fed)
        results = self._function(kept, fed)
        devices = {leaf.device for leaf in (*tree_leaves(fed), *(t for g in kept for t in g))}
        if len(devices) > 1:
            # The host's work is not captured, but would be done once more now.
            self.why_not = f"tensors are on {' and '.join(sorted(map(str, devices)))}"
            return results
        try:
            recorded, replay = self._capture(partial(self._function, kept, fed))
        except Exception as error:
            self.why_not = _reason(error)
        else:
            self._recording = _Recording(kept, _addresses(kept), tree_leaves(fed), recorded, replay)
        return results


def replayed_on(device: torch.device, function: Callable[[Kept, Any], Any]) -> Replayed | None:
    """Return a function replayed as a CUDA graph, or None where the device has no graphs."""
    return Replayed(function) if device.type == "cuda" else None


def _addresses(kept: Kept) -> list[int]:
    return [tensor.data_ptr() for group in kept for tensor in group]


def _forms(leaves: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


def _reason(error: BaseException) -> str:
    """Return the first line of the first error: ending a broken capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"


def capture_on_cuda(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture what a function launches in this thread; the device stays usable if that fails."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    captured = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    try:
        # A capture that fails leaves its own stream as the current one: set back the one before.
        with torch.cuda.stream(torch.cuda.current_stream()), captured:
            results = function()
    except Exception:
        _clean_up(pool)
        raise
    return results, graph.replay


def _clean_up(pool: tuple[int, int]) -> None:
    """Undo what a failed capture leaves: memory is not freed, and the generator does not draw."""
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):
        # Raises where the capture was ended in order; then the graph gives its memory back itself.
        torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 - there is no public way
        torch._C._cuda_releasePool(device, pool)  # noqa: SLF001
    with contextlib.suppress(RuntimeError):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())


Vectors = list[Tensor]
"""All weights, or all of one kind that belongs to them: packed into one, or a tensor of each."""

Results = tuple[Tensor, ...]
"""Of each step the loss and the norm of the gradient; the outputs of all of them, if wanted."""


class StepGraph:
    """Steps as one compiled function of weights, optimizer state, buffers and samples.

    Small weights are packed into one vector, and so is each kind of optimizer state, so that an
    update is one loop; packing large ones would copy them at every call. Model and optimizer are
    up to date after every call.
    """

    def __init__(
        self,
        learner: Learner,
        settings: Settings,
        device: torch.device,
        micro_batch: int,
        step: int,
    ) -> None:
        """Prepare the steps that follow `step` steps of the run."""
        self._micro_batch_size, self._measured = micro_batch, learner.measured
        self._model, self._optimizer = learner.model, learner.optimizer
        self._loss, self._settings, self._device = learner.loss, settings, device
        self._sums = learner.reduction == "sum"
        named = {n: p for n, p in learner.model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(named), list(named.values())
        weights = learner.model.named_parameters()
        self._frozen = {n: p.detach() for n, p in weights if not p.requires_grad}
        self._buffers = [name for name, _ in learner.model.named_buffers()]
        self._packs = is_small(learner.model)
        self._shapes = [p.shape for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]
        group = learner.optimizer.param_groups[0]
        adam = settings.optimizer != "sgd"
        self._betas: tuple[float, float] = group.get("betas", (0.0, 0.0))
        self._eps: float = group.get("eps", 0.0)
        momentum = ("momentum_buffer",) if settings.momentum else ()
        self._keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if adam else momentum
        self._update = self._adam if adam else self._sgd
        self._make_state(step)
        self._guarded: list[Any] = []
        """Of the samples that the compiler's guards have let pass: shapes, strides and types."""
        self._kept: list[list[Tensor]] = []
        """What the last call has changed in place."""
        # The C++ wrapper spares Python's overhead per kernel call; it exists for CPUs only. On a
        # GPU the mode is the default one: "reduce-overhead" captures no function that changes its
        # inputs, as this one does, so it is captured here.
        options: dict[str, Any] | None = {"cpp_wrapper": True} if device.type == "cpu" else None
        self._compiled: Callable[..., Results] = torch.compile(
            self._steps, fullgraph=True, dynamic=False, options=options
        )
        self._replayed = replayed_on(device, self._take_step)
        self._call = self._replayed or self._take_step

    def run(
        self, inputs: Any, targets: Any, lrs: list[float], step: int, *, unchanged: bool = False
    ) -> StepResult:
        """Take as many steps as there are learning rates; inputs and targets (steps, samples, …).

        `unchanged`: no other user code has run since the last call, so model and loss are
        unchanged. Then only the samples are checked, not the compiler's guards, which take 0.1 ms.
        """
        like = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in tree_leaves((inputs, targets))]
        unchanged, self._guarded = unchanged and like == self._guarded, like
        if self._optimizer.state[self._parameters[0]].get("step") is not self._first_count:
            self._make_state(step)  # a state was loaded since the last call
            unchanged = False
        kept = self._kept = self._kept if unchanged else self._changed_in_place()
        fed = (inputs, targets, self._rates(step + self._ahead, lrs))
        with torch.compiler.set_stance("default", skip_guard_eval_unsafe=unchanged):
            losses, norms, *outputs = self._call(kept, fed)
        seen = []
        if outputs:
            flat = map_leaves(lambda leaf: leaf.flatten(0, 1), targets)
            seen = [StepOutputs(outputs[0], flat, len(tree_leaves(flat)[0]))]
        return StepResult(losses.unbind(), norms, seen=seen)

    def _changed_in_place(self) -> list[list[Tensor]]:
        """Return weights, optimizer state, counts and buffers."""
        states = [self._optimizer.state[p] for p in self._parameters]
        return [
            [p.detach() for p in self._parameters],
            *([state[key] for state in states] for key in self._keys),
            self._counts,
            list(self._model.buffers()) if self._buffers else [],
        ]

    def device_phrase(self) -> str:
        """Return a phrase on how the device runs it, once it has run; '' on the CPU."""
        if self._replayed is None:
            return ""
        why_not = self._replayed.why_not
        return f", no CUDA graph ({why_not})" if why_not else ", replayed as a CUDA graph"

    def _take_step(self, kept: Kept, fed: Any) -> Results:
        weights, *owned, counts, buffers = kept
        inputs, targets, rates = fed
        live = dict(zip(self._buffers, buffers, strict=True))
        drawn = dropout_by(dropped) if self._device.type == "cpu" else contextlib.nullcontext()
        with torch.no_grad(), drawn:
            return self._compiled(weights, owned, counts, rates, live, inputs, targets)

    def _make_state(self, step: int) -> None:
        """Give the optimizer the state that its own first step would create: zeros.

        Where it has a state, take its count of steps as that of `step` steps of the run.
        """
        for parameter in self._parameters:
            state = self._optimizer.state[parameter]
            if self._keys and self._keys[0] not in state:
                if "exp_avg" in self._keys:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=self._device)
                state.update({key: torch.zeros_like(parameter) for key in self._keys})
        # The counts share one tensor: one addition in place of one per parameter.
        states = [self._optimizer.state[p] for p in self._parameters]
        self._counts = [torch.stack([s["step"] for s in states])] if "step" in states[0] else []
        for number, state in enumerate(states if self._counts else ()):
            state["step"] = self._counts[0][number]
        self._first_count = states[0].get("step")
        # It is on the device, and reading it at every call would make the host wait.
        self._ahead = (0 if self._first_count is None else int(self._first_count)) - step

    def _rates(self, taken: int, lrs: list[float]) -> Tensor:
        """Return the factors that vary by step (steps, 3): lr / (1 - β₁ᵗ), √(1 - β₂ᵗ), lr.

        A tensor, so that a schedule does not recompile; computed here, since the compiler would put
        the powers into the innermost loop.
        """
        first, second = self._betas
        counted = enumerate(lrs, start=taken + 1)
        rows = [[lr / (1 - first**t), (1 - second**t) ** 0.5, lr] for t, lr in counted]
        rates = torch.tensor(rows, dtype=self._parameters[0].dtype)
        if self._device.type == "cuda":  # only from pinned memory is it copied without waiting
            return rates.pin_memory().to(self._device, non_blocking=True)
        return rates.to(self._device)

    def _steps(
        self,
        weights: list[Tensor],
        owned: list[list[Tensor]],
        counts: list[Tensor],
        rates: Tensor,
        live: dict[str, Tensor],
        inputs: Any,
        targets: Any,
    ) -> Results:
        """Take the steps: this is what gets compiled."""
        vectors, state = self._pack(weights), [self._pack(tensors) for tensors in owned]
        buffers = live
        losses, norms, seen = [], [], []
        for k in range(rates.shape[0]):
            gradients, loss, buffers, given = self._gradients(vectors, buffers, inputs, targets, k)
            seen += given
            # As torch.nn.utils.get_total_norm does it.
            each: list[Tensor] = [torch.linalg.vector_norm(gradient) for gradient in gradients]
            norm = each[0] if len(each) == 1 else torch.linalg.vector_norm(torch.stack(each))
            if self._settings.clip_norm is not None:
                # As torch.nn.utils.clip_grad_norm_ does it.
                scale = torch.clamp(self._settings.clip_norm / (norm + 1e-6), max=1.0)
                gradients = [gradient * scale for gradient in gradients]
            updated = [
                self._update(vector, gradient, [kind[place] for kind in state], rates[k])
                for place, (vector, gradient) in enumerate(zip(vectors, gradients, strict=True))
            ]
            vectors = [vector for vector, _ in updated]
            state = [[kinds[number] for _, kinds in updated] for number in range(len(state))]
            losses.append(loss)
            norms.append(norm)
        for after, tensors in zip([vectors, *state], [weights, *owned], strict=True):
            for tensor, piece in zip(tensors, self._unpack(after), strict=True):
                tensor.copy_(piece)
        for count in counts:
            count.add_(rates.shape[0])
        for name, buffer in live.items():
            buffer.copy_(buffers[name])
        outputs = (torch.cat(seen),) if seen else ()
        return torch.stack(losses), torch.stack(norms), *outputs

    def _gradients(
        self, vectors: Vectors, buffers: dict[str, Tensor], inputs: Any, targets: Any, k: int
    ) -> tuple[Vectors, Tensor, dict[str, Tensor], list[Tensor]]:
        """Return gradients, loss, buffers and outputs after the micro-steps of step k."""
        samples, most = tree_leaves(inputs)[0].shape[1], self._micro_batch_size
        gradients = [torch.zeros_like(vector) for vector in vectors]
        loss = torch.zeros((), device=vectors[0].device)
        seen = []
        for start in range(0, samples, most):
            rows = slice(start, min(start + most, samples))
            weight = 1.0 if self._sums else (rows.stop - start) / samples
            parts, (value, (buffers, outputs)) = grad_and_value(self._forward, has_aux=True)(
                vectors, buffers, _rows(inputs, k, rows), _rows(targets, k, rows), weight
            )
            gradients = [so_far + part for so_far, part in zip(gradients, parts, strict=True)]
            loss = loss + value
            if self._measured and isinstance(outputs, Tensor):
                seen.append(outputs)
        return gradients, loss / samples if self._sums else loss, buffers, seen

    def _forward(
        self, vectors: Vectors, buffers: dict[str, Tensor], inputs: Any, targets: Any, weight: float
    ) -> tuple[Tensor, tuple[dict[str, Tensor], Any]]:
        weights = dict(zip(self._names, self._unpack(vectors), strict=True))
        after = {name: buffer.clone() for name, buffer in buffers.items()}  # BatchNorm's change
        with autocast(self._settings.precision, self._device):
            outputs = functional_call(self._model, {**self._frozen, **weights, **after}, (inputs,))
            loss = self._loss(outputs, targets)
        return loss * weight, (after, outputs)

    def _pack(self, tensors: Sequence[Tensor]) -> Vectors:
        if not self._packs:
            return list(tensors)
        return [torch.cat([tensor.reshape(-1) for tensor in tensors])]

    def _unpack(self, vectors: Vectors) -> list[Tensor]:
        """Return a tensor for each parameter, in its shape."""
        if not self._packs:
            return vectors
        pieces = torch.split(vectors[0], self._sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _adam(
        self, vector: Tensor, gradient: Tensor, state: list[Tensor], rates: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), as torch.optim does it."""
        decay = self._settings.weight_decay
        if decay and self._settings.optimizer == "adamw":
            vector = vector * (1 - rates[2] * decay)
        elif decay:
            gradient = gradient + decay * vector
        mean = torch.lerp(state[0], gradient, 1 - self._betas[0])
        square = state[1] * self._betas[1] + gradient * gradient * (1 - self._betas[1])
        vector = vector - rates[0] * mean / (square.sqrt() / rates[1] + self._eps)
        return vector, [mean, square]

    def _sgd(
        self, vector: Tensor, gradient: Tensor, state: list[Tensor], rates: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """SGD with momentum, as torch.optim does it."""
        if self._settings.weight_decay:
            gradient = gradient + self._settings.weight_decay * vector
        if state:
            state = [state[0] * self._settings.momentum + gradient]
            gradient = state[0]
        return vector - rates[2] * gradient, state


def _rows(tree: Any, k: int, rows: slice) -> Any:
    return map_leaves(lambda leaf: leaf[k, rows], tree)


Dropout = Callable[..., Tensor]


def dropped(
    input: Tensor,  # noqa: A002 - as torch.nn.functional.dropout
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001
) -> Tensor:
    """`torch.nn.functional.dropout`, never in place, with a mask that is compared with `rand`.

    On the CPU, PyTorch 2.13's compiler may put the product with a `bernoulli` mask before the mask
    is drawn, as in PyTorch's own dropout under `torch.func`. Every value is then dropped.
    """
    if not training or p == 0:
        return input
    if p == 1:
        return torch.zeros_like(input)
    kept = torch.rand_like(input, dtype=torch.float32) >= p
    return input * kept / (1 - p)


def not_dropped(input: Tensor, *_given: Any, **_more: Any) -> Tensor:  # noqa: A002
    """Return the input: so other random draws show."""
    return input


@contextlib.contextmanager
def dropout_by(function: Dropout) -> Iterator[None]:
    """Let modules call another function instead of `torch.nn.functional.dropout`."""
    usual, nn.functional.dropout = nn.functional.dropout, function
    try:
        yield
    finally:
        nn.functional.dropout = usual


def why_only_eager(learner: Learner, inputs: Any, targets: Any, precision: Precision) -> str:
    """Return why a forward and backward cannot be part of a graph of whole steps, or ''.

    The graph gives every weight a gradient, also one that the loss does not depend on. It keeps
    what is written into a buffer, not a tensor put in its place. A copy of the model is tried.
    """
    if isinstance(inputs, dict) and takes_keywords(learner.model, inputs):
        return "the model takes keyword arguments"
    weights = dict(learner.model.named_parameters())
    trained = {name: p for name, p in weights.items() if p.requires_grad}
    try:
        shared = {id(p): p for p in weights.values()}
        model = copied(learner.model, shared)
        loss_of = copy.deepcopy(learner.loss, shared)
    except Exception:
        return "the model cannot be copied to try a step"
    before, state = _buffers_and_attributes(model), torch.get_rng_state()
    prints = model_prints(model, loss_of) | closure_prints(loss_of)
    device = next(iter(trained.values())).device
    with autocast(precision, device), dropout_by(not_dropped):
        loss = loss_of(call(model, inputs), targets)
    check_loss(loss, learner.loss)
    if device.type == "cpu" and not torch.equal(state, torch.get_rng_state()):
        return "the model draws random numbers outside nn.Dropout, maybe using them too early"
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            return f"the loss does not depend on {name}"
    after = _buffers_and_attributes(model)
    for name in before | after:
        if before.get(name) is not after.get(name):
            return f"forward reassigns {name}"
    written = differing(prints, model_prints(model, loss_of) | closure_prints(loss_of))
    return f"a step changes {written[0]}" if written else ""


def _buffers_and_attributes(model: nn.Module) -> dict[str, object]:
    """Return the buffers and attributes of all modules, by name."""
    held: dict[str, object] = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        held |= {f"{start}{name}": value for name, value in vars(module).items()}
    return held
