"""Watch a training that is killed and resumed: what each of its steps depends on.

Kinds: `trained` (a step, before the optimizer takes it: samples, loss, the optimizers' numbers, and
digests of the state in which it began), `final` (that state after the last step), `names` (of the
weights), `…_made` (where an optimizer, schedule, loader, scaler or copy of the model is made); and
those of `checkpoints.py`. A digest is a number that tells bits from others. Epochs have their
length here.
"""

import contextlib
import copy
import gc
import itertools
import random
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, dataloader

from samestep.base.patches import patched
from samestep.base.trees import tree_leaves
from samestep.scripts.checking.recorder import Recorder, row_hashes
from samestep.scripts.checking.samples import digests, number_of, some_of
from samestep.scripts.checking.watch import checkpoints
from samestep.scripts.hooks import step_closure

_MOST_ROWS, _MOST_WAITING = 4096, 64
_Around = Callable[..., Any]


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    training = _Training(recorder)
    iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - there is no public place
    with (
        contextlib.ExitStack() as stack,
        checkpoints.watching(recorder, training.parameters) as training.stop_here,
        patched(
            (Optimizer, "__init__", training.making("optimizer_made", training.optimizers)),
            (torch.amp.GradScaler, "__init__", training.making("scaler_made", training.scalers)),
            (LRScheduler, "__init__", training.making("schedule_made")),
            (DataLoader, "__init__", training.making("loader_made")),
            (copy, "deepcopy", training.copied),
            (swa_utils, "deepcopy", training.copied),
            (nn.Module, "__call__", training.call),
            (torch.autograd, "backward", training.backward),
            (iterator, "_next_index", training.next_index),
            (iterator, "__next__", training.read),
        ),
    ):
        stack.callback(register_optimizer_step_pre_hook(training.step).remove)
        recorder.at_end.append(training.end)
        yield


