"""Watch a training that is killed and resumed: what each of its steps depends on.

Kinds: `trained` (a step, before the optimizer takes it: samples, loss, the optimizers' numbers, and
digests of the state in which it began), `final` (that state after the last step), `names` (of the
weights), `…_made` (where an optimizer, schedule, loader, scaler or copy of the model is made); and
those of `checkpoints.py`. A digest is a number that tells bits from others. Epochs have their
length here.
"""

import copy
import functools
import gc
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, dataloader

from samestep.base.patches import patched
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.samples import digests, number_of, random_states, rows_of
from samestep.scripts.checking.watch import checkpoints
from samestep.scripts.checking.watch.weights import Numbers
from samestep.scripts.hooks import tensors_of

_MOST_ROWS, _MOST_WAITING = 4096, 64
_Around = Callable[..., Any]


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    training = _Training(recorder)
    iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - there is no public place
    made = functools.partial(functools.partial, training.made)
    with (
        checkpoints.watching(recorder, training.parameters) as training.stop_here,
        patched(
            (Optimizer, "__init__", made("optimizer_made", training.optimizers)),
            (torch.amp.GradScaler, "__init__", made("scaler_made", training.scalers)),
            (LRScheduler, "__init__", made("schedule_made", Numbers())),
            (DataLoader, "__init__", made("loader_made", Numbers())),
            (copy, "deepcopy", training.copied),
            (swa_utils, "deepcopy", training.copied),
            (nn.Module, "__call__", training.call),
            (torch.autograd, "backward", training.backward),
            (iterator, "_next_index", training.next_index),
            (iterator, "__next__", training.read),
        ),
    ):
        recorder.hooks.on_gradients = training.step
        recorder.at_end.append(lambda _: recorder.note("final", where="", **training.state()))
        yield


