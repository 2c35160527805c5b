"""Watch the model: what wraps it, its forward and backward passes, its losses.

A model's first forward pass also starts `weights.py`.
"""

import functools
import os
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from samestep.base.trees import leaves_of, tree_leaves
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, checksum, frames, is_tracing, row_hashes
from samestep.scripts.checking.watch.weights import WeightsWatcher
from samestep.scripts.hooks import loss_of
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_INSIDE = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "_FabricModule": "_forward_module",
}
"""Classes that hand their inputs to another module, and where they keep it."""
_Wrapper = Literal["ddp", "fsdp"]
_SDPA = "scaled_dot_product_attention"
_DROPS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", _SDPA)
_DROPOUT = Probe(*((nn.functional, name) for name in _DROPS))
_RANDOM = Probe(*((torch, name) for name in ("rand", "randn", "randint")))
_FORWARD = Probe((nn.parallel.DistributedDataParallel, "forward"))  # does what a call does
_FEW_DRAWN = 8
_ROWS_OF, _NOTED, _GRAPHS = 200, 20_000, 50
_INFERENCES = 8  # of each model whose weights are looked at


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    weights = WeightsWatcher(recorder)
    models = _Models(recorder, weights)
    with (
        weights.installed(),
        listening(
            (probes.DDP_MADE, models.on_wrap),
            (probes.BACKWARD, models.on_backward),
            (probes.MODULE_CALL, models.on_call),
            (_FORWARD, models.on_call),
            (_RANDOM, models.on_random),
            (_DROPOUT, models.on_dropout),
        ),
    ):
        yield


