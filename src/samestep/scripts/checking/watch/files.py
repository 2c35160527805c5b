"""Watch files: what a rank writes, saves, loads and downloads, and the trackers and bars it starts.

Notes `write` {path, mode}, mode one of `w` (emptied first), `a` (appended), `rename` (replaced);
`save` {path, tensors, wrapped}; `load` {path, map_location, weights_only, names, own}; `download`
{what, fetched}; `tracker` {name, asked}; `progress` {name, disabled, position}. Paths are real
ones, relative to the script's folder where they lie in it. Each is noted once per line and path.

Python's audit hook does not see what PyTorch writes in C++, and others in Rust. Their functions are
patched instead; those of packages that may not be installed, once they are imported.
"""

import functools
import inspect
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from samestep.base.patches import Patch, patched, patched_when_imported
from samestep.scripts.checking.recorder import Recorder

_DEPTH, _NAMES = 3, 5
_PLAIN = (str, int, bool, os.PathLike)
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
    wanted: dict[str, Callable[[types.ModuleType], list[Patch]]] = {
        "tqdm.std": lambda m: [(m.tqdm, "__init__", files.around_tqdm)],
        "rich.progress": lambda m: [(m.Progress, "__init__", files.around_rich)],
        "safetensors.torch": lambda m: [(m, "save_file", files.around_save)],
        "requests.sessions": lambda m: [(m.Session, "request", files.around_request)],
        "torchvision.datasets": files.data_sets,
    }
    wanted |= {name: functools.partial(files.trackers, of) for name, of in _TRACKERS.items()}
    patches: list[Patch] = [
        (torch, "save", files.around_save),
        (torch.jit, "save", files.around_save),
        (torch, "load", files.around_load),
        (torch.profiler.profile, "export_chrome_trace", files.around_export),
    ]
    with patched(*patches), patched_when_imported(wanted):
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
        """Note what Python opens, renames and asks for: called very often, and never to raise.

        A loader's worker is not a rank.
        """
        if event not in self._audited or not self.is_on or get_worker_info() is not None:
            return
        if event == "open":
            path, mode, flags = arguments
            how = _mode(mode, flags)
            # With an opener, `tempfile` names only the folder.
            if how and isinstance(path, str | bytes | os.PathLike) and not os.path.isdir(path):  # noqa: PTH112 - bytes, too
                self._write(path, how)
        elif event == "os.rename":
            source = self._recorder.name(arguments[0])
            if self._recorder.is_direct("os", "pathlib", "shutil") and not self._is_own(source):
                self._write(arguments[1], "rename")
        elif arguments[1] is None:  # an address without data to send
            self._recorder.once("download", what=str(arguments[0]), fetched=True)

    def around_save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note what is saved, and whether its names are those of a wrapper."""
        kept, place, *_ = inspect.signature(original).bind(*args, **kwargs).arguments.values()
        path = None
        if isinstance(place, str | os.PathLike):
            path = self._write(place, "w")
        dicts = list(_state_dicts(kept))
        wrapped = next((d for d in dicts if all(n.startswith(_WRAPPED) for n in d)), {})
        self._recorder.once(
            "save",
            path=path,
            tensors=sum(len(one) for one in dicts),
            wrapped=list(wrapped)[:_NAMES],
        )
        return original(*args, **kwargs)

    def around_export(self, original: Callable[..., Any], profiler: Any, path: Any) -> Any:
        """Note a trace, which the profiler writes in C++."""
        self._write(path, "w")
        return original(profiler, path)

    def around_load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = self._recorder.is_direct()
        loaded = original(*args, **kwargs)
        place = args[0] if args else kwargs.get("f")
        if isinstance(place, str | os.PathLike):
            where = args[1] if len(args) > 1 else kwargs.get("map_location")
            names = [name for found in _state_dicts(loaded) for name in found][:_NAMES]
            self._recorder.once(
                "load",
                path=self._recorder.name(place),
                map_location=None if where is None else str(where),
                weights_only=kwargs.get("weights_only"),
                names=names,
                own=own,
            )
        return loaded

    def around_request(
        self, original: Callable[..., Any], session: Any, method: str, url: Any, **kwargs: Any
    ) -> Any:
        """Note what is fetched with requests by the user's own code."""
        if method.upper() == "GET" and self._recorder.is_direct("requests"):
            self._recorder.once("download", what=str(url), fetched=True)
        return original(session, method, url, **kwargs)

    def data_sets(self, module: types.ModuleType) -> list[Patch]:
        """Return patches of the data sets that download themselves, if they are not there yet."""

        def around(original: Callable[..., Any], data_set: Any, *args: Any, **kwargs: Any) -> Any:
            what = f"{type(data_set).__name__}.download"
            self._recorder.once("download", what=what, fetched=False)
            return original(data_set, *args, **kwargs)

        kinds = {kind for kind in vars(module).values() if isinstance(kind, type)}
        return [(kind, "download", around) for kind in kinds if "download" in vars(kind)]

    def trackers(self, names: tuple[str, ...], module: types.ModuleType) -> list[Patch]:
        """Return patches of what starts a tracker."""
        found: list[Patch] = []
        for name in names:
            owner, _, function = name.rpartition(".")
            place = getattr(module, owner, None) if owner else module
            if hasattr(place, function):
                label = f"{module.__name__.removesuffix('.writer')}.{owner or function}"
                found.append((place, function, functools.partial(self._around_tracker, label)))
        return found

    def _around_tracker(
        self, label: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._recorder.is_direct(label.partition(".")[0]):
            given = {str(n): v for n, v in enumerate(args) if isinstance(v, _PLAIN)} | kwargs
            asked = {name: str(v) for name, v in given.items() if isinstance(v, _PLAIN)}
            self._recorder.once("tracker", name=label, asked=asked)
        return original(*args, **kwargs)

    def around_tqdm(self, original: Callable[..., Any], bar: Any, *args: Any, **kwargs: Any) -> Any:
        original(bar, *args, **kwargs)
        if self._recorder.is_direct("tqdm"):
            disabled, position = bool(bar.disable), kwargs.get("position")
            self._recorder.once("progress", name="tqdm", disabled=disabled, position=position)

    def around_rich(self, original: Callable[..., Any], bar: Any, *args: Any, **kwargs: Any) -> Any:
        original(bar, *args, **kwargs)
        if self._recorder.is_direct("rich"):
            self._recorder.once("progress", name="rich", disabled=bool(bar.disable), position=None)

    def _write(self, path: Any, mode: str) -> str | None:
        """Note a write; return the path's name, or None if it is a cache or a lock, or our own."""
        name = self._recorder.name(path)
        hidden = any(p.startswith(".") or p == "__pycache__" for p in Path(name).parts)
        no_file = name.endswith(".lock") or name.startswith(("/dev/", "/proc/", "/sys/"))
        if hidden or no_file or self._is_own(name):
            return None
        if mode != "a" or not self._is_logged():
            self._recorder.once("write", path=name, mode=mode)
        return name

    def _is_own(self, name: str) -> bool:
        """Whether a file is of the check itself; the script's temporary files lie there too."""
        return name.startswith(self._own) and not name.startswith(self._temporary)

    def _is_logged(self) -> bool:
        """Whether a handler of `logging` opens the file: it appends whole lines, one a record."""
        frame = sys._getframe(1)  # noqa: SLF001 - a stack inspected at each file
        names = set()
        while frame.f_back is not None:
            names.add(frame.f_globals.get("__name__"))
            frame = frame.f_back
        return "logging" in names


_WRAPPED = ("module.", "_orig_mod.")


def _mode(mode: str | None, flags: int) -> str:
    """Return `w` or `a` for a file that is opened to be emptied or appended to, else nothing."""
    if mode is None:
        emptied = flags & os.O_TRUNC and not flags & os.O_EXCL
        return "w" if emptied else "a" if flags & os.O_APPEND else ""
    # `x` lets only one rank write; `r+` changes parts of a file, as a memory map of numpy's does.
    return "w" if "w" in mode else "a" if "a" in mode else ""


def _state_dicts(kept: Any, depth: int = _DEPTH) -> Iterator[Mapping[str, Tensor]]:
    """Yield the mappings from names to tensors in what is saved or was loaded."""
    if not isinstance(kept, Mapping) or not all(isinstance(name, str) for name in kept):
        return
    tensors = {name: value for name, value in kept.items() if isinstance(value, Tensor)}
    if tensors:
        yield tensors
    if depth:
        for value in kept.values():
            yield from _state_dicts(value, depth - 1)
