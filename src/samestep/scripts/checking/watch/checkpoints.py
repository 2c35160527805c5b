"""Watch the checkpoints of a training that is killed and resumed, and stop it for the kill.

Kinds: `saved` (a checkpoint or a part of one), `renamed` (such a file), `loaded` (a file, or a part
of the state, before the first step), `gone` (a file that was loaded and is not there at the first
step), `stopped` (before a step: this rank waits to be killed).
"""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from samestep.base.patches import Patch, patched, patched_when_imported
from samestep.base.trees import own_part
from samestep.scripts.checking.ranks_of_script import STOPPED
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.samples import digests

_MOST_LEAVES = 4000
_LOOK_EVERY_S = 0.01
_PATH = (str, os.PathLike)
_Around = Callable[..., Any]


@contextmanager
def watching(
    recorder: Recorder, weights: Callable[[], list[Tensor]]
) -> Iterator[Callable[[], None]]:
    """Note while inside; yield what is called before each step of an optimizer."""
    files, sharded = _Saves(recorder, weights), "torch.distributed.checkpoint"
    save, load = files.save, functools.partial(files.load, "file")
    wanted: dict[str, Callable[[ModuleType], list[Patch]]] = {
        "safetensors.torch": lambda m: [(m, "save_file", save), (m, "load_file", load)],
        sharded: lambda m: [(m, "save", save), (m, "async_save", save), (m, "load", load)],
        f"{sharded}.state_dict": lambda m: [(m, "_init_optim_state", files.make_state)],
    }
    with (
        patched_when_imported(wanted),
        patched(
            (threading.Thread, "start", files.start_thread),
            (torch, "save", save),
            (torch, "load", load),
            (os, "replace", files.move),
            (os, "rename", files.move),
            (nn.Module, "load_state_dict", functools.partial(files.load, "model")),
            (Optimizer, "load_state_dict", functools.partial(files.load, "optimizer")),
        ),
    ):
        yield files.stop_here


