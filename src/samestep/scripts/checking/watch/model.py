"""Watch the model: what wraps it, its forward and backward passes, its losses.

| event | when | facts |
|---|---|---|
| wrap | DDP or FSDP wraps a model | wrapper, model, model_id, parameters, own, and DDP's settings |
| forward | the outermost call of a module | model_id inside all wrappers, n, rows, drawn, modal |
| backward | before it | sync, unused: what the loss leaves out, by model_id |
| dropped | a function drops values of a model in evaluation mode, without gradients | function, p |
| inference | a model's first call without gradients after a step | see `_note_inference` |

`modal` counts the layers that behave differently in training, such as dropout: those in training
mode, and all. A model's first forward pass also starts `weights.py`. Ids that are keys of a mapping
are text once they have been read from the file.
"""

import functools
import os
import sys
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from samestep.base.patches import Patch, patched
from samestep.base.trees import leaves_of, tree_leaves
from samestep.scripts.checking.recorder import Recorder, checksum, is_tracing, row_hashes
from samestep.scripts.checking.watch.weights import Weights

_INSIDE = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "_FabricModule": "_forward_module",
}
"""Classes that hand their inputs to another module, and where they keep it."""
_RANDOM = ("rand", "randn", "randint")
_SDPA = "scaled_dot_product_attention"
_DROPS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", _SDPA)
_FEW_DRAWN = 8
_ROWS_OF, _NOTED, _GRAPHS = 200, 20_000, 50
_INFERENCES = 8  # of each model whose weights are looked at


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    weights = Weights(recorder)
    models = _Models(recorder, weights)
    patches: list[Patch] = [
        (DistributedDataParallel, "__init__", models.around_wrap),
        (torch.autograd, "backward", models.around_backward),
        (nn.Module, "__call__", models.around_call),
        *((torch, name, models.around_random) for name in _RANDOM),
        *((nn.functional, name, models.around_dropout) for name in _DROPS),
    ]
    with weights.installed(), patched(*patches):
        yield


