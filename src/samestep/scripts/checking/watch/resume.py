"""Watch a training that is killed and resumed: what each step depends on, and its checkpoints.

A step is noted before the optimizer takes it; where the job says so, the rank stops there for the
kill. Epochs have their length here.
"""

import copy
import functools
import gc
import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from msgspec import structs
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import dataloader

from samestep.base.patches import Patch, patched_when_imported
from samestep.base.trees import own_part
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.ranks_of_script import STOPPED
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.samples import digests, number_of, random_states, rows_of
from samestep.scripts.checking.watch.weights import Numbers
from samestep.scripts.hooks import tensors_of
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_MOST_ROWS, _MOST_WAITING, _MOST_LEAVES = 4096, 64, 4000
_LOOK_EVERY_S = 0.01
_PATH = (str, os.PathLike)
_SCHEDULER_MADE = Probe((LRScheduler, "__init__"))
_COPY = Probe((copy, "deepcopy"), (swa_utils, "deepcopy"))
_THREAD_START = Probe((threading.Thread, "start"))
_RENAME = Probe((os, "replace"), (os, "rename"))
_LOAD_OPTIMIZER = Probe((Optimizer, "load_state_dict"))
_SHARDED = "torch.distributed.checkpoint"


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    training = _TrainingWatcher(recorder)
    checkpoints = _CheckpointWatcher(recorder, training)
    noting = functools.partial(functools.partial, training.on_made)
    load = functools.partial(functools.partial, checkpoints.on_load)
    save, load_file = checkpoints.on_save, load("file")

    def heard(
        module: ModuleType, **listeners: Callable[[ProbedCall], Around | None]
    ) -> list[Patch]:
        return [Probe((module, name)).patch(listener) for name, listener in listeners.items()]

    def before_step(optimizer: Optimizer) -> None:
        if training.note_step(optimizer):
            checkpoints.stop_here()

    wanted: dict[str, Callable[[ModuleType], list[Patch]]] = {
        "safetensors.torch": lambda m: heard(m, save_file=save, load_file=load_file),
        _SHARDED: lambda m: heard(m, save=save, async_save=save, load=load_file),
        f"{_SHARDED}.state_dict": lambda m: heard(m, _init_optim_state=checkpoints.on_state_made),
    }
    with (
        patched_when_imported(wanted),
        listening(
            (_THREAD_START, checkpoints.on_thread_start),
            (probes.SAVE, save),
            (probes.LOAD, load_file),
            (_RENAME, checkpoints.on_rename),
            (probes.LOAD_STATE, load("model")),
            (_LOAD_OPTIMIZER, load("optimizer")),
            (probes.OPTIMIZER_MADE, noting("optimizer", training.optimizers)),
            (probes.SCALER_MADE, noting("scaler", training.scalers)),
            (_SCHEDULER_MADE, noting("schedule", Numbers())),
            (probes.LOADER_MADE, noting("loader", Numbers())),
            (_COPY, training.on_copy),
            (probes.MODULE_CALL, training.on_call),
            (probes.BACKWARD, training.on_backward),
            (probes.NEXT_INDEX, training.on_next_index),
            (probes.NEXT_BATCH, training.on_batch),
        ),
    ):
        recorder.hooks.on_gradients = before_step
        recorder.at_end.append(lambda _world_size: training.note_end())
        yield


_State = TypeVar("_State", bound=ev.TrainingState)


