"""Watch files: what a rank writes, saves, loads and downloads, and the trackers and bars it starts.

Each is noted once per line and path.

Python's audit hook does not see what PyTorch writes in C++, and others in Rust. Their functions are
patched instead; those of packages that may not be installed, once they are imported.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import get_worker_info

from samestep.base.patches import Patch, patched_when_imported
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, frames
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_DEPTH, _NAMES = 3, 5
_PLAIN = (str, int, bool, os.PathLike)
_WRAPPED = ("module.", "_orig_mod.")
_JIT_SAVE = Probe((torch.jit, "save"))
_EXPORT = Probe((torch.profiler.profile, "export_chrome_trace"))
_TRACKERS = {
    "wandb": ("init",),
    "mlflow": ("start_run",),
    "comet_ml": ("start", "Experiment.__init__", "OfflineExperiment.__init__"),
    "neptune": ("init_run",),
    "torch.utils.tensorboard.writer": ("SummaryWriter.__init__",),
    "tensorboardX.writer": ("SummaryWriter.__init__",),
}


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    files = _Files(recorder)
    bar = functools.partial(functools.partial, files.on_bar)
    wanted: dict[str, Callable[[ModuleType], list[Patch]]] = {
        "tqdm.std": lambda m: [Probe((m.tqdm, "__init__")).patch(bar("tqdm"))],
        "rich.progress": lambda m: [Probe((m.Progress, "__init__")).patch(bar("rich"))],
        "safetensors.torch": lambda m: [Probe((m, "save_file")).patch(files.on_save)],
        "requests.sessions": lambda m: [Probe((m.Session, "request")).patch(files.on_request)],
        "torchvision.datasets": files.data_sets,
    }
    wanted |= {name: functools.partial(files.trackers, of) for name, of in _TRACKERS.items()}
    with (
        listening(
            (probes.SAVE, files.on_save),
            (_JIT_SAVE, files.on_save),
            (probes.LOAD, files.on_load),
            (_EXPORT, files.on_export),
        ),
        patched_when_imported(wanted),
    ):
        sys.addaudithook(files.audit)  # cannot be removed: it ends with the process
        files.is_on = True
        try:
            yield
        finally:
            files.is_on = False


class _Files:
    # Not of the module: as Python exits, its names are gone before the hook is.
    _audited = frozenset({"open", "os.rename", "urllib.Request"})

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, job = recorder, recorder.job
        places = [os.path.realpath(place) for place in (job.folder, job.place) if place]
        self._own = tuple(place + os.sep for place in places)
        self._temporary = f"{job.place}/temporary/"
        self.is_on = False

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record files that Python opens and renames, and more: called very often, never raises.

        A loader's worker is not a rank.
        """
        if event not in self._audited or not self.is_on or get_worker_info() is not None:
            return
        if event == "open":
            path, mode, flags = arguments
            opened = _mode(mode, flags)
            # With an opener, `tempfile` names only the folder.
            if opened and isinstance(path, str | bytes | os.PathLike) and not os.path.isdir(path):  # noqa: PTH112 - bytes, too
                self._write(path, opened)
        elif event == "os.rename":
            source = self._recorder.name(arguments[0])
            if self._recorder.is_direct("os", "pathlib", "shutil") and not self._is_own(source):
                self._write(arguments[1], "rename")
        elif arguments[1] is None:  # an address without data to send
            self._recorder.once(ev.FileFetched(str(arguments[0]), fetched=True))

    def on_save(self, call: ProbedCall) -> None:
        """Record a saved file, and whether its names are those of a wrapper."""
        arguments = inspect.signature(call.function).bind(*call.args, **call.kwargs).arguments
        saved, place, *_ = arguments.values()
        path = self._write(place, "w") if isinstance(place, str | os.PathLike) else None
        dicts = list(_state_dicts(saved))
        wrapped = next((d for d in dicts if all(n.startswith(_WRAPPED) for n in d)), {})
        names, tree = list(wrapped)[:_NAMES], str(pytree.tree_structure(saved))
        resumable, tensors = "param_groups" in tree, sum(map(len, dicts))
        event = ev.FileSaved(path, tensors=tensors, wrapped=names, resumable=resumable)
        self._recorder.once(event)

    def on_export(self, call: ProbedCall) -> None:
        """Note a trace, which the profiler writes in C++."""
        self._write(call.argument(1, "path"), "w")

    def on_load(self, call: ProbedCall) -> Around:
        own = self._recorder.is_direct()
        loaded = yield
        place = call.argument(0, "f")
        if isinstance(place, str | os.PathLike):
            device = call.argument(1, "map_location")
            self._recorder.once(
                ev.FileLoaded(
                    self._recorder.name(place),
                    map_location=None if device is None else str(device),
                    weights_only=call.kwargs.get("weights_only"),
                    names=[name for state in _state_dicts(loaded) for name in state][:_NAMES],
                    own=own,
                )
            )

    def on_request(self, call: ProbedCall) -> None:
        method, url = call.argument(1, "method"), call.argument(2, "url")
        if method.upper() == "GET" and self._recorder.is_direct("requests"):
            self._recorder.once(ev.FileFetched(str(url), fetched=True))

    def data_sets(self, module: ModuleType) -> list[Patch]:
        """Return patches of the data sets that download themselves, if they are not there yet."""

        def on_download(call: ProbedCall) -> None:
            what = f"{type(call.args[0]).__name__}.download"
            self._recorder.once(ev.FileFetched(what, fetched=False))

        kinds = {kind for kind in vars(module).values() if isinstance(kind, type)}
        own = [kind for kind in kinds if "download" in vars(kind)]
        return [Probe((kind, "download")).patch(on_download) for kind in own]

    def trackers(self, names: tuple[str, ...], module: ModuleType) -> list[Patch]:

        def on_start(label: str, call: ProbedCall) -> None:
            if self._recorder.is_direct(label.partition(".")[0]):
                by_place = {str(n): v for n, v in enumerate(call.args)}
                arguments = (by_place | call.kwargs).items()
                asked = {name: str(v) for name, v in arguments if isinstance(v, _PLAIN)}
                self._recorder.once(ev.TrackerStarted(label, asked=asked))

        patches: list[Patch] = []
        for name in names:
            owner, _, function = name.rpartition(".")
            place = getattr(module, owner, None) if owner else module
            if hasattr(place, function):
                label = f"{module.__name__.removesuffix('.writer')}.{owner or function}"
                listener = functools.partial(on_start, label)
                patches.append(Probe((place, function)).patch(listener))
        return patches

    def on_bar(self, package: str, call: ProbedCall) -> Around:
        bar = call.args[0]
        yield
        if self._recorder.is_direct(package):
            disabled, position = bool(bar.disable), call.kwargs.get("position")
            self._recorder.once(ev.BarShown(package, disabled=disabled, position=position))

    def _write(self, path: Any, mode: ev.FileMode) -> str | None:
        """Note a write; return the path's name, or None if it is a cache or a lock, or our own."""
        name = self._recorder.name(path)
        hidden = any(p.startswith(".") or p == "__pycache__" for p in Path(name).parts)
        no_file = name.endswith(".lock") or name.startswith(("/dev/", "/proc/", "/sys/"))
        if hidden or no_file or self._is_own(name):
            return None
        # A handler of `logging` appends whole lines, one a record.
        is_logged = mode == "a" and any(f.f_globals.get("__name__") == "logging" for f in frames())
        if not is_logged:
            self._recorder.once(ev.FileWritten(name, mode=mode))
        return name

    def _is_own(self, name: str) -> bool:
        """Whether a file is of the check itself; the script's temporary files lie there too."""
        return name.startswith(self._own) and not name.startswith(self._temporary)


def _mode(mode: str | None, flags: int) -> Literal["w", "a", ""]:
    """Return `w` or `a` for a file that is opened to be emptied or appended to, else nothing."""
    if mode is None:
        emptied = flags & os.O_TRUNC and not flags & os.O_EXCL
        return "w" if emptied else "a" if flags & os.O_APPEND else ""
    # `x` lets only one rank write; `r+` changes parts of a file, as a memory map of numpy's does.
    return "w" if "w" in mode else "a" if "a" in mode else ""


def _state_dicts(saved: Any, depth: int = _DEPTH) -> Iterator[Mapping[str, Tensor]]:
    """Yield the mappings from names to tensors in what is saved or was loaded."""
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        return
    tensors = {name: value for name, value in saved.items() if isinstance(value, Tensor)}
    if tensors:
        yield tensors
    if depth:
        for value in saved.values():
            yield from _state_dicts(value, depth - 1)