class _Training:
    """What a step depends on."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._hooks = recorder, recorder.hooks
        self.stop_here: Callable[[], None] = lambda: None
        self.optimizers, self.scalers = Numbers(), Numbers()
        self._models, self._copies = Numbers(), Numbers()
        self._depth = 0
        self._begin: dict[str, Any] | None = None
        """The state in which the present step began."""
        self._losses, self._rows = list[float](), list[int]()
        self._waiting = deque[tuple[list[int], list[int]]](maxlen=_MOST_WAITING)
        """Batches that were read and not yet trained: their indices, their rows."""
        self._iterable = self._named = False

    def made(self, kind: str, known: Numbers, original: _Around, *args: Any, **kwargs: Any) -> None:
        """Note where things of a kind are made, and know them from then on."""
        original(*args, **kwargs)
        known.add(args[0])
        self._recorder.once(kind)

    def copied(self, original: _Around, model: Any, memo: Any = None, **more: Any) -> Any:
        """Know a copy of a model: it may be an average that follows the training."""
        copied = original(model, memo, **more)
        if memo is None and isinstance(copied, nn.Module) and _has_weights(copied):
            self._copies.add(copied)
            self._recorder.once("copy_made")
        return copied

    def next_index(self, original: _Around, iterator: Any) -> Any:
        """Keep the indices of a batch until it is read."""
        index = original(iterator)
        indices = index if isinstance(index, list | tuple) else [index]
        waiting = vars(iterator).setdefault("_samestep_indices", deque())
        waiting.append([number_of(one) for one in indices if one is not None])
        return index

    def read(self, original: _Around, iterator: Any) -> Any:
        """Keep what was read until it is trained."""
        batch = original(iterator)
        waiting = vars(iterator).get("_samestep_indices")
        indices = waiting.popleft() if waiting else []
        if not self._hooks.evaluating:
            self._waiting.append((indices, rows_of(batch, _MOST_ROWS)[1]))
            kind = iterator._dataset_kind  # noqa: SLF001 - there is no public place
            self._iterable = kind == dataloader._DatasetKind.Iterable  # noqa: SLF001
        return batch

    def call(self, original: _Around, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Note the state in which a step begins, and the samples that its model is given."""
        inside = self._depth or torch.compiler.is_compiling() or self._hooks.evaluating
        if inside or not _has_weights(module):
            return original(module, *args, **kwargs)
        self._models.add(module)
        self._begin = self._begin or self.state()
        self._rows += rows_of([[*args], kwargs], _MOST_ROWS)[1]
        return self._inside(original, module, *args, **kwargs)

    def backward(self, original: _Around, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the loss."""
        if not self._depth:
            losses = [tensors] if isinstance(tensors, Tensor) else [*tensors]
            self._losses += [float(loss.detach()) for loss in losses if loss.numel() == 1]
            self._begin = self._begin or self.state()
        return self._inside(original, tensors, *args, **kwargs)

    def _inside(self, original: _Around, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            self._depth -= 1

    def step(self, optimizer: Optimizer) -> None:
        """Note a step of the optimizer whose steps count, before it takes it."""
        if self._recorder.quiet or self._hooks.counted not in (None, optimizer):
            return
        begin = self._begin or self.state()
        indices, rows = list[int](), list[int]()
        # What this step trains of what was read: a loader may be a batch ahead.
        while self._waiting and (not self._rows or len(rows) < len(self._rows)):
            more_indices, more_rows = self._waiting.popleft()
            indices += more_indices
            rows += more_rows or self._rows
        self._recorder.note(
            "trained",
            **begin,
            groups=[_numbers(g) for one in self.optimizers.alive() for g in one.param_groups],
            rows=self._rows or rows,
            indices=indices,
            loss=sum(self._losses),
            gradients=digests(p.grad for p in self.parameters() if p.grad is not None),
            iterable=self._iterable,
        )
        self._begin, self._losses, self._rows = None, [], []
        self.stop_here()

    def parameters(self) -> list[Tensor]:
        """Return what the optimizers hold, each once, in their order."""
        tensors = (p for one in self.optimizers.alive() for p in tensors_of(one))
        return [*{id(p): p for p in tensors}.values()]

    def state(self) -> dict[str, Any]:
        """Return the state in which a step begins, or which the last one made."""
        parameters, models = self.parameters(), self._models.alive()
        if models and not self._named:
            self._named = True
            for model in _others({*map(id, parameters)}, models):
                self._copies.add(model)  # a copy need not be one of `deepcopy`
            named = {id(p): name for model in models for name, p in model.named_parameters()}
            names = [named.get(id(p), f"tensor {n}") for n, p in enumerate(parameters)]
            self._recorder.note("names", where="", names=names)
        # Buffers of other ranks are of their own samples until DDP sends them rank 0's.
        copies = [
            [*model.parameters(), *([] if self._recorder.rank else model.buffers())]
            for model in self._copies.alive()
        ]
        states = [one.state.get(p, {}) for one in self.optimizers.alive() for p in parameters]
        with torch.no_grad():
            return {
                "weights": digests(parameters),
                "buffers": digests(buffer for model in models for buffer in model.buffers()),
                "optimizer": digests(
                    state[name] for state in states for name in sorted(state, key=str)
                ),
                "copies": [zlib.crc32(repr(digests(tensors)).encode()) for tensors in copies],
                "scale": [float(scaler.get_scale()) for scaler in self.scalers.alive()],
                "random": {name: whole for name, (whole, _) in random_states(None).items()},
            }


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _others(trained: set[int], models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models in memory that no optimizer trains, averages of weights among them."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    parts = (part for module in [*modules, *models] for part in module.children())
    known = {*map(id, models), *map(id, parts)}
    return [
        module
        for module in modules
        if id(module) not in known
        and _has_weights(module)
        and not any(id(p) in trained for p in module.parameters())
    ]


def _numbers(group: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the numbers of an optimizer's group."""
    numbers = {}
    for name, value in group.items():
        values = value if isinstance(value, list | tuple) else [value]
        plain = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in values]
        if name != "params" and all(isinstance(one, bool | int | float) for one in plain):
            numbers[name] = plain
    return numbers