class _TrainingWatcher:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._hooks = recorder, recorder.hooks
        self.optimizers, self.scalers = Numbers(), Numbers()
        self._models, self._copies = Numbers(), Numbers()
        self._depth = 0
        self._begin: ev.TrainingState | None = None
        """The state in which the present step began."""
        self._losses, self._rows = list[float](), list[int]()
        self._waiting = deque[tuple[list[int], list[int]]](maxlen=_MOST_WAITING)
        """Batches that were read and not yet trained: their indices, their rows."""
        self._iterable = self._named = False

    def on_made(self, what: ev.ObjectKind, known: Numbers, call: ProbedCall) -> Around:
        """Record the place where an object of a kind is made, and track it from then on."""
        yield
        known.add(call.args[0])
        self._recorder.once(ev.ObjectMade(what))

    def on_copy(self, call: ProbedCall) -> Around:
        """Know a copy of a model: it may be an average that follows the training."""
        copied = yield
        whole = call.argument(1, "memo") is None
        if whole and isinstance(copied, nn.Module) and _has_weights(copied):
            self._copies.add(copied)
            self._recorder.once(ev.ObjectMade("copy"))

    def on_next_index(self, call: ProbedCall) -> Around:
        """Keep the indices of a batch until it is read."""
        index = yield
        indices = index if isinstance(index, list | tuple) else [index]
        waiting = vars(call.args[0]).setdefault("_samestep_indices", deque())
        waiting.append([number_of(part) for part in indices if part is not None])

    def on_batch(self, call: ProbedCall) -> Around:
        """Keep what was read until it is trained."""
        (iterator,) = call.args
        batch = yield
        waiting = vars(iterator).get("_samestep_indices")
        indices = waiting.popleft() if waiting else []
        if not self._hooks.evaluating:
            self._waiting.append((indices, rows_of(batch, _MOST_ROWS)[1]))
            kind = iterator._dataset_kind  # noqa: SLF001 - there is no public place
            self._iterable = kind == dataloader._DatasetKind.Iterable  # noqa: SLF001

    def on_call(self, call: ProbedCall) -> Around | None:
        """Note the state in which a step begins, and the samples that its model is given."""
        module, *args = call.args
        if self._depth or self._hooks.evaluating or not _has_weights(module):
            return None
        self._models.add(module)
        self._begin = self._begin or self.state(ev.TrainingState)
        self._rows += rows_of([args, call.kwargs], _MOST_ROWS)[1]
        return self._inside()

    def on_backward(self, call: ProbedCall) -> Around:
        if not self._depth:
            tensors = call.argument(0, "tensors")
            losses = [tensors] if isinstance(tensors, Tensor) else [*tensors]
            self._losses += [float(loss.detach()) for loss in losses if loss.numel() == 1]
            self._begin = self._begin or self.state(ev.TrainingState)
        yield from self._inside()

    def _inside(self) -> Around:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def note_step(self, optimizer: Optimizer) -> bool:
        """Note a step before it is taken, if it is of the optimizer whose steps count."""
        if self._recorder.quiet or self._hooks.counted not in (None, optimizer):
            return False
        begin = self._begin or self.state(ev.TrainingState)
        indices, rows = list[int](), list[int]()
        # What this step trains of what was read: a loader may be a batch ahead.
        while self._waiting and (not self._rows or len(rows) < len(self._rows)):
            more_indices, more_rows = self._waiting.popleft()
            indices += more_indices
            rows += more_rows or self._rows
        groups = [group for own in self.optimizers.alive() for group in own.param_groups]
        self._recorder.note(
            ev.StepBegun(
                **structs.asdict(begin),
                groups=[_numbers_of(group) for group in groups],
                rows=self._rows or rows,
                indices=indices,
                loss=sum(self._losses),
                gradients=digests(p.grad for p in self.parameters() if p.grad is not None),
                iterable=self._iterable,
            )
        )
        self._begin, self._losses, self._rows = None, [], []
        return True

    def note_end(self) -> None:
        """Note the state after the last step, unless the script was ended amid one."""
        if not self._recorder.is_ended:
            self._recorder.note(self.state(ev.FinalState), where="")

    def parameters(self) -> list[Tensor]:
        """Return the optimizers' parameters, each once, in their order."""
        tensors = (p for own in self.optimizers.alive() for p in tensors_of(own))
        return [*{id(p): p for p in tensors}.values()]

    def state(self, kind: type[_State]) -> _State:
        """Return the state in which a step begins, or which the last one made."""
        parameters, models = self.parameters(), self._models.alive()
        if models and not self._named:
            self._named = True
            for model in _untrained_models({*map(id, parameters)}, models):
                self._copies.add(model)  # a copy need not be one of `deepcopy`
            named = {id(p): name for model in models for name, p in model.named_parameters()}
            names = [named.get(id(p), f"tensor {n}") for n, p in enumerate(parameters)]
            self._recorder.note(ev.WeightNames(names), where="")
        # Buffers of other ranks are of their own samples until DDP sends them rank 0's.
        copies = [
            [*model.parameters(), *([] if self._recorder.rank else model.buffers())]
            for model in self._copies.alive()
        ]
        states = [own.state.get(p, {}) for own in self.optimizers.alive() for p in parameters]
        with torch.no_grad():
            return kind(
                weights=digests(parameters),
                buffers=digests(buffer for model in models for buffer in model.buffers()),
                optimizer=digests(
                    state[name] for state in states for name in sorted(state, key=str)
                ),
                copies=[zlib.crc32(repr(digests(tensors)).encode()) for tensors in copies],
                scale=[float(scaler.get_scale()) for scaler in self.scalers.alive()],
                random={name: whole for name, (whole, _) in random_states(None).items()},
            )


