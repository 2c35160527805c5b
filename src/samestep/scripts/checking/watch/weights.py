"""Watch what trains a model: optimizers, their steps, and the weights, also as they are saved.

| event | when | facts |
|---|---|---|
| model | its first forward pass with gradients | model_id, batch_norms, shapes |
| optimizer | one is made | optimizer_id |
| step | after it | grads before it, strangers: held tensors of no model, unheld, thawed |
| weights | before the first step, after some | checksums of parameters and buffers, sharded |
| kept | before some steps | the same: what the script itself did to the weights is in it |
| saved | torch.save gets weights | fresh: as trained, stale: as before, live: a module's own |
| loaded_itself | a model loads its own tensors of an earlier step | taken: where, at: step |

Gradients and weights are looked at in the first three steps and rarely then; other steps have no
`grads`. A gradient that is all zero has the checksum 0.
"""

import contextlib
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from samestep.base.patches import patched
from samestep.base.trees import own_part
from samestep.scripts.checking.recorder import Recorder, checksum
from samestep.scripts.hooks import step_closure, tensors_of

_Made = tuple[str, weakref.ref[nn.Module], weakref.ref[nn.Module], weakref.ref[Tensor]]
"""A parameter as an optimizer was made: its name, its model, the part that owns it, itself."""
_KEPT, _VALUES = (3, 10, 20), 256
_LOOKED = (1, 2, 3, 5, 7, 10, 15)
_MEANT = {"require_grad", "requires_grads", "require_grads", "required_grad"}  # requires_grad


class Numbers:
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


