"""What a user's own loop trains and its state leaves out: checkpoints would not hold it."""

import gc
import math
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from samestep.base.errors import UserError, kind_of_data, listed, users_frame
from samestep.base.trees import tree_leaves
from samestep.core.learner.agreement import bits_of
from samestep.core.learner.optimizer_state import parameters_in, with_inner
from samestep.core.learner.side_effects import GENERATORS, content
from samestep.core.learner.unkept import Unkept, numbers_in, watched_buffers
from samestep.core.loops.kept_state import KNOWN, Stateful
from samestep.core.session.saver import say
from samestep.launch.ranks.world import World


def check_held(state: Mapping[str, Stateful], trained: Sequence[Any]) -> set[int]:
    """Return the ids of all that is trained; refuse what checkpoints would not hold."""
    modules = [part for part in state.values() if isinstance(part, nn.Module)]
    held = {id(part) for part in (*state.values(), *(p for m in modules for p in m.parameters()))}
    # An object of the user's own may hold an optimizer, and all modules where state names none.
    own = any(not isinstance(part, KNOWN) for part in state.values())
    pieces = [named for part in trained for named in _optimizers_and_parameters(part)]
    lacking = [
        name
        for name, piece in pieces
        if id(piece) not in held
        and not (own and (not modules or isinstance(piece, torch.optim.Optimizer)))
    ]
    if lacking:
        raise UserError(
            f"run.backward was given {listed(lacking)}, which state does not contain, so "
            "checkpoints would not hold it. Add the module and the optimizer to run.epochs(…, "
            "state={…}), and a single parameter as nn.ParameterList([parameter])."
        )
    return {id(part) for part in (*trained, *(piece for _, piece in pieces))}