class _Models:
    def __init__(self, recorder: Recorder, weights: WeightsWatcher) -> None:
        self._recorder = recorder
        self._weights = weights
        self._pid = os.getpid()  # workers of a loader are forked with all of this
        self._depth = 0  # of calls of modules with parameters
        self._parts: set[int] = set()  # modules in the outermost of them
        self._evaluated = False  # whether the outermost of them has no part in training mode
        self._in_backward = False
        self._trains = False  # whether the outermost call records a graph
        self._inferred_after: dict[int, set[int]] = {}  # steps after which a model was, without one
        self._drops = 0  # calls of functions that drop values as in training
        self._wrapped: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
        """Each part of a wrapped model, with the model."""
        # Models whose next backward meets the other ranks': number → what wraps it.
        self._pending: dict[int, weakref.ref[nn.Module] | None] = {}
        self._awaited: set[int] = set()  # parameters whose gradients DDP waits for, frozen or not
        self._counts: Counter[Any] = Counter()
        self._drawn: deque[weakref.ref[Tensor]] = deque(maxlen=_FEW_DRAWN)

    def on_wrap(self, call: ProbedCall) -> Around:
        yield
        self._note_wrap(call.args[0], "ddp")

    def _note_wrap(self, wrapper: Any, kind: _Wrapper) -> None:
        model, *_ = _unwrapped(wrapper)
        for part in model.modules():
            self._wrapped[id(part)] = weakref.ref(part), weakref.ref(model)
        self._awaited -= {id(p) for p in model.parameters()}
        self._awaited |= {id(p) for p in model.parameters() if p.requires_grad}
        self._recorder.note(
            ev.ModelWrapped(
                type(model).__name__,
                self._weights.models[model],
                wrapper=kind,
                parameters=sum(p.numel() for p in model.parameters() if not is_lazy(p)),
                own=self._recorder.is_direct("torch"),
                find_unused_parameters=getattr(wrapper, "find_unused_parameters", None),
                broadcast_buffers=getattr(wrapper, "broadcast_buffers", None),
                static_graph=getattr(wrapper, "static_graph", None),
            )
        )

    def on_call(self, call: ProbedCall) -> Around | None:
        module: nn.Module = call.args[0]
        inside = self._depth and not (self._trains and not torch.is_grad_enabled())
        if inside and (id(module) in self._parts or not (self._trains and module.training)):
            return None
        if self._passive() or next(module.parameters(), None) is None:
            return None  # without parameters, it is a loss or an activation
        if inside:  # a layer that the model does not know, as in a plain list
            self._weights.begin(module)
            return None
        if self._depth:  # a teacher within the model that it teaches
            return self._around_teacher(module)
        parts = list(module.modules())  # once: a large model's walk costs a millisecond
        if _unwrapped(module)[1] is None and any(_kind_of(type(part).__mro__) for part in parts):
            return None  # its parts are called in wrappers
        return self._around_model(call, parts)

    def _around_model(self, call: ProbedCall, parts: list[nn.Module]) -> Around:
        called, self._parts = call.args[0], set(map(id, parts))
        model, self._trains = self._note_forward(called, parts, call.args[1:], call.kwargs)
        self._depth += 1
        try:
            if self._trains:
                yield
            else:
                yield from self._around_inference(called, model)
        finally:
            self._depth -= 1

    def _around_teacher(self, module: nn.Module) -> Around:
        self._trains = False
        try:
            yield from self._around_inference(module, module)
        finally:
            self._trains = True

    def _around_inference(self, called: nn.Module, model: nn.Module) -> Around:
        """Note once per step what a model computes with that is called without gradients."""
        number, step = self._weights.models[model], self._recorder.hooks.steps
        steps = self._inferred_after.setdefault(number, set())
        parameters = list(model.parameters())
        unlike = any(hasattr(p, "to_local") or is_lazy(p) or p.is_meta for p in parameters)
        later = (f for f in frames() if f.f_globals.get("__name__") == "torch.utils.checkpoint")
        if step in steps or len(steps) >= _INFERENCES or unlike or any(later):
            yield
            return
        steps.add(step)
        with self._recorder.unwatched():
            sums = [checksum(p) for p in parameters]
            before, drops = _statistics(called), self._drops
            norms = [m for m in called.modules() if isinstance(m, _NormBase) and not m.training]
            blank = sum(m.running_mean is not None and not m.running_mean.any() for m in norms)
        yield
        with self._recorder.unwatched():
            learnt = _statistics(called) != before
        self._recorder.note(
            ev.InferencePass(
                type(model).__name__,
                number,
                weights=zlib.crc32(repr(sums).encode()),
                shapes=zlib.crc32(repr([p.shape for p in parameters]).encode()),
                training=called.training,
                dropped=self._drops > drops,
                learnt=learnt,
                blank=blank,
            )
        )

    def _passive(self) -> bool:
        """Whether this is a worker, a trace, a recomputation in backward or a watcher's call."""
        watcher = self._recorder.quiet > 0
        return self._in_backward or watcher or is_tracing() or os.getpid() != self._pid

    def _note_forward(
        self, called: nn.Module, parts: list[nn.Module], args: Any, kwargs: Any
    ) -> tuple[nn.Module, bool]:
        """Note a call; return the model inside all wrappers, and whether it records a graph."""
        part, kind, wrapper = _unwrapped(called)
        model = part if kind else self._wrapper_of(part) or part
        number = self._weights.models[model]
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in part.parameters())
        sync = getattr(wrapper, "require_backward_grad_sync", None)
        if wrapper is not None and kind == "fsdp" and self._wrapper_of(model) is None:
            self._note_wrap(wrapper, "fsdp")
        if grad:
            self._weights.begin(model)
            if sync or kind == "fsdp":
                self._pending[number] = None if wrapper is None else weakref.ref(wrapper)
        self._evaluated = False
        self._counts[number] += 1
        if self._counts[number] > _NOTED:
            return model, grad
        with self._recorder.unwatched():
            leaves = tree_leaves((args, kwargs))
            tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
            rows = (
                row_hashes(tensor)
                if tensor is not None and self._counts[number] <= _ROWS_OF
                else []
            )
        modal = [layer.training for layer in parts if _depends_on_mode(layer)]
        self._evaluated = not (part.training or any(modal))
        self._recorder.note(
            ev.ForwardPass(
                type(model).__name__,
                number,
                wrapped=kind is not None,
                inner=kind is None and any(map(self._wrapper_of, parts if self._wrapped else ())),
                training=part.training,
                modal=(sum(modal), len(modal)),
                grad=grad,
                n=len(tensor) if tensor is not None and tensor.ndim else None,
                rows=rows,
                drawn=any(drawn() is tensor for drawn in self._drawn),
            )
        )
        return model, grad

    def _wrapper_of(self, part: nn.Module) -> nn.Module | None:
        ref, model = self._wrapped.get(id(part), (None, None))
        return model() if ref is not None and model is not None and ref() is part else None

    def on_random(self, _call: ProbedCall) -> Around:
        """Keep in mind what is random numbers: as the input of a model, they stand for data."""
        tensor = yield
        if not self._depth and isinstance(tensor, Tensor):
            self._drawn.append(weakref.ref(tensor))

    def on_dropout(self, call: ProbedCall) -> None:
        """Note a function that drops values by its default in evaluation mode."""
        if not self._depth or self._passive() or torch.is_grad_enabled():
            return
        asked = False
        if call.name == _SDPA:
            p = call.argument(4, "dropout_p", 0.0)
        else:  # who says `training=True` means it
            asked = len(call.args) > 2 or "training" in call.kwargs
            p = call.argument(1, "p", 0.5) * call.argument(2, "training", default=True)
        self._drops += p > 0.0
        if p > 0.0 and self._evaluated and not asked:
            self._recorder.once(ev.DropoutCalled(call.name, p=float(p)))

    def on_backward(self, call: ProbedCall) -> Around:
        """Note a backward pass, and which parameters of a DDP model it does not reach."""
        if self._passive():
            return
        self._counts["backward"] += 1
        traced = self._pending and self._counts["backward"] <= _GRAPHS
        with self._recorder.unwatched():
            reached = {id(leaf) for leaf in leaves_of(loss_of(call))} if traced else ()
            unused = {
                str(number): [
                    name
                    for name, p in model.named_parameters()
                    if (p.requires_grad or id(p) in self._awaited) and id(p) not in reached
                ]
                for model in self._weights.trained.alive()
                if traced and (number := self._weights.models[model]) in self._pending
            }
        closure = self._recorder.hooks.closure
        wrappers = [ref() for ref in self._pending.values() if ref is not None]
        late = any(getattr(w, "require_backward_grad_sync", None) is False for w in wrappers)
        self._recorder.note(
            ev.BackwardPass(
                sync=bool(self._pending),
                late=late,
                unused=unused,
                closure=closure,
                aided=not self._recorder.is_direct("torch"),
            )
        )
        self._pending.clear()
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False


