"""Watch what trains a model: optimizers, their steps, and the weights, also as they are saved.

Gradients and weights are looked at in the first three steps and rarely then; other steps have no
`grads`.
"""

import contextlib
import math
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from samestep.base.trees import own_part
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, checksum
from samestep.scripts.hooks import step_closure, tensors_of
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_NAMED_PARAMETERS = Probe((nn.Module, "named_parameters"))
_STATE_DICT = Probe((nn.Module, "state_dict"))
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

    def __getitem__(self, key: Any) -> int:
        ref, number = self._seen.get(id(key), (None, 0))
        if ref is None or ref() is not key:
            self._count += 1
            number = self._count
            self._seen[id(key)] = weakref.ref(key), number
        return number

    def add(self, key: Any) -> None:
        """Number it if it is new."""
        self[key]

    def __contains__(self, key: Any) -> bool:
        return id(key) in self._seen and self._seen[id(key)][0]() is key

    def alive(self) -> list[Any]:
        """Return the objects that still exist, in order."""
        return [key for ref, _ in self._seen.values() if (key := ref()) is not None]


class WeightsWatcher:
    """One rank's optimizers, and the weights that they train."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.models, self.trained = Numbers(), Numbers()  # trained: called with gradients
        self._optimizers, self._held, self._loaded = Numbers(), Numbers(), Numbers()
        self._recent: set[int] = set()  # models called with gradients since the last step
        self._steps: Counter[int] = Counter()
        self._stepping: list[int] = []  # one optimizer may be within another
        self._begun: ev.OptimizerStep | None = None
        self._frozen: list[tuple[str, Tensor, int | None]] = []
        """What the optimizer holds without a gradient to it, as it was before the step."""
        self._asked: deque[weakref.ref[nn.Module]] = deque(maxlen=16)
        self._made_for: dict[int, list[_Made]] = {}
        self._at_start: dict[int, ev.Checksums] = {}
        self._live: dict[int, weakref.ref[Any]] = {}  # state dicts that a module has given
        self._taken: dict[int, tuple[int, str]] = {}  # after which step, and where

    def installed(self) -> AbstractContextManager[None]:
        """Note while inside."""
        return listening(
            (probes.BEFORE_STEP, self._before_step),
            (probes.AFTER_STEP, self._after_step),
            (probes.OPTIMIZER_MADE, self._on_optimizer),
            (_NAMED_PARAMETERS, self._on_named_parameters),
            (_STATE_DICT, self._on_state_dict),
            (probes.LOAD_STATE, self._on_load_state),
            (probes.SAVE, self._on_save),
        )

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
            ev.ModelTrained(
                type(model).__name__,
                number,
                batch_norms=[
                    n for n, m in named if m.training and not isinstance(m, SyncBatchNorm)
                ],
                frozen_norms=[
                    n for n, m in named if m.training and m.affine and not m.weight.requires_grad
                ],
                shapes={n: list(p.shape) for n, p in model.named_parameters() if not is_lazy(p)},
                tables=[n for n, b in model.named_buffers() if b.squeeze().ndim > 1],
                frozen_in_vain=[
                    *(n for n, m in model.named_modules() if vars(m).get("requires_grad") is False),
                    *(n for n, p in model.named_parameters() if _MEANT.intersection(vars(p))),
                ],
            )
        )

    def _note_weights(
        self, model: nn.Module, kind: type[ev.ModelSums] = ev.WeightSums
    ) -> ev.Checksums:
        with self._recorder.unwatched():
            parameters = dict(model.named_parameters())
            sums = {n: checksum(p) for n, p in parameters.items()}
            buffers = {n: checksum(b) for n, b in model.named_buffers()}
        sharded = any(hasattr(p, "to_local") for p in parameters.values())
        number = self.models[model]
        self._recorder.note(
            kind(type(model).__name__, number, parameters=sums, buffers=buffers, sharded=sharded)
        )
        return sums

    def _on_optimizer(self, call: ProbedCall) -> Around:
        optimizer = call.args[0]
        yield
        held = self._hold(optimizer)
        number = self._optimizers[optimizer]
        asked = {id(model): model for ref in self._asked if (model := ref()) is not None}
        self._made_for[number] = [
            (f"{name}.{own}", weakref.ref(model), weakref.ref(part), weakref.ref(tensor))
            for model in asked.values()
            for name, part in model.named_modules()
            for own, tensor in part._parameters.items()  # noqa: SLF001 - by owner
            if tensor is not None and id(tensor) in held
        ]
        self._recorder.note(ev.OptimizerMade(number))

    def _on_named_parameters(self, call: ProbedCall) -> None:
        """Remember who was asked for parameters: they may be for an optimizer."""
        if not self._recorder.quiet:
            self._asked.append(weakref.ref(call.args[0]))

    def _hold(self, optimizer: Optimizer) -> dict[int, Tensor]:
        held = {id(p): p for p in tensors_of(optimizer)}
        for tensor in held.values():
            self._held.add(tensor)
        return held

    def _of(self, optimizer: Optimizer) -> list[nn.Module]:
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
                    self._note_weights(model, ev.WeightSumsBefore)
            self._begun = None if step_closure(args, kwargs) else self._begin_step(optimizer)
            self._frozen = self._frozen_of(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._stepping or self._stepping.pop() != id(optimizer) or self._stepping:
            return
        event = self._begun or self._begin_step(optimizer)
        models = self._of(optimizer)
        with self._recorder.unwatched():
            event.thawed = [name for name, p, before in self._frozen if checksum(p) != before]
        event.models = [self.models[model] for model in models]
        event.lr = float(optimizer.param_groups[0].get("lr", 0.0))
        self._recorder.note(event)
        if sampled(self._steps[event.optimizer_id]):
            for model in self.trained.alive():
                if model in models or str(self.models[model]) in event.unheld:
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

    def _begin_step(self, optimizer: Optimizer) -> ev.OptimizerStep:
        """Return an event with what the optimizer steps with, and which tensors are astray."""
        number = self._optimizers[optimizer]
        event = ev.OptimizerStep(type(optimizer).__name__, number)
        if not sampled(self._steps[number]):
            return event
        self._hold(optimizer)
        models = self.trained.alive()
        named = {id(p): n for model in models for n, p in model.named_parameters()}
        with self._recorder.unwatched():
            for group in optimizer.param_groups:
                for p in group["params"]:
                    name = named.get(id(p))
                    if name is None:
                        event.strangers.append(([*p.shape], print_of(p.grad)))
                    else:
                        name = f"{name} " if name in event.grads else name  # of another model
                        event.grads[name] = print_of(p.grad)
                        event.still += [name] if not group.get("lr", 1.0) else []
            unheld = {
                str(self.models[model]): {
                    n: list(p.shape)
                    for n, p in model.named_parameters()
                    if p not in self._held and print_of(p.grad)
                }
                for model in models
                if self.models[model] in self._recent
            }
        event.unheld = {model: names for model, names in unheld.items() if names}
        event.tensors_replaced = self._replaced(optimizer) if event.strangers else []
        return event

    def _replaced(self, optimizer: Optimizer) -> list[str]:
        """Return the names that mean other tensors than when the optimizer was made."""
        replaced = []
        for name, model, owner, tensor in self._made_for.get(self._optimizers[optimizer], ()):
            whole = model()
            if whole is None:
                continue
            path, _, own = name.rpartition(".")
            part = dict(whole.named_modules()).get(path)
            if part is not None and part is owner() and getattr(part, own, None) is not tensor():
                replaced.append(name)
        return replaced

    def _on_state_dict(self, call: ProbedCall) -> Around:
        state = yield
        with contextlib.suppress(TypeError):  # a plain dict has no weak references
            self._live[id(state)] = weakref.ref(state)
            if len(call.args) == 1 and not call.kwargs:  # of the whole
                self._taken[id(state)] = self._recorder.hooks.steps, self._recorder.where()

    def _on_load_state(self, call: ProbedCall) -> Around:
        """Note weights that are loaded into the tensors that they are, and by what names."""
        module, state = call.args[0], call.argument(1, "state_dict")
        ref, (step, where) = self._live.get(id(state)), self._taken.get(id(state), (0, ""))
        taken = ref() if ref is not None else None
        if taken is state and taken is not None and step < self._recorder.hooks.steps:
            held = {t.data_ptr() for t in taken.values() if isinstance(t, Tensor)}
            own = {p.data_ptr() for p in module.parameters()}
            if own and own <= held:
                self._recorder.once(ev.LoadedItself(taken=where, at=step))
        into = self._loaded[next(module.parameters(), module)]  # `assign=True` replaces them
        keys = yield
        others = getattr(keys, "unexpected_keys", ())
        strangers = list(others) if len(others) == len(state) else []
        names = [name for name, _ in module.named_parameters()] if strangers else []
        self._recorder.note(ev.NamesLoaded(into, strangers, names))

    def _on_save(self, call: ProbedCall) -> None:
        with self._recorder.unwatched():
            states = [
                (live, {checksum(t) for t in state.values() if isinstance(t, Tensor)})
                for live, state in self._states(call.argument(0, "obj"))
            ]
            compared = [
                (model, live, *self._compare(model, sums))
                for live, sums in states
                for model in self.trained.alive()
            ]
        for model, live, fresh, stale, parts in compared:
            if fresh or stale:
                name, number = type(model).__name__, self.models[model]
                self._recorder.note(
                    ev.WeightsSaved(name, number, live=live, fresh=fresh, stale=stale, parts=parts)
                )

    def _states(self, saved: Any, depth: int = 3) -> Iterator[tuple[bool, Mapping[str, Any]]]:
        """Yield the state dicts in what is saved, and whether they are a module's own."""
        if isinstance(saved, nn.Module):
            yield True, saved.state_dict()
        elif isinstance(saved, Mapping):
            ref = self._live.get(id(saved))
            yield ref is not None and ref() is saved, saved
            for part in saved.values() if depth else ():
                yield from self._states(part, depth - 1)

    def _compare(self, model: nn.Module, saved: set[int | None]) -> tuple[bool, bool, int]:
        """Return whether saved tensors are the weights that were trained, or those before.

        And into how many parts the weights are cut of which they are one.
        """
        start = self._at_start[self.models[model]]
        now = {n: checksum(p) for n, p in model.named_parameters()}
        changed = [n for n, value in now.items() if start.get(n) != value]
        fresh = any(now[n] in saved for n in changed)
        weights = [weight for name, weight in model.named_parameters() if now[name] in saved]
        parts = max(map(_ways_cut, weights), default=1)
        stale = bool(changed) and not fresh and all(start.get(n) in saved for n in changed)
        return fresh, stale, parts


def sampled(step: int) -> bool:
    """Whether gradients and weights are looked at in a step."""
    return step in _LOOKED or (step % 10 == 0 and step <= 100) or step % 100 == 0


def _ways_cut(weight: Tensor) -> int:
    """Return the number of ranks that have a part of a weight each, of which one may be empty."""
    mesh, placements = getattr(weight, "device_mesh", None), getattr(weight, "placements", ())
    cut = (mesh.size(at) for at, place in enumerate(placements) if mesh and place.is_shard())
    return math.prod(cut)


def print_of(gradient: Tensor | None) -> int | None:
    """Return a checksum that is 0 where all is zero, and None without a gradient."""
    if gradient is None or gradient.is_meta:
        return None
    local = own_part(gradient)
    if local.layout != torch.strided:
        local = local.coalesce().values() if local.layout == torch.sparse_coo else local.to_dense()
    some = bool(local.flatten()[:_VALUES].any()) or bool(local.any())
    return (checksum(local) or 0) if some else 0