class Weights:
    """One rank's optimizers, and the weights that they train."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.models, self.trained = Numbers(), Numbers()  # trained: called with gradients
        self._optimizers, self._held = Numbers(), Numbers()
        self._recent: set[int] = set()  # models called with gradients since the last step
        self._steps: Counter[int] = Counter()
        self._stepping: list[int] = []  # one optimizer may be within another
        self._grads: dict[str, Any] = {}
        self._frozen: list[tuple[str, Tensor, int | None]] = []
        """What the optimizer holds without a gradient to it, as it was before the step."""
        self._asked: deque[weakref.ref[nn.Module]] = deque(maxlen=16)
        self._made_for: dict[int, list[_Made]] = {}
        self._at_start: dict[int, dict[str, int | None]] = {}
        self._live: dict[int, weakref.ref[Any]] = {}  # state dicts that a module has given
        self._taken: dict[int, tuple[int, str]] = {}  # after which step, and where

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Note while inside."""
        with contextlib.ExitStack() as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            stack.enter_context(
                patched(
                    (Optimizer, "__init__", self._around_optimizer),
                    (nn.Module, "named_parameters", self._around_named),
                    (nn.Module, "state_dict", self._around_state),
                    (nn.Module, "load_state_dict", self._around_load),
                    (torch, "save", self._around_save),
                )
            )
            yield

    def begin(self, model: nn.Module) -> None:
        """Note a model that is called with gradients for the first time."""
        number = self.models[model]
        self._recent.add(number)
        if model in self.trained:
            return
        self.trained.add(model)
        # Before the model: a rank may be ended in between, and rules look for a model's weights.
        self._at_start[number] = self._note_weights(model)
        named = [(n, m) for n, m in model.named_modules() if isinstance(m, _BatchNorm)]
        self._recorder.note(
            "model",
            model=type(model).__name__,
            model_id=number,
            batch_norms=[n for n, m in named if m.training and not isinstance(m, SyncBatchNorm)],
            frozen_norms=[
                n for n, m in named if m.training and m.affine and not m.weight.requires_grad
            ],
            shapes={n: list(p.shape) for n, p in model.named_parameters() if not is_lazy(p)},
            frozen_in_vain=[
                *(n for n, m in model.named_modules() if vars(m).get("requires_grad") is False),
                *(n for n, p in model.named_parameters() if _MEANT.intersection(vars(p))),
            ],
        )

    def _note_weights(self, model: nn.Module, kind: str = "weights") -> dict[str, int | None]:
        with self._recorder.unwatched():
            parameters = dict(model.named_parameters())
            sums = {n: checksum(p) for n, p in parameters.items()}
            buffers = {n: checksum(b) for n, b in model.named_buffers()}
        self._recorder.note(
            kind,
            model=type(model).__name__,
            model_id=self.models[model],
            parameters=sums,
            buffers=buffers,
            sharded=any(hasattr(p, "to_local") for p in parameters.values()),
        )
        return sums

    def _around_optimizer(
        self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        held = self._hold(optimizer)
        number = self._optimizers[optimizer]
        asked = {id(one): one for ref in self._asked if (one := ref()) is not None}
        self._made_for[number] = [
            (f"{name}.{one}", weakref.ref(model), weakref.ref(part), weakref.ref(tensor))
            for model in asked.values()
            for name, part in model.named_modules()
            for one, tensor in part._parameters.items()  # noqa: SLF001 - by owner
            if tensor is not None and id(tensor) in held
        ]
        self._recorder.note("optimizer", optimizer_id=number)

    def _around_named(
        self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Remember who was asked for parameters: they may be for an optimizer."""
        if not torch.compiler.is_compiling() and not self._recorder.quiet:
            self._asked.append(weakref.ref(module))
        return original(module, *args, **kwargs)

    def _hold(self, optimizer: Optimizer) -> dict[int, Tensor]:
        held = {id(p): p for p in tensors_of(optimizer)}
        for tensor in held.values():
            self._held.add(tensor)
        return held

    def _of(self, optimizer: Optimizer) -> list[nn.Module]:
        """Return the models of which an optimizer holds weights."""
        held = {id(p) for p in tensors_of(optimizer)}
        return [m for m in self.trained.alive() if any(id(p) in held for p in m.parameters())]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Look at the gradients before the step, which may change them."""
        if self._recorder.quiet:
            return
        if id(optimizer) in self._stepping:  # an error has ended its last step
            self._stepping.clear()
        self._stepping.append(id(optimizer))
        if len(self._stepping) == 1:
            number = self._optimizers[optimizer]
            self._steps[number] += 1
            if self._steps[number] in _KEPT:
                for model in self._of(optimizer):
                    self._note_weights(model, "kept")
            self._grads = {} if step_closure(args, kwargs) else self._look(optimizer)
            self._frozen = self._frozen_of(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping or self._stepping.pop() != id(optimizer) or self._stepping:
            return
        number = self._optimizers[optimizer]
        count = self._steps[number]
        facts = self._grads or self._look(optimizer)
        models = self._of(optimizer)
        with self._recorder.unwatched():
            thawed = [name for name, p, before in self._frozen if checksum(p) != before]
        self._recorder.note(
            "step",
            optimizer=type(optimizer).__name__,
            optimizer_id=number,
            lr=float(optimizer.param_groups[0].get("lr", 0.0)),
            models=[self.models[model] for model in models],
            thawed=thawed,
            **facts,
        )
        if sampled(count):
            unheld = facts.get("unheld", {})
            for model in self.trained.alive():
                if model in models or self.models[model] in unheld:
                    self._note_weights(model)
        self._recent.clear()

    def _frozen_of(self, optimizer: Optimizer) -> list[tuple[str, Tensor, int | None]]:
        if not sampled(self._steps[self._optimizers[optimizer]]):
            return []
        held = {id(p) for p in tensors_of(optimizer)}
        with self._recorder.unwatched():
            return [
                (name, p, checksum(p))
                for model in self.trained.alive()
                for name, p in model.named_parameters()
                if id(p) in held and not p.requires_grad and not print_of(p.grad)
            ]

    def _look(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return what the optimizer steps with, and which tensors are astray."""
        if not sampled(self._steps[self._optimizers[optimizer]]):
            return {"grads": {}}
        self._hold(optimizer)
        models = self.trained.alive()
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
                        grads[name] = print_of(p.grad)
                        still += [name] if not group.get("lr", 1.0) else []
            unheld = {
                self.models[model]: {
                    n: list(p.shape)
                    for n, p in model.named_parameters()
                    if p not in self._held and print_of(p.grad)
                }
                for model in models
                if self.models[model] in self._recent
            }
        return {
            "grads": grads,
            "still": still,
            "strangers": strangers,
            "unheld": {number: names for number, names in unheld.items() if names},
            "tensors_replaced": self._replaced(optimizer) if strangers else [],
        }

    def _replaced(self, optimizer: Optimizer) -> list[str]:
        """Return the names that mean other tensors than when the optimizer was made."""
        found = []
        for name, model, owner, tensor in self._made_for.get(self._optimizers[optimizer], ()):
            whole = model()
            if whole is None:
                continue
            path, _, own = name.rpartition(".")
            part = dict(whole.named_modules()).get(path)
            if part is not None and part is owner() and getattr(part, own, None) is not tensor():
                found.append(name)
        return found

    def _around_state(
        self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
    ) -> Any:
        state = original(module, *args, **kwargs)
        with contextlib.suppress(TypeError):  # a plain dict has no weak references
            self._live[id(state)] = weakref.ref(state)
            if not args and not kwargs:  # of the whole
                self._taken[id(state)] = self._recorder.hooks.steps, self._recorder.where()
        return state

    def _around_load(
        self, original: Callable[..., Any], module: Any, state: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Note weights that are loaded into the tensors that they are."""
        ref, (step, where) = self._live.get(id(state)), self._taken.get(id(state), (0, ""))
        taken = ref() if ref is not None else None
        if taken is state and taken is not None and step < self._recorder.hooks.steps:
            held = {t.data_ptr() for t in taken.values() if isinstance(t, Tensor)}
            own = {p.data_ptr() for p in module.parameters()}
            if own and own <= held:
                self._recorder.once("loaded_itself", taken=where, at=step)
        return original(module, state, *args, **kwargs)

    def _around_save(
        self, original: Callable[..., Any], saved: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._recorder.unwatched():
            states = list(self._states(saved))
            found = [
                (live, {checksum(t) for t in state.values() if isinstance(t, Tensor)})
                for live, state in states
            ]
            compared = [
                (model, live, *self._compare(model, sums))
                for live, sums in found
                for model in self.trained.alive()
            ]
        for model, live, fresh, stale in compared:
            if fresh or stale:
                self._recorder.note(
                    "saved",
                    model=type(model).__name__,
                    model_id=self.models[model],
                    live=live,
                    fresh=fresh,
                    stale=stale,
                )
        return original(saved, *args, **kwargs)

    def _states(self, saved: Any, depth: int = 3) -> Iterator[tuple[bool, Mapping[str, Any]]]:
        """Yield the state dicts in what is saved, and whether they are a module's own."""
        if isinstance(saved, nn.Module):
            yield True, saved.state_dict()
        elif isinstance(saved, Mapping):
            ref = self._live.get(id(saved))
            yield ref is not None and ref() is saved, saved
            for part in saved.values() if depth else ():
                yield from self._states(part, depth - 1)

    def _compare(self, model: nn.Module, saved: set[int | None]) -> tuple[bool, bool]:
        """Return whether saved tensors are the weights that were trained, or those before."""
        start = self._at_start[self.models[model]]
        now = {n: checksum(p) for n, p in model.named_parameters()}
        changed = [n for n, value in now.items() if start.get(n) != value]
        fresh = any(now[n] in saved for n in changed)
        return fresh, bool(changed) and not fresh and all(start.get(n) in saved for n in changed)


def sampled(step: int) -> bool:
    """Whether gradients and weights are looked at in a step."""
    return step in _LOOKED or (step % 10 == 0 and step <= 100) or step % 100 == 0


def print_of(gradient: Tensor | None) -> int | None:
    """Return a checksum that is 0 where all is zero, and None without a gradient."""
    if gradient is None:
        return None
    local = own_part(gradient)
    if local.layout != torch.strided:
        local = local.coalesce().values() if local.layout == torch.sparse_coo else local.to_dense()
    some = bool(local.flatten()[:_VALUES].any()) or bool(local.any())
    return (checksum(local) or 0) if some else 0