class LeftOut:
    """Tells once of what changes in training and that no checkpoint holds."""

    def __init__(self, world: World, trained: Mapping[str, Tensor]) -> None:
        self._world, self._trained = world, trained
        self.state: Mapping[str, Stateful] = {}
        self.passed: list[Sequence[Tensor] | torch.optim.Optimizer] = []
        """Of the running batch: what each `run.backward` was for, and which optimizers stepped."""
        self._stepped: set[int] = set()
        self._sources: dict[str, tuple[int, Any]] = {}
        """What the script reads or draws from by itself: its id, and where it is."""
        self._told: set[str] = set()
        self._others: list[tuple[weakref.ref[nn.Module], Tensor]] = []
        self._counts: dict[str, dict[str, str]] = {}
        self._watched: dict[str, tuple[list[str], set[str], set[str]]] = {}
        """By module: its buffers before the first step, when all ranks have the same; of them, what
        could be lost, and what a rank may make of its own samples."""
        self._buffers: dict[str, dict[str, tuple[torch.Size, int]]] = {}
        """By module: the shape and the bits of each buffer at the last look, as `_counts`."""

    def say(self, text: str, *names: str) -> None:
        """Say something once, or once of each of these names."""
        if not self._told.issuperset(names or [text]):
            self._told |= {*(names or [text])}
            say(self._world, text)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note of an optimizer's step; say so where a checkpoint lacks what it has made."""
        self.passed.append(optimizer)
        if self.state and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            if what := _left_out(self.state, optimizer, self._trained.values()):
                self.say(
                    f"warning: {what} is not in state=…, so checkpoints do not hold it, and a "
                    "resumed run would reset it. Add it to run.epochs(…, state={…})."
                )

    def is_accumulating(self) -> bool:
        """Whether an optimizer of the state has not applied gradients of this batch yet.

        Those that are NaN or infinite do not count, as a GradScaler leaves out that step.
        """
        waiting: dict[int, Tensor] = {}
        for part in self.passed:
            if isinstance(part, torch.optim.Optimizer):
                for p in parameters_in(part):
                    waiting.pop(id(p), None)
            else:
                waiting |= {id(p): p for p in part}
        stepping = [part for part in self.state.values() if isinstance(part, torch.optim.Optimizer)]
        grads = [p.grad for part in stepping for p in parameters_in(part) if id(p) in waiting]
        total = sum(float(grad.detach().abs().sum()) for grad in grads if grad is not None)
        return 0 < total < math.inf

    def begin(self) -> None:
        """Remember buffers, and modules that are not in the state, before the first step."""
        entries = self.state.values()
        for name, part in self.state.items():
            if isinstance(part, nn.Module):
                lost, of_rank = watched_buffers(part, self._world)
                names = [n for n, _ in part.named_buffers() if n in lost | of_rank]
                self._watched[name] = names, lost, of_rank
        if not all(isinstance(e, KNOWN) for e in entries):
            return  # another object may hold one
        modules = (m for e in entries if isinstance(e, nn.Module) for m in e.modules())
        held = {id(t) for m in modules for t in _tensors_of(m)}
        every = gc.get_objects()
        kinds = {kind for kind in {*map(type, every)} if issubclass(kind, nn.Module)}
        named = [(m, own) for m in every if type(m) in kinds and (own := _tensors_of(m))]
        others = [(m, own) for m, own in named if held.isdisjoint(map(id, own))]
        self._others = [(weakref.ref(m), bits_of(own)) for m, own in others]

    def look(self, step: int) -> None:
        """Say what has changed, or waits for a later step; all ranks call it."""
        if step <= 2:
            self._look_at_sources()
        for reference, before in self._others:
            module = reference()
            own = [] if module is None else _tensors_of(module)
            if len(own) == len(before) and not torch.equal(bits_of(own), before):
                self.say(
                    f"warning: the weights of a {type(module).__name__} {tuple(own[0].shape)} not "
                    "in state=… have changed, and a resumed run would reset them. If "
                    "training depends on it, as on a teacher or a target network, add it to "
                    "run.epochs(…, state={…}).",
                    "others",
                )
        if self.is_accumulating():
            self.say(
                "warning: gradients of a batch wait for a later one, and a resumed run would lose "
                "them. Use a larger global batch, call run.backward(losses.sum() / batch.rows, "
                "model) for each part of it, and step once."
            )
        for name, part in self.state.items():
            if isinstance(part, nn.Module):
                self._look_at_buffers(name, part)
                if step <= 2:  # the first may fill what later ones only read
                    self._look_at_counts(name, part)

    def _look_at_sources(self) -> None:
        """Say which generators and loaders of the script's have moved on since the last look."""
        before, self._sources = self._sources, _sources_of(self.state)
        for name, (source, place) in self._sources.items():
            if before.get(name, (0, place))[0] == source and before[name][1] != place:
                self.say(
                    f"note: {name} is used from step to step, and no checkpoint holds its "
                    "position: a resumed run starts it again. Draw from the generators of torch, "
                    "NumPy and Python, or from the batch; read other data by batch.indices; or add "
                    "an object with state_dict and load_state_dict to state=…."
                )

    def _look_at_counts(self, name: str, module: nn.Module) -> None:
        now = numbers_in(module)
        before, self._counts[name] = self._counts.get(name, now), now
        if names := [n for n in now if n in before and before[n] != now[n]]:
            self.say(
                f"note: state[{name!r}] counts {listed(names, 3)} in an attribute, which a "
                "resumed run resets. Keep it in a buffer, get_extra_state or run.state."
            )

    def _look_at_buffers(self, name: str, module: nn.Module) -> None:
        names, lost, of_rank = self._watched[name]
        if not names:
            return
        # What a forward registers on one rank by itself must not change what all ranks reduce.
        there, gone = dict(module.named_buffers()), torch.empty(0)
        named = {n: there.get(n, gone) for n in names}
        bits = bits_of([*named.values()])
        most, least = self._world.reduce(torch.stack([bits, -bits]), "max")
        now = {n: (b.shape, int(v)) for (n, b), v in zip(named.items(), bits, strict=True)}
        before, self._buffers[name] = self._buffers.get(name, now), now
        same = [n for n in now if n in before and before[n][0] == now[n][0]]
        apart = [n for n, differs in zip(named, most != -least, strict=True) if differs]
        unkept = Unkept(
            lost=tuple(n for n in same if n in lost and before[n] != now[n]),
            of_rank=tuple(n for n in apart if n in of_rank and named[n].is_floating_point()),
        )
        resumed = "A resumed run gives rank 0's to all ranks."
        remedy = "Add up what it is computed from over all ranks: samestep.dist.reduce_tensor."
        for note in unkept.notes(f"{resumed} {remedy}"):
            self.say(f"note: {note}", *unkept.lost, *unkept.of_rank)


