"""Watch the model: what wraps it, its forward and backward passes, its losses, steps and weights.

| event | when | facts |
|---|---|---|
| wrap | DDP or FSDP wraps a model | wrapper, model, model_id, parameters, and DDP's settings |
| model | its first forward pass with gradients | model, model_id, wrapper, batch_norms, shapes |
| forward | the outermost call of a module | model_id of what is inside all wrappers, n, rows |
| criterion | the outermost call of a loss | name, n, reduction, value |
| backward | before it | loss, sync, requires_grad, unused: what the loss leaves out, by model_id |
| optimizer | one is made | optimizer_id, held |
| step | after it | grads before it, strangers: held tensors of no model, unheld: by model_id |
| weights | before the first step, after some | checksums of parameters and buffers |

Gradients and weights are looked at in the first three steps and rarely then; other steps have no
`grads`. A gradient that is all zero has the checksum 0. Keys that are ids are text once read.
"""

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.checking.job import Job
from samestep.checking.recorder import Recorder, checksum, row_hashes
from samestep.data.trees import tree_leaves
from samestep.script.patches import patched
from samestep.training.side_effects import leaves_of

_INSIDE = {
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "_FabricModule": "_forward_module",
}
"""Classes that hand their inputs to another module, and where they keep it."""
_LOSSES = tuple(name for name in dir(F) if name.endswith(("_loss", "entropy", "_with_logits")))
_ROWS_OF, _NOTED, _GRAPHS = 200, 20_000, 50

_Made = tuple[str, weakref.ref[nn.Module], weakref.ref[nn.Module], weakref.ref[Tensor]]
"""A parameter as an optimizer was made: its name, its model, the part that owns it, itself."""


@contextmanager
def watching(recorder: Recorder, job: Job) -> Iterator[None]:
    """Note while inside."""
    del job
    watch = _Watch(recorder)
    with contextlib.ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(watch.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(watch.after_step).remove)
        stack.enter_context(
            patched(
                (DistributedDataParallel, "__init__", watch.around_wrap),
                (torch.autograd, "backward", watch.around_backward),
                (Optimizer, "__init__", watch.around_optimizer),
                *((F, name, watch.around_loss) for name in _LOSSES),
            )
        )
        call = nn.Module.__call__
        stack.callback(setattr, nn.Module, "__call__", call)
        nn.Module.__call__ = watch.noted_call(call)  # type: ignore[method-assign]
        yield