@functools.cache
def _kind_of(classes: tuple[type, ...]) -> _Wrapper | None:
    names = {kind.__name__ for kind in classes}
    if "DistributedDataParallel" in names:
        return "ddp"
    return "fsdp" if names & {"FullyShardedDataParallel", "FSDPModule"} else None


def _unwrapped(module: nn.Module) -> tuple[nn.Module, _Wrapper | None, nn.Module | None]:
    """Return a model without what wraps it, the kind of the wrapper, and the wrapper."""
    kind, wrapper = None, None
    while True:
        if own := _kind_of(type(module).__mro__):
            kind, wrapper = own, module
        names = (_INSIDE.get(kind.__name__) for kind in type(module).__mro__)
        name = next(filter(None, names), None)
        inside = getattr(module, name, None) if name is not None else None
        if not isinstance(inside, nn.Module):
            return module, kind, wrapper
        module = inside


def _depends_on_mode(part: nn.Module) -> bool:
    """Whether a layer does something else in training than in evaluation."""
    if isinstance(part, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - there is no public name
        return part.p > 0
    return isinstance(part, _NormBase) and part.track_running_stats


def _statistics(model: nn.Module) -> list[int | None]:
    norms = (norm for norm in model.modules() if isinstance(norm, _NormBase) and norm.training)
    return [checksum(norm.running_mean) for norm in norms if norm.running_mean is not None]