def _sources_of(state: Mapping[str, Stateful]) -> dict[str, tuple[int, Any]]:
    """Return the generators in the script's variables, and the loaders that are being read."""
    found: dict[str, tuple[int, Any]] = {}
    if all(isinstance(entry, KNOWN) for entry in state.values()):  # another object may hold one
        frame = users_frame(sys._getframe())  # noqa: SLF001
        while frame is not None:
            for name, value in frame.f_locals.items():
                if isinstance(value, GENERATORS):
                    found[f"the generator {name}"] = id(value), content(value)
            frame = users_frame(frame.f_back)
        for each in gc.get_objects():
            if issubclass(type(each), _BaseDataLoaderIter):
                data, read = each._dataset, each._num_yielded  # noqa: SLF001
                if not type(data).__module__.startswith("samestep."):
                    found[f"a DataLoader of {kind_of_data(data)}"] = id(each), read
    return found


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module itself, without those of modules in it."""
    every = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    # Others, such as quantized tensors and those of FakeTensorMode, have no bits to read.
    plain = [t for t in every if type(t) in (Tensor, nn.Parameter) and not t.is_quantized]
    return [t for t in plain if t.layout == torch.strided and not t.is_meta]


def _left_out(
    state: Mapping[str, Stateful], optimizer: torch.optim.Optimizer, trained: Iterable[Tensor]
) -> str:
    """Name the part of a stepped optimizer that the state lacks: it or its scheduler; "" if none.

    Only its numbers per weight and its scheduler count, and only where it steps trained weights.
    """
    entries, weights = list(state.values()), {id(tensor) for tensor in trained}
    steps = any(id(p) in weights for p in parameters_in(optimizer))
    if not steps or any(not isinstance(e, KNOWN) for e in entries):
        return ""  # an object of the user's own may hold it
    kind = type(optimizer).__name__
    outer = [e for e in entries if isinstance(e, torch.optim.Optimizer)]
    if optimizer.state and not any(_holds(e, optimizer) for e in outer):
        return f"the optimizer ({kind})"
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # as LRScheduler marks it
    has_scheduler = any(isinstance(e, torch.optim.lr_scheduler.LRScheduler) for e in entries)
    return f"the scheduler of the optimizer ({kind})" if scheduled and not has_scheduler else ""


def _holds(outer: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `outer` is an optimizer or saves its state, too: SAM is made of one, and does not."""
    trees = [*outer.state.values(), *optimizer.state.values()], outer.state_dict()
    of = [{id(v) for v in tree_leaves(tree) if isinstance(v, Tensor)} for tree in trees]
    inside = any(o is optimizer for o in with_inner(outer))
    return outer is optimizer or (inside and len(of[0]) <= len(of[1]))


def _optimizers_and_parameters(part: Any) -> list[tuple[str, Any]]:
    """Return the optimizers and parameters that a checkpoint must hold, with names for messages."""
    kind = type(part).__name__
    if isinstance(part, nn.Module):
        return [(f"{kind}.{name}", p) for name, p in part.named_parameters() if p.requires_grad]
    optimizers = []
    parameters = [part]
    if isinstance(part, torch.optim.Optimizer):
        optimizers = [(f"an optimizer ({kind})", part)]
        parameters = [p for p in parameters_in(part) if p.requires_grad]
    return [*optimizers, *((f"a parameter of shape {tuple(p.shape)}", p) for p in parameters)]