class _Numbers:
    """Number objects in the order in which they are first seen, without keeping them alive."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._count = 0

    def __getitem__(self, one: Any) -> int:
        ref, number = self._seen.get(id(one), (None, 0))
        if ref is None or ref() is not one:
            self._count += 1
            number = self._count
            self._seen[id(one)] = weakref.ref(one), number
        return number

    def add(self, one: Any) -> None:
        """Number it if it is new."""
        self[one]

    def __contains__(self, one: Any) -> bool:
        return id(one) in self._seen and self._seen[id(one)][0]() is one

    def alive(self) -> list[Any]:
        """Return those that still exist, in order."""
        return [one for ref, _ in self._seen.values() if (one := ref()) is not None]


class _Watch:
    """What is known of the models of one rank."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._pid = os.getpid()  # workers of a loader are forked with all of this
        self._depth = 0  # of calls of modules with parameters
        self._in_loss = self._in_backward = False
        self._stepping = 0
        self._models, self._optimizers, self._held = _Numbers(), _Numbers(), _Numbers()
        self._trained = _Numbers()  # those that ran forward with gradients
        self._wrapped: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[nn.Module]]] = {}
        """Each part of a wrapped model, with the model."""
        self._pending: set[int] = set()  # DDP models whose next backward meets the other ranks'
        self._recent: set[int] = set()  # models that ran forward with gradients since the last step
        self._counts: dict[tuple[str, int], int] = {}
        self._made_for: dict[int, list[_Made]] = {}
        self._grads: dict[str, Any] = {}

    def _count(self, what: str, number: int) -> int:
        count = self._counts[what, number] = self._counts.get((what, number), 0) + 1
        return count

    # Wrapping

    def around_wrap(self, original: Callable[..., Any], ddp: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(ddp, *args, **kwargs)
        self._note_wrap(ddp, "ddp")
        return made

    def _note_wrap(self, wrapper: Any, kind: str) -> None:
        model, *_ = _peeled(wrapper)
        for part in model.modules():
            self._wrapped[id(part)] = weakref.ref(part), weakref.ref(model)
        settings = ("find_unused_parameters", "device_ids", "broadcast_buffers", "static_graph")
        self._recorder.note(
            "wrap",
            wrapper=kind,
            model=type(model).__name__,
            model_id=self._models[model],
            parameters=sum(p.numel() for p in model.parameters() if not is_lazy(p)),
            own=self._recorder.called_by_user(),
            **{name: getattr(wrapper, name, None) for name in settings},
        )

    # Forward

    def noted_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Module.__call__` that notes its outermost calls."""

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth or self._passive():
                return original(module, *args, **kwargs)
            if next(module.parameters(), None) is None:
                return self._call_loss(original, module, args, kwargs)
            if _peeled(module)[1] is None and any(map(_kind_of, module.modules())):
                return original(module, *args, **kwargs)  # its parts are called in wrappers
            self._note_forward(module, args, kwargs)
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        return call

    def _passive(self) -> bool:
        """Whether this is a worker, a recomputation within backward or a call of a watcher."""
        return self._in_backward or self._recorder.quiet > 0 or os.getpid() != self._pid

    def _note_forward(self, called: nn.Module, args: Any, kwargs: Any) -> None:
        part, kind, wrapper = _peeled(called)
        model = part if kind else self._whole(part)
        number = self._models[model]
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in part.parameters())
        sync = getattr(wrapper, "require_backward_grad_sync", None)
        if grad:
            if model not in self._trained:
                self._note_model(model, kind)
            self._recent.add(number)
            if sync or kind == "fsdp":
                self._pending.add(number)
        count = self._count("forward", number)
        if count > _NOTED:
            return
        with self._recorder.unwatched():
            tensor = _first_tensor((args, kwargs))
            rows = row_hashes(tensor) if tensor is not None and count <= _ROWS_OF else []
        self._recorder.note(
            "forward",
            model=type(model).__name__,
            model_id=number,
            wrapped=kind is not None,
            inner=kind is None and any(self._wrapper_of(one) for one in part.modules()),
            training=part.training,
            grad=grad,
            n=_length(tensor),
            rows=rows,
            sync=sync,
        )

    def _wrapper_of(self, part: nn.Module) -> nn.Module | None:
        """Return the model that was wrapped and has this part, or None."""
        ref, model = self._wrapped.get(id(part), (None, None))
        return model() if ref is not None and model is not None and ref() is part else None

    def _whole(self, part: nn.Module) -> nn.Module:
        return self._wrapper_of(part) or part

    def _note_model(self, model: nn.Module, kind: str | None) -> None:
        self._trained.add(model)
        number = self._models[model]
        named = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
        self._recorder.note(
            "model",
            model=type(model).__name__,
            model_id=number,
            wrapper=kind,
            batch_norms=[n for n, m in named if m.training and not isinstance(m, SyncBatchNorm)],
            shapes={n: list(p.shape) for n, p in model.named_parameters() if not is_lazy(p)},
        )
        self._note_weights(model)

    def _note_weights(self, model: nn.Module) -> None:
        with self._recorder.unwatched():
            parameters = dict(model.named_parameters())
            sums = {n: checksum(p) for n, p in parameters.items()}
            buffers = {n: checksum(b) for n, b in model.named_buffers()}
        self._recorder.note(
            "weights",
            model=type(model).__name__,
            model_id=self._models[model],
            parameters=sums,
            buffers=buffers,
            sharded=any(hasattr(p, "to_local") for p in parameters.values()),
        )

    # Losses

    def around_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._in_loss or self._passive():
            return original(*args, **kwargs)
        return self._call_loss(original, None, args, kwargs)

    def _call_loss(self, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        before, self._in_loss = self._in_loss, True
        try:
            value = original(*(() if module is None else (module,)), *args, **kwargs)
        finally:
            self._in_loss = before
        # Not an activation, a transform of a data set, or a metric.
        loss = module is None or isinstance(module, nn.modules.loss._Loss)  # noqa: SLF001
        metric = type(module).__module__.startswith("torchmetrics")
        if before or metric or not isinstance(value, Tensor) or not (loss or value.numel() == 1):
            return value
        if self._count("criterion", 0) <= _NOTED:
            with self._recorder.unwatched():
                tensor = _first_tensor((args, kwargs))
                one = value.numel() == 1 and value.device.type == "cpu"
                number = float(value) if one else None
            self._recorder.note(
                "criterion",
                name=original.__name__ if module is None else type(module).__name__,
                n=_length(tensor),
                reduction=getattr(module, "reduction", None) or kwargs.get("reduction", "mean"),
                value=number,
            )
        return value

    # Backward

    def around_backward(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self._passive():
            return original(tensors, *args, **kwargs)
        loss = tensors if isinstance(tensors, Tensor) else next(iter(tensors))
        looked = self._count("backward", 0) <= _GRAPHS
        with self._recorder.unwatched():
            reached = {id(leaf) for leaf in leaves_of(loss)} if self._pending and looked else ()
            unused = {
                self._models[model]: [
                    name
                    for name, p in model.named_parameters()
                    if p.requires_grad and id(p) not in reached
                ]
                for model in self._trained.alive()
                if self._models[model] in self._pending and looked
            }
            value = float(loss) if loss.numel() == 1 else None
        self._recorder.note(
            "backward",
            loss=value,
            sync=bool(self._pending),
            requires_grad=loss.requires_grad,
            unused=unused,
        )
        self._pending.clear()
        self._in_backward, self._stepping = True, 0
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._in_backward = False

    # Steps

    def around_optimizer(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        held = self._hold(optimizer)
        number = self._optimizers[optimizer]
        frame = self._recorder.frame()
        near = list(frame.f_locals.values()) if frame is not None else []
        self._made_for[number] = [
            (f"{name}.{one}", weakref.ref(model), weakref.ref(part), weakref.ref(tensor))
            for model in near
            if isinstance(model, nn.Module)
            for name, part in model.named_modules()
            for one, tensor in part._parameters.items()  # noqa: SLF001 - by owner
            if tensor is not None and id(tensor) in held
        ]
        self._recorder.note(
            "optimizer", optimizer=type(optimizer).__name__, optimizer_id=number, held=len(held)
        )

    def _hold(self, optimizer: Optimizer) -> dict[int, Tensor]:
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        for tensor in held.values():
            self._held.add(tensor)
        return held

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at the gradients before the step, which may change them."""
        self._stepping += 1
        if self._stepping == 1:  # not one optimizer within another
            count = self._count("step", self._optimizers[optimizer])
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            self._grads = {} if callable(closure) else self._look(optimizer, count)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Note the step, and the weights after it."""
        self._stepping -= 1
        if self._stepping > 0 or self._passive():
            return
        number = self._optimizers[optimizer]
        count = self._counts["step", number]
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._recorder.note(
            "step",
            optimizer=type(optimizer).__name__,
            optimizer_id=number,
            number=count,
            lr=float(optimizer.param_groups[0].get("lr", 0.0)),
            held=len(held),
            **(self._grads or self._look(optimizer, count)),
        )
        if _sampled(count):
            for model in self._trained.alive():
                if any(id(p) in held for p in model.parameters()):
                    self._note_weights(model)
        self._recent.clear()

    def _look(self, optimizer: Optimizer, count: int) -> dict[str, Any]:
        """Return what the optimizer steps with, and which tensors are astray."""
        if not _sampled(count):
            return {"grads": {}}
        self._hold(optimizer)
        models = self._trained.alive()
        named = {id(p): n for model in models for n, p in model.named_parameters()}
        grads: dict[str, int | None] = {}
        strangers, still = [], []
        with self._recorder.unwatched():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    name = named.get(id(p))
                    if name is None:
                        strangers.append([list(p.shape), p.grad is not None])
                    else:
                        name = f"{name} " if name in grads else name  # of another model
                        grads[name] = _print_of(p.grad)
                        still += [name] if not group.get("lr", 1.0) else []
            unheld = {
                self._models[model]: {
                    n: list(p.shape)
                    for n, p in model.named_parameters()
                    if p not in self._held and _print_of(p.grad)
                }
                for model in models
                if self._models[model] in self._recent
            }
        replaced = self._replaced(optimizer) if strangers else {}
        return {
            "grads": grads,
            "still": still,
            "strangers": strangers,
            "unheld": {number: names for number, names in unheld.items() if names},
            **replaced,
        }

    def _replaced(self, optimizer: Optimizer) -> dict[str, list[str]]:
        """Return the names that mean other tensors than when the optimizer was made."""
        tensors, parts = [], []
        for name, model, owner, tensor in self._made_for.get(self._optimizers[optimizer], ()):
            whole = model()
            if whole is None:
                continue
            path, _, own = name.rpartition(".")
            now = dict(whole.named_modules()).get(path)
            if now is None or now is not owner():
                parts.append(name)
            elif getattr(now, own, None) is not tensor():
                tensors.append(name)
        return {"tensors_replaced": tensors, "parts_replaced": parts}


def _sampled(step: int) -> bool:
    return step <= 3 or (step % 5 == 0 and step <= 100) or step % 100 == 0


def _kind_of(module: nn.Module) -> str | None:
    names = {kind.__name__ for kind in type(module).__mro__}
    if "DistributedDataParallel" in names:
        return "ddp"
    return "fsdp" if names & {"FullyShardedDataParallel", "FSDPModule"} else None


def _peeled(module: nn.Module) -> tuple[nn.Module, str | None, nn.Module | None]:
    """Return a model without what wraps it, the kind of the wrapper, and the wrapper."""
    kind, wrapper = None, None
    while True:
        found = _kind_of(module)
        if found:
            kind, wrapper = found, module
        name = next(
            (_INSIDE[c.__name__] for c in type(module).__mro__ if c.__name__ in _INSIDE), ""
        )
        inside = getattr(module, name, None) if name else None
        if not isinstance(inside, nn.Module):
            return module, kind, wrapper
        module = inside


def _first_tensor(tree: Any) -> Tensor | None:
    return next((leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)), None)


def _length(tensor: Tensor | None) -> int | None:
    return None if tensor is None or not tensor.ndim else len(tensor)


def _print_of(gradient: Tensor | None) -> int | None:
    """Return a checksum that is 0 where all is zero, and None without a gradient."""
    if gradient is None:
        return None
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if local.layout != torch.strided:
        local = local.coalesce().values() if local.layout == torch.sparse_coo else local.to_dense()
    return (checksum(local) or 0) if bool(local.any()) else 0