class _Saves:
    """What is saved and loaded, and where this rank stops to be killed."""

    def __init__(self, recorder: Recorder, weights: Callable[[], list[Tensor]]) -> None:
        self._recorder, self._weights = recorder, weights
        self._last_saved, self._pending = -1, 0
        """After which step the last one was whole; how many are being written."""
        self._resumed_from: dict[str, tuple[int, ...] | None] = {}
        """Files that were loaded before the first step, as they were."""

    def stop_here(self) -> None:
        """Stop before the step if the job says so: all that was saved by now is whole."""
        for path, before in self._resumed_from.items():
            if _as_it_is(path) != before:
                self._recorder.note("gone", where="", path=self._recorder.name(path))
        self._resumed_from = {}
        job, steps = self._recorder.job, self._recorder.hooks.steps
        while job.kill_from is not None and steps >= job.kill_from and self._pending:
            time.sleep(_LOOK_EVERY_S)  # a thread writes one
        killed = job.kill_from is not None and self._last_saved >= job.kill_from
        if killed or (job.stop_at is not None and steps >= job.stop_at):
            self._recorder.note("stopped", where="")
            (Path(job.folder) / STOPPED).touch()
            while True:
                signal.pause()

    def make_state(self, original: _Around, *args: Any, **more: Any) -> Any:
        """Leave out a step without gradients, which gives an optimizer a state to load into."""
        recorder, steps = self._recorder, self._recorder.hooks.steps
        with recorder.unwatched():
            state = original(*args, **more)
        recorder.hooks.steps = steps
        return state

    def start_thread(self, original: _Around, thread: Any) -> None:
        """Remember where a thread was started: what it saves may have no other line."""
        thread._samestep_where = self._recorder.where()  # noqa: SLF001 - our own mark
        original(thread)

    def save(self, original: _Around, kept: Any, *args: Any, **more: Any) -> Any:
        """Note what is saved once it is whole: it may be changed while it is written."""
        recorder, thread = self._recorder, threading.current_thread()
        where = recorder.where() or getattr(thread, "_samestep_where", "")
        path, steps, leaves = _path_of(args, more), recorder.hooks.steps, _leaves(kept)
        in_thread = thread is not threading.main_thread()

        def whole(later: Any = None) -> None:
            changed = in_thread and (recorder.hooks.steps != steps or _leaves(kept) != leaves)
            held = (leaf for _, leaf in _parts(kept) if isinstance(leaf, Tensor))
            if any(isinstance(value, list) for value in leaves.values()):  # it holds tensors
                recorder.note(
                    "saved",
                    where=where,
                    path=recorder.name(path) if path else "",
                    leaves=leaves,
                    apart=in_thread or later is not None,
                    changed=changed and bool(_storages(held) & _storages(self._weights())),
                )
                self._last_saved = recorder.hooks.steps
            self._pending -= 1

        self._pending += 1
        try:
            result = original(kept, *args, **more)
        except BaseException:
            self._pending -= 1
            raise
        future: Any = getattr(result, "upload_completion", result)
        if hasattr(future, "add_done_callback"):  # others write it, of a copy
            future.add_done_callback(whole)
        else:
            whole()
        return result

    def move(self, original: _Around, old: Any, new: Any, *args: Any, **more: Any) -> Any:
        """Note what is renamed: a checkpoint may get its name once it is whole."""
        moved = original(old, new, *args, **more)
        names = [self._recorder.name(path) for path in (old, new)]
        self._recorder.note("renamed", where="", old=names[0], path=names[1])
        return moved

    def load(self, what: str, original: _Around, given: Any, *args: Any, **more: Any) -> Any:
        """Note what is loaded before the first step: a file, or a part of the state."""
        loaded = original(given, *args, **more)
        into = isinstance(given, Mapping)  # a sharded file is loaded into a state
        path = _path_of(args if into else (given,), more) if what == "file" else ""
        if (path or into or what != "file") and not self._recorder.hooks.steps:
            if path:
                self._resumed_from[path] = _as_it_is(path)
            parts = islice(_parts(given if into else loaded), _MOST_LEAVES)
            names, name = [name for name, _ in parts], self._recorder.name(path) if path else ""
            self._recorder.note("loaded", what=what, path=name, names=names)
        return loaded


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {own_part(tensor).untyped_storage().data_ptr() for tensor in tensors}


def _leaves(kept: Any) -> dict[str, Any]:
    """Return what is saved by its path in the tree; a tensor as a list of its digest."""
    with torch.no_grad():
        return {
            path: digests([leaf]) if isinstance(leaf, Tensor) else leaf
            for path, leaf in islice(_parts(kept), _MOST_LEAVES)
        }


def _parts(kept: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and plain values in what is saved, by their path in the tree."""
    if isinstance(kept, nn.Module):
        kept = kept.state_dict()
    if isinstance(kept, Mapping | list | tuple):
        named = kept.items() if isinstance(kept, Mapping) else enumerate(kept[:64])
        for name, value in named:
            yield from _parts(value, f"{path}.{name}" if path else str(name))
    elif isinstance(kept, Tensor | bool | int | float | str | None):
        yield path, kept


def _path_of(args: tuple[Any, ...], more: Mapping[str, Any]) -> str:
    """Return the path that a function is given, or that its file has; empty for none."""
    names = "f", "filename", "checkpoint_id", "path"
    given = [*args[:1], *(more[name] for name in names if name in more)]
    paths = [one if isinstance(one, _PATH) else getattr(one, "name", None) for one in given]
    path = next((path for path in paths if isinstance(path, _PATH)), "")
    return os.path.abspath(os.fsdecode(path)) if path else ""  # noqa: PTH100 - a link stays a link


def _as_it_is(path: str) -> tuple[int, ...] | None:
    """Return what tells whether a file is changed; None for one that is gone."""
    try:
        there = Path(path).stat()
    except OSError:
        return None
    return there.st_size, there.st_mtime_ns, there.st_ino
