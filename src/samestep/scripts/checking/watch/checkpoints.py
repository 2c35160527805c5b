"""Watch the checkpoints of a training that is killed and resumed, and stop it for the kill.

Kinds: `saved` (a checkpoint or a part of one), `renamed` (such a file), `loaded` (a file, or a part
of the state, before the first step), `gone` (a file that was loaded and is not there at the first
step), `stopped` (before a step: this rank waits to be killed).
"""

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
from samestep.scripts.checking.ranks_of_script import STOPPED
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.samples import digests

_MOST_LEAVES = 4000
_LOOK_EVERY_S = 0.01
_Around = Callable[..., Any]


@contextmanager
def watching(
    recorder: Recorder, weights: Callable[[], list[Tensor]]
) -> Iterator[Callable[[], None]]:
    """Note while inside; yield what is called before each step of an optimizer."""
    files = _Saves(recorder, weights)
    wanted: dict[str, Callable[[ModuleType], list[Patch]]] = {
        "safetensors.torch": lambda m: [
            (m, "save_file", files.around_save),
            (m, "load_file", files.around_read),
        ],
        "torch.distributed.checkpoint": lambda m: [
            (m, "save", files.around_save),
            (m, "load", files.around_load_into),
            (m, "async_save", files.around_async),
        ],
    }
    wanted["torch.distributed.checkpoint.state_dict"] = lambda m: [
        (m, "_init_optim_state", files.around_made_up_step)
    ]
    with (
        patched_when_imported(wanted),
        patched(
            (threading.Thread, "start", files.thread_started),
            (torch, "save", files.around_save),
            (torch, "load", files.around_read),
            (os, "replace", files.around_move),
            (os, "rename", files.around_move),
            (nn.Module, "load_state_dict", files.around_part("model")),
            (Optimizer, "load_state_dict", files.around_part("optimizer")),
        ),
    ):
        yield files.stop_here