class _CheckpointWatcher:
    """What is saved and loaded, and where this rank stops to be killed."""

    def __init__(self, recorder: Recorder, training: _TrainingWatcher) -> None:
        self._recorder, self._training = recorder, training
        self._last_saved, self._pending = -1, 0
        """After which step the last one was whole; how many are being written."""
        self._resumed_from: dict[str, tuple[int, ...] | None] = {}
        """Files that were loaded before the first step, as they were."""

    def stop_here(self) -> None:
        """Stop before the step if the job says so: all that was saved by now is whole."""
        for path, before in self._resumed_from.items():
            if _version_of(path) != before:
                self._recorder.note(ev.CheckpointGone(self._recorder.name(path)), where="")
        self._resumed_from = {}
        job, steps = self._recorder.job, self._recorder.hooks.steps
        while job.kill_from is not None and steps >= job.kill_from and self._pending:
            time.sleep(_LOOK_EVERY_S)  # a thread writes one
        killed = job.kill_from is not None and self._last_saved >= job.kill_from
        if killed or (job.stop_at is not None and steps >= job.stop_at):
            self._recorder.note(ev.WaitsForKill(), where="")
            (Path(job.folder) / STOPPED).touch()
            while True:
                signal.pause()

    def on_state_made(self, _call: ProbedCall) -> Around:
        """Leave out a step without gradients, which gives an optimizer a state to load into."""
        hooks = self._recorder.hooks
        steps = hooks.steps
        with self._recorder.unwatched():
            yield
        hooks.steps = steps

    def on_thread_start(self, call: ProbedCall) -> None:
        """Remember where a thread was started: what it saves may have no other line."""
        call.args[0]._samestep_where = self._recorder.where()  # noqa: SLF001 - our own mark

    def on_save(self, call: ProbedCall) -> Around:
        """Record a save once it is complete: the state may be changed while it is written."""
        recorder, thread = self._recorder, threading.current_thread()
        where = recorder.where() or getattr(thread, "_samestep_where", "")
        saved = call.argument(0, "obj")
        path, steps = _path_of(call.args[1:], call.kwargs), recorder.hooks.steps
        leaves = _leaves(saved)
        in_thread = thread is not threading.main_thread()

        def note_whole(later: Any = None) -> None:
            changed = in_thread and (recorder.hooks.steps != steps or _leaves(saved) != leaves)
            held = (leaf for _, leaf in _leaves_by_path(saved) if isinstance(leaf, Tensor))
            if any(isinstance(value, list) for value in leaves.values()):  # it holds tensors
                live = changed and _storages(held) & _storages(self._training.parameters())
                event = ev.CheckpointSaved(
                    recorder.name(path) if path else "",
                    leaves=leaves,
                    apart=in_thread or later is not None,
                    changed=bool(live),
                )
                recorder.note(event, where=where)
                self._last_saved = recorder.hooks.steps
            self._pending -= 1

        self._pending += 1
        try:
            result = yield
        except BaseException:
            self._pending -= 1
            raise
        future: Any = getattr(result, "upload_completion", result)
        if hasattr(future, "add_done_callback"):  # others write it, of a copy
            future.add_done_callback(note_whole)
        else:
            note_whole()

    def on_rename(self, call: ProbedCall) -> Around:
        """Record a rename: a checkpoint may get its name once it is complete."""
        yield
        old = self._recorder.name(call.argument(0, "src"))
        new = self._recorder.name(call.argument(1, "dst"))
        self._recorder.note(ev.FileRenamed(old, path=new), where="")

    def on_load(self, what: ev.StateKind, call: ProbedCall) -> Around:
        """Record a load before the first step: of a file, or of a part of the state."""
        loaded = yield
        given = call.argument(0, "state_dict") if what == "file" else None
        into = isinstance(given, Mapping)  # a sharded file is loaded into a state
        args = call.args[1:] if into else call.args[:1]
        path = _path_of(args, call.kwargs) if what == "file" else ""
        if (path or into or what != "file") and not self._recorder.hooks.steps:
            if path:
                self._resumed_from[path] = _version_of(path)
            parts = islice(_leaves_by_path(given if into else loaded), _MOST_LEAVES)
            names, name = [name for name, _ in parts], self._recorder.name(path) if path else ""
            self._recorder.note(ev.StateLoaded(what, path=name, names=names))


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _untrained_models(trained: set[int], models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models in memory that no optimizer trains, averages of weights among them."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    parts = (part for module in [*modules, *models] for part in module.children())
    known = {*map(id, models), *map(id, parts)}
    return [
        module
        for module in modules
        if id(module) not in known
        and _has_weights(module)
        and not any(id(p) in trained for p in module.parameters())
    ]


def _numbers_of(group: Mapping[str, Any]) -> dict[str, list[float]]:
    numbers = {}
    for name, value in group.items():
        values = value if isinstance(value, list | tuple) else [value]
        plain = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in values]
        if name != "params" and all(isinstance(v, bool | int | float) for v in plain):
            numbers[name] = plain
    return numbers


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {own_part(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _leaves(saved: Any) -> dict[str, Any]:
    """Return the saved leaves by path in the tree; a tensor as a list of its digest."""
    with torch.no_grad():
        return {
            path: digests([leaf]) if isinstance(leaf, Tensor) else leaf
            for path, leaf in islice(_leaves_by_path(saved), _MOST_LEAVES)
        }


def _leaves_by_path(saved: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in what is saved, by their path in the tree."""
    if isinstance(saved, nn.Module):
        saved = saved.state_dict()
    if isinstance(saved, Mapping | list | tuple):
        named = saved.items() if isinstance(saved, Mapping) else enumerate(saved[:64])
        for name, value in named:
            yield from _leaves_by_path(value, f"{path}.{name}" if path else str(name))
    elif isinstance(saved, Tensor | bool | int | float | str | None):
        yield path, saved


def _path_of(args: tuple[Any, ...], more: Mapping[str, Any]) -> str:
    """Return the path that a function is given, or that its file has; empty for none."""
    names = "f", "filename", "checkpoint_id", "path"
    places = [*args[:1], *(more[name] for name in names if name in more)]
    paths = [file if isinstance(file, _PATH) else getattr(file, "name", None) for file in places]
    path = next((path for path in paths if isinstance(path, _PATH)), "")
    return os.path.abspath(os.fsdecode(path)) if path else ""  # noqa: PTH100 - a link stays a link


def _version_of(path: str) -> tuple[int, ...] | None:
    try:
        there = Path(path).stat()
    except OSError:
        return None
    return there.st_size, there.st_mtime_ns, there.st_ino