class _Models:
    """How one rank's models are wrapped and called."""

    def __init__(self, recorder: Recorder, weights: Weights) -> None:
        self._recorder = recorder
        self._weights = weights
        self._pid = os.getpid()  # workers of a loader are forked with all of this
        self._depth = 0  # of calls of modules with parameters
        self._evaluated = False  # whether the outermost of them has no part in training mode
        self._in_backward = False
        self._trains = False  # whether the outermost call records a graph
        self._looked: dict[int, set[int]] = {}  # steps after which a model was called without one
        self._drops = 0  # calls of functions that drop values as in training
        self._wrapped: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
        """Each part of a wrapped model, with the model."""
        self._pending: set[int] = set()  # DDP models whose next backward meets the other ranks'
        self._counts: Counter[Any] = Counter()
        self._drawn: deque[weakref.ref[Tensor]] = deque(maxlen=_FEW_DRAWN)

    def around_wrap(self, original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(ddp, *args, **kwargs)
        self._note_wrap(ddp, "ddp")
        return made

    def _note_wrap(self, wrapper: Any, kind: str) -> None:
        model, *_ = _peeled(wrapper)
        for part in model.modules():
            self._wrapped[id(part)] = weakref.ref(part), weakref.ref(model)
        settings = ("find_unused_parameters", "broadcast_buffers", "static_graph")
        self._recorder.note(
            "wrap",
            wrapper=kind,
            model=type(model).__name__,
            model_id=self._weights.models[model],
            parameters=sum(p.numel() for p in model.parameters() if not is_lazy(p)),
            own=self._recorder.is_direct("torch"),
            **{name: getattr(wrapper, name, None) for name in settings},
        )

    def around_call(
        self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inside = self._depth and not (self._trains and not torch.is_grad_enabled())
        if torch.compiler.is_compiling() or inside or self._passive():
            return original(module, *args, **kwargs)
        if next(module.parameters(), None) is None:
            return original(module, *args, **kwargs)  # a loss or an activation
        if self._depth:  # a teacher within the model that it teaches
            self._trains = False
            try:
                return self._infer(original, module, module, args, kwargs)
            finally:
                self._trains = True
        parts = list(module.modules())  # once: a large model's walk costs a millisecond
        if _peeled(module)[1] is None and any(_kind_of(type(part).__mro__) for part in parts):
            return original(module, *args, **kwargs)  # its parts are called in wrappers
        model, self._trains = self._note_forward(module, parts, args, kwargs)
        self._depth += 1
        try:
            if not self._trains:
                return self._infer(original, module, model, args, kwargs)
            return original(module, *args, **kwargs)
        finally:
            self._depth -= 1

    def _infer(
        self, original: Callable[..., Any], called: Any, model: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a model without gradients; note once per step what it computed with.

        `weights` and `shapes` tell those of its parameters from others', `dropped` is whether it
        dropped values as in training, and `learnt` whether it learnt statistics of the batch.
        """
        number, step = self._weights.models[model], self._recorder.hooks.steps
        looked = self._looked.setdefault(number, set())
        parameters = list(model.parameters())
        sharded = any(hasattr(p, "to_local") or is_lazy(p) for p in parameters)
        if step in looked or len(looked) >= _INFERENCES or sharded or _is_checkpointed():
            return original(called, *args, **kwargs)
        looked.add(step)
        with self._recorder.unwatched():
            sums = [checksum(p) for p in parameters]
            before, drops = _statistics(called), self._drops
        value = original(called, *args, **kwargs)
        with self._recorder.unwatched():
            learnt = _statistics(called) != before
        self._recorder.note(
            "inference",
            model=type(model).__name__,
            model_id=number,
            weights=zlib.crc32(repr(sums).encode()),
            shapes=zlib.crc32(repr([p.shape for p in parameters]).encode()),
            training=called.training,
            dropped=self._drops > drops,
            learnt=learnt,
        )
        return value

    def _passive(self) -> bool:
        """Whether this is a worker, a trace, a recomputation in backward or a watcher's call."""
        watcher = self._recorder.quiet > 0
        return self._in_backward or watcher or is_tracing() or os.getpid() != self._pid

    def _note_forward(
        self, called: nn.Module, parts: list[nn.Module], args: Any, kwargs: Any
    ) -> tuple[nn.Module, bool]:
        """Note a call; return the model inside all wrappers, and whether it records a graph."""
        part, kind, wrapper = _peeled(called)
        model = part if kind else self._wrapper_of(part) or part
        number = self._weights.models[model]
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in part.parameters())
        sync = getattr(wrapper, "require_backward_grad_sync", None)
        if wrapper is not None and kind == "fsdp" and self._wrapper_of(model) is None:
            self._note_wrap(wrapper, "fsdp")
        if grad:
            self._weights.begin(model)
            if sync or kind == "fsdp":
                self._pending.add(number)
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
        modal = [one.training for one in parts if _depends_on_mode(one)]
        self._evaluated = not (part.training or any(modal))
        self._recorder.note(
            "forward",
            model=type(model).__name__,
            model_id=number,
            wrapped=kind is not None,
            inner=kind is None and any(map(self._wrapper_of, parts if self._wrapped else ())),
            training=part.training,
            modal=[sum(modal), len(modal)],
            grad=grad,
            n=len(tensor) if tensor is not None and tensor.ndim else None,
            rows=rows,
            drawn=any(drawn() is tensor for drawn in self._drawn),
        )
        return model, grad

    def _wrapper_of(self, part: nn.Module) -> nn.Module | None:
        """Return the model that was wrapped and has this part, or None."""
        ref, model = self._wrapped.get(id(part), (None, None))
        return model() if ref is not None and model is not None and ref() is part else None

    def around_random(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Keep in mind what is random numbers: as the input of a model, they stand for data."""
        tensor = original(*args, **kwargs)
        if not torch.compiler.is_compiling() and not self._depth and isinstance(tensor, Tensor):
            self._drawn.append(weakref.ref(tensor))
        return tensor

    def around_dropout(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note a function that drops values by its default in evaluation mode."""
        watched = self._depth and not self._passive() and not torch.compiler.is_compiling()
        if watched and not torch.is_grad_enabled():
            says = False
            if original.__name__ == _SDPA:
                p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            else:  # who says `training=True` means it
                says = len(args) > 2 or "training" in kwargs
                p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
                p *= kwargs.get("training", args[2] if len(args) > 2 else True)
            self._drops += p > 0.0
            if p > 0.0 and self._evaluated and not says:
                self._recorder.once("dropped", function=original.__name__, p=float(p))
        return original(*args, **kwargs)

    def around_backward(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Note a backward pass, and which parameters of a DDP model it does not reach."""
        if self._passive():
            return original(tensors, *args, **kwargs)
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        self._counts["backward"] += 1
        looked = self._counts["backward"] <= _GRAPHS
        with self._recorder.unwatched():
            reached = {id(leaf) for leaf in leaves_of(loss)} if self._pending and looked else ()
            unused = {
                self._weights.models[model]: [
                    name
                    for name, p in model.named_parameters()
                    if p.requires_grad and id(p) not in reached
                ]
                for model in self._weights.trained.alive()
                if self._weights.models[model] in self._pending and looked
            }
        self._recorder.note("backward", sync=bool(self._pending), unused=unused)
        self._pending.clear()
        self._in_backward = True
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._in_backward = False


@functools.cache
def _kind_of(classes: tuple[type, ...]) -> str | None:
    names = {one.__name__ for one in classes}
    if "DistributedDataParallel" in names:
        return "ddp"
    return "fsdp" if names & {"FullyShardedDataParallel", "FSDPModule"} else None


@functools.cache
def _keeps_at(classes: tuple[type, ...]) -> str:
    return next((_INSIDE[one.__name__] for one in classes if one.__name__ in _INSIDE), "")


def _peeled(module: nn.Module) -> tuple[nn.Module, str | None, nn.Module | None]:
    """Return a model without what wraps it, the kind of the wrapper, and the wrapper."""
    kind, wrapper = None, None
    while True:
        found = _kind_of(type(module).__mro__)
        if found:
            kind, wrapper = found, module
        name = _keeps_at(type(module).__mro__)
        inside = getattr(module, name, None) if name else None
        if not isinstance(inside, nn.Module):
            return module, kind, wrapper
        module = inside


def _depends_on_mode(part: nn.Module) -> bool:
    """Whether a layer does something else in training than in evaluation."""
    if isinstance(part, nn.modules.dropout._DropoutNd):  # noqa: SLF001 - there is no public name
        return part.p > 0
    return isinstance(part, _NormBase) and part.track_running_stats


def _is_checkpointed() -> bool:
    """Whether a block of a model is called without gradients because they are computed later."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - a stack inspected at each call
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def _statistics(model: nn.Module) -> list[int | None]:
    norms = (one for one in model.modules() if isinstance(one, _NormBase) and one.training)
    return [checksum(one.running_mean) for one in norms if one.running_mean is not None]