class _Saves:
    """What is saved and loaded, and where this rank stops to be killed."""

    def __init__(self, recorder: Recorder, weights: Callable[[], list[Tensor]]) -> None:
        self._recorder, self._job, self._weights = recorder, recorder.job, weights
        self._saved = False  # at or after the step that the job names
        self._pending = 0
        self._written = set[str]()
        self._resumed_from: dict[str, tuple[int, ...] | None] = {}
        """Files that were loaded before the first step, as they were."""

    def stop_here(self) -> None:
        """Stop before the step if the job says so: all that was saved by now is whole."""
        for path, before in self._resumed_from.items():
            if _as_it_is(path) != before:
                self._recorder.note("gone", where="", path=self._recorder.name(path))
        self._resumed_from = {}
        job, steps = self._job, self._recorder.hooks.steps
        while job.kill_from is not None and steps >= job.kill_from and self._pending:
            time.sleep(_LOOK_EVERY_S)  # a thread writes one
        if self._saved or (job.stop_at is not None and steps >= job.stop_at):
            self._recorder.note("stopped", where="")
            (Path(self._job.folder) / STOPPED).touch()
            while True:
                signal.pause()

    def around_made_up_step(self, original: _Around, *args: Any, **kwargs: Any) -> Any:
        """Leave out a step without gradients, which gives an optimizer a state to load into."""
        recorder, steps = self._recorder, self._recorder.hooks.steps
        recorder.quiet += 1
        try:
            return original(*args, **kwargs)
        finally:
            recorder.quiet -= 1
            recorder.hooks.steps = steps

    def thread_started(self, original: _Around, thread: Any) -> None:
        """Remember where a thread was started: what it saves may have no other line."""
        thread._samestep_where = self._recorder.where()  # noqa: SLF001 - our own mark
        original(thread)

    def around_save(self, original: _Around, kept: Any, *args: Any, **more: Any) -> Any:
        """Note what is saved, before and after: it may be changed while it is written."""
        recorder = self._recorder
        where, steps, leaves = recorder.where(), recorder.hooks.steps, self._leaves(kept)
        thread = threading.current_thread()
        apart = thread is not threading.main_thread()
        where = where or getattr(thread, "_samestep_where", "")
        self._pending += 1
        try:
            result = original(kept, *args, **more)
        finally:
            self._pending -= 1
        changed = apart and (recorder.hooks.steps != steps or self._leaves(kept) != leaves)
        live = {_storage(p) for p in self._weights()} if changed else set[int]()
        held = [leaf for _, leaf in _parts(kept) if isinstance(leaf, Tensor)]
        changed = changed and any(_storage(tensor) in live for tensor in held)
        self._note(where, _path_of(args, more), leaves, changed=changed, apart=apart)
        return result

    def around_async(self, original: _Around, kept: Any, *args: Any, **more: Any) -> Any:
        """Note a checkpoint that others write, once it is whole."""
        where, path, leaves = self._recorder.where(), _path_of(args, more), self._leaves(kept)
        self._pending += 1
        future: Any = original(kept, *args, **more)

        def done(_: Any) -> None:
            self._pending -= 1
            self._note(where, path, leaves, changed=False, apart=True)

        getattr(future, "upload_completion", future).add_done_callback(done)
        return future

    def _leaves(self, kept: Any) -> dict[str, Any]:
        """Return what is saved by its path in the tree; a tensor as a list of its digest."""
        with torch.no_grad():
            return {
                path: digests([leaf]) if isinstance(leaf, Tensor) else leaf
                for path, leaf in islice(_parts(kept), _MOST_LEAVES)
            }

    def _note(self, where: str, path: str, leaves: dict[str, Any], **how: bool) -> None:
        recorder = self._recorder
        if not any(isinstance(value, list) for value in leaves.values()):
            return  # no tensor: not a checkpoint, or a part that lies next to it
        path = _absolute(path) if path else ""
        self._written.add(path)
        name = recorder.name(path) if path else ""
        recorder.note("saved", where=where, path=name, leaves=leaves, **how)
        self._saved |= (
            self._job.kill_from is not None and recorder.hooks.steps >= self._job.kill_from
        )

    def around_move(self, original: _Around, old: Any, new: Any, *args: Any, **more: Any) -> Any:
        """Note that a checkpoint gets its name once it is whole."""
        moved = original(old, new, *args, **more)
        path, to = _absolute(old), _absolute(new)
        inside = {one for one in self._written if (one + os.sep).startswith(path + os.sep)}
        if inside:
            self._written = self._written - inside | {to + one.removeprefix(path) for one in inside}
            old_name, name = self._recorder.name(path), self._recorder.name(to)
            self._recorder.note("renamed", old=old_name, path=name)
        return moved

    def around_read(self, original: _Around, file: Any, *args: Any, **more: Any) -> Any:
        """Note a file that is loaded."""
        loaded = original(file, *args, **more)
        if path := _path_of((file,), {}):
            names = [name for name, _ in islice(_parts(loaded), _MOST_LEAVES)]
            self._loaded("file", path=path, names=names)
        return loaded

    def around_load_into(self, original: _Around, state: Any, *args: Any, **more: Any) -> Any:
        """Note a sharded checkpoint that is loaded."""
        loaded = original(state, *args, **more)
        self._loaded("file", path=_path_of(args, more), names=[*state])
        return loaded

    def around_part(self, what: str) -> _Around:
        """Return what notes that a part of the state is loaded."""

        def around(original: _Around, part: Any, *args: Any, **more: Any) -> Any:
            loaded = original(part, *args, **more)
            self._loaded(what)
            return loaded

        return around

    def _loaded(self, what: str, path: str = "", names: Iterable[str] = ()) -> None:
        recorder = self._recorder
        if recorder.hooks.steps:
            return
        if path := _absolute(path) if path else "":
            self._resumed_from[path] = _as_it_is(path)
        name = recorder.name(path) if path else ""
        recorder.note("loaded", what=what, path=name, names=list(names))


def _storage(tensor: Tensor) -> int:
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(own.untyped_storage().data_ptr())


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


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - a link stays a link


def _path_of(args: tuple[Any, ...], more: Mapping[str, Any]) -> str:
    """Return the path that a function is given, or that its file has; empty for none."""
    for one in (
        *args[:1],
        *(more.get(name) for name in ("f", "filename", "checkpoint_id", "path")),
    ):
        name = one if isinstance(one, str | os.PathLike) else getattr(one, "name", None)
        if isinstance(name, str | os.PathLike):
            return os.fsdecode(name)
    return ""


def _as_it_is(path: str) -> tuple[int, ...] | None:
    """Return what tells whether a file is changed; None for one that is gone."""
    try:
        there = Path(path).stat()
    except OSError:
        return None
    return there.st_size, there.st_mtime_ns, there.st_ino