class _Training:
    """What a step depends on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._hooks = recorder, recorder.hooks
        self.stop_here: Callable[[], None] = lambda: None
        self.optimizers, self.scalers = _Alive(), _Alive()
        self._models, self._copies = _Alive(), _Alive()
        self._depth = 0
        self._begin: dict[str, Any] | None = None
        """The state in which the present step began."""
        self._losses: list[float] = []
        self._rows: list[int] = []
        self._waiting = deque[tuple[list[int], list[int]]](maxlen=_MOST_WAITING)
        """Batches that were read and not yet trained: their indices, their rows."""
        self._loader: dict[str, Any] = {}
        self._named = False

    def making(self, kind: str, known: "_Alive | None" = None) -> _Around:
        """Return what notes where things of a kind are made, and knows them from then on."""

        def around(original: _Around, made: Any, *args: Any, **kwargs: Any) -> None:
            original(made, *args, **kwargs)
            if known is not None:
                known.add(made)
            self._recorder.once(kind)

        return around

    def copied(self, original: _Around, kept: Any, memo: Any = None, **more: Any) -> Any:
        """Know a copy of a model: it may be an average that follows the training."""
        made = original(kept, memo, **more)
        if memo is None and isinstance(made, nn.Module) and _has_weights(made):
            self._copies.add(made)
            self._recorder.once("copy_made")
        return made

    def next_index(self, original: _Around, iterator: Any) -> Any:
        """Keep the indices of a batch until it is read."""
        index = original(iterator)
        given = index if isinstance(index, list | tuple) else [index]
        known = vars(iterator).setdefault("_samestep_indices", deque())
        known.append([number_of(one) for one in given if one is not None])
        return index

    def read(self, original: _Around, iterator: Any) -> Any:
        """Keep what was read until it is trained."""
        batch = original(iterator)
        indices = vars(iterator).get("_samestep_indices")
        own = indices.popleft() if indices else []
        if not self._hooks.evaluating:
            with torch.no_grad(), contextlib.suppress(Exception):
                self._waiting.append((own, _rows(tree_leaves(batch))))
            kind = iterator._dataset_kind == dataloader._DatasetKind.Iterable  # noqa: SLF001
            self._loader = {"iterable": kind, "workers": getattr(iterator, "_num_workers", 0)}
        return batch

    def call(self, original: _Around, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Note the state in which a step begins, and the samples that its model is given."""
        if self._depth or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if self._hooks.evaluating or not _has_weights(module):
            return original(module, *args, **kwargs)
        self._models.add(module)
        self._begin = self._begin or self._state()
        with torch.no_grad(), contextlib.suppress(Exception):
            given = [leaf for leaf in tree_leaves([[*args], kwargs]) if isinstance(leaf, Tensor)]
            self._rows += _rows(leaf for leaf in given if not leaf.requires_grad)
        return self._inside(original, module, *args, **kwargs)

    def backward(self, original: _Around, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss."""
        if not self._depth:
            some = [tensors] if isinstance(tensors, Tensor) else [*tensors]
            self._losses += [float(one.detach()) for one in some if one.numel() == 1]
            self._begin = self._begin or self._state()
        return self._inside(original, tensors, *args, **kwargs)

    def _inside(self, original: _Around, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Note the step of an optimizer, if its steps count; one with a closure takes it inside."""
        if self._recorder.quiet or self._hooks.counted not in (None, optimizer):
            return None
        if (given := step_closure(args, kwargs)) is None:
            self._note_step()
            return None
        calls = itertools.count()

        def closure() -> Any:
            value = given()
            if not next(calls):
                self._note_step()
            return value

        return (args[:1], {**kwargs, "closure": closure})

    def _note_step(self) -> None:
        begin = self._begin or self._state()
        indices, read = self._trained()
        with torch.no_grad():
            norms = [_norm(p.grad) for p in self.parameters() if p.grad is not None]
        self._recorder.note(
            "trained",
            **begin,
            groups=[
                _numbers(group) for one in self.optimizers.alive() for group in one.param_groups
            ],
            rows=self._rows or read,
            indices=indices,
            loss=sum(self._losses),
            norm=sum(norm**2 for norm in norms) ** 0.5,
            **self._loader,
        )
        self._begin, self._losses, self._rows = None, [], []
        self.stop_here()

    def end(self, _world_size: int) -> None:
        """Note what the last step made."""
        self._recorder.note("final", where="", **self._state())

    def _trained(self) -> tuple[list[int], list[int]]:
        """Return what this step trains of what was read: a loader may be a batch ahead."""
        indices, rows = list[int](), list[int]()
        while self._waiting and (not self._rows or len(rows) < len(self._rows)):
            more_indices, more_rows = self._waiting.popleft()
            indices += more_indices
            rows += more_rows or self._rows
        return indices, rows

    def parameters(self) -> list[Tensor]:
        """Return what the optimizers hold, each once, in their order."""
        groups = [group for one in self.optimizers.alive() for group in one.param_groups]
        return [*{id(p): p for group in groups for p in group["params"]}.values()]

    def _state(self) -> dict[str, Any]:
        with torch.no_grad():
            parameters, models = self.parameters(), self._models.alive()
            if not self._named:  # a copy need not be one of `deepcopy`
                for one in _others({*map(id, parameters)}, models):
                    self._copies.add(one)
            named = {id(p): name for model in models for name, p in model.named_parameters()}
            states = [
                value
                for one in self.optimizers.alive()
                for p in parameters
                for _, value in sorted(one.state.get(p, {}).items(), key=lambda item: str(item[0]))
            ]
            # Buffers of other ranks are of their own samples until DDP sends them rank 0's.
            copies = [
                [*one.parameters(), *([] if self._recorder.rank else one.buffers())]
                for one in self._copies.alive()
            ]
            state = {
                "weights": digests(parameters),
                "buffers": digests(buffer for model in models for buffer in model.buffers()),
                "optimizer": digests(states),
                "copies": [zlib.crc32(repr(digests(one)).encode()) for one in copies],
                "scale": [float(one.get_scale()) for one in self.scalers.alive()],
                "random": _random(),
            }
        if models and not self._named:
            self._named = True
            names = [named.get(id(p), f"tensor {n}") for n, p in enumerate(parameters)]
            self._recorder.note("names", where="", names=names)
        return state


class _Alive:
    """Things in the order in which they came, as long as they live."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[Any]] = []

    def add(self, one: Any) -> None:
        if all(ref() is not one for ref in self._known):
            self._known.append(weakref.ref(one))

    def alive(self) -> list[Any]:
        return [one for ref in self._known if (one := ref()) is not None]


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _others(trained: set[int], models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models in memory that no optimizer trains, averages of weights among them."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    inner = {id(child) for module in [*modules, *models] for child in module.children()}
    roots = [one for one in modules if id(one) not in inner and _has_weights(one)]
    return [
        one
        for one in roots
        if all(one is not model for model in models)
        and not any(id(p) in trained for p in one.parameters())
    ]


def _rows(leaves: Iterable[Any]) -> list[int]:
    """Return a number for each sample of a batch, by its tensors (rows, …)."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    columns = [row_hashes(one, _MOST_ROWS) for one in tensors if len(one) == len(tensors[0])]
    return [zlib.crc32(repr(row).encode()) for row in zip(*columns, strict=False)]


def _norm(gradient: Tensor) -> float:
    some = some_of(gradient.to_dense() if gradient.layout != torch.strided else gradient)
    return float(torch.linalg.vector_norm(some.double())) if some.numel() else 0.0


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an optimizer's group."""
    plain = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params" and (not isinstance(value, Tensor) or value.numel() == 1)
    }
    numbers = {
        name: [*value] if isinstance(value, tuple) else value for name, value in plain.items()
    }
    kinds = bool, int, float
    return {
        name: value
        for name, value in numbers.items()
        if all(isinstance(one, kinds) for one in (value if isinstance(value, list) else [value]))
    }


def _random() -> dict[str, int]:
    """Return a digest of each source of random numbers."""
    found = {
        "torch": zlib.crc32(torch.get_rng_state().numpy().data),
        "random": zlib.crc32(repr(random.getstate()).encode()),
    }
    if np := sys.modules.get("numpy"):
        _, keys, place, *_ = np.random.get_state()
        found["numpy"] = zlib.crc32(keys, place)
    return found
