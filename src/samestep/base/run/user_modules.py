"""The modules that a recipe's file imports and that are the user's own, not a library's.

They are found without running them, kept in the run's directory, and imported from there where the
run's copy of the recipe is used.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from samestep.base.run.code_copy import CODE, FACTS, MB
from samestep.base.run.code_pieces import Find, module_path
from samestep.base.run.code_source import imported_by
from samestep.base.run.files import cannot_write, read_object, write_object

MOST_FILES, MOST = 500, 10 * MB
"""Of a recipe that imports more, the rest is neither kept nor compared."""
_OUTSIDE = ".imported"
"""In a job's copy of the code, modules from outside of it."""
_NEVER = frozenset({"samestep", "torch", "__main__", "__mp_main__", *sys.stdlib_module_names})
_LIBRARIES = frozenset({"site-packages", "dist-packages"})
_BY_PATH = re.compile(r"\b(spec_from_file_location|SourceFileLoader|run_path)\(")


@dataclass(frozen=True, kw_only=True)
class UserModules:
    """Modules of the user's own: dotted name → file."""

    files: Mapping[str, Path] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    """Those that no import statement leads to: importlib found them."""
    complete: bool = True
    """False if there were too many."""
    originals: Mapping[str, Path] = field(default_factory=dict)
    """Of a run's copies, where they are from."""


def modules_of(file: Path, like: UserModules | None = None) -> UserModules:
    """Return the modules of the user's own that a file imports, and that these import.

    With `like`, those that are to be compared with a run's copy.
    """
    if (copy := copied_modules(file)) is not None:
        return copy
    find = finder(file, like.files if like else ())
    modules, complete = _closure(file, find, ())
    late = _loaded_by(file, modules) - {*modules} if like is None and complete else ()
    loaded = sorted(late) if like is None else like.whole
    whole = tuple(name for name in loaded if find(name) is not None)
    if whole:
        modules, complete = _closure(file, find, whole)
    if like is not None and not like.complete:
        modules = {name: path for name, path in modules.items() if name in like.files}
    return UserModules(files=modules, whole=whole, complete=complete)


def _loaded_by(file: Path, modules: Collection[str]) -> set[str]:
    """Return own modules that reading a recipe's file has imported, and calling its functions."""
    entry = _imported.get(os.path.realpath(file))
    if entry is None:
        return set()
    tops = {name.partition(".")[0] for name in modules}
    beside = str(file.parent) + os.sep
    late = {name for name in sys.modules.keys() - entry.before if _is_own(name)}
    late = {n for n in late if n.partition(".")[0] in tops or _origin(n).startswith(beside)}
    return {n for n in entry.names | late if os.path.realpath(_origin(n)) != os.path.realpath(file)}


def _closure(file: Path, find: Find, also: Collection[str]) -> tuple[dict[str, Path], bool]:
    """Return the modules that a file and `also` lead to, the nearest first; whether it is all."""
    modules, size = dict[str, Path](), 0
    waiting = deque([("", file)])
    while waiting:
        name, where = waiting.popleft()
        wanted = imported_by(where, name) | {*(() if name else also)}
        parts = (module_name.split(".") for module_name in sorted(wanted))
        for module in (".".join(p[: n + 1]) for p in parts for n in range(len(p))):
            if module in modules or (path := find(module)) is None:
                continue
            size += path.stat().st_size
            if len(modules) == MOST_FILES or size > MOST:
                return modules, False
            modules[module] = path
            waiting.append((module, path))
    return modules, True


# --- where a module is


def finder(file: Path | None, also: Collection[str] = ()) -> Find:
    """Return a function that finds modules of the user's own as `file`, or anyone, imports them.

    Nothing is imported for it. `also` are modules that count as the user's wherever they are.
    """
    found_at: dict[str, tuple[Path | None, Sequence[str] | None]] = {}
    beside = [] if file is None else [str(file.parent)]

    def located(name: str) -> tuple[Path | None, Sequence[str] | None]:
        """Return a module's file, and the folders where its modules are."""
        if name not in found_at:
            above, _, last = name.rpartition(".")
            found_at[name] = (None, None)
            if not last.isidentifier() or name.partition(".")[0] in _NEVER:
                return found_at[name]
            places = located(above)[1] if above else None
            path, inner = _inner(last, places or ()) if above else _top(name, beside)
            is_own = path and (name in also or not _LIBRARIES & {*path.parts})
            found_at[name] = (path if is_own else None, inner)
        return found_at[name]

    return lambda name: located(name)[0]


def _top(name: str, beside: list[str]) -> tuple[Path | None, Sequence[str] | None]:
    """Return the file of a module without a dot, and the folders where its modules are."""
    spec = None
    for finder in sys.meta_path:
        if spec is None and finder is not _copies and hasattr(finder, "find_spec"):
            is_usual = finder is importlib.machinery.PathFinder
            spec = finder.find_spec(name, [*beside, *sys.path] if is_usual else None)
    if spec is None:
        return None, None
    is_python = spec.has_location and str(spec.origin).endswith(".py")
    inner = spec.submodule_search_locations
    if is_python and _is_installed(Path(str(spec.origin)).parents[inner is not None]):
        return None, None
    return Path(str(spec.origin)) if is_python else None, None if inner is None else [*inner]


@lru_cache(maxsize=100)
def _is_installed(folder: Path) -> bool:
    """Whether packages are installed into a folder, as by `pip install --target`."""
    return next(folder.glob("*.dist-info"), None) is not None


def _inner(name: str, places: Sequence[str]) -> tuple[Path | None, Sequence[str] | None]:
    """Return the same of a module in a package; finders would need the package itself."""
    for place in places:
        package, module = Path(place, name, "__init__.py"), Path(place, f"{name}.py")
        if package.is_file():
            return package, [str(package.parent)]
        if module.is_file():
            return module, None
    inner = [str(Path(place, name)) for place in places if Path(place, name).is_dir()]
    return None, inner or None


def _origin(name: str) -> str:
    """Return the file that a module was read from; "" if it is not imported."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "origin", None) or ""


def _is_own(name: str) -> bool:
    """Whether a module that is imported is the user's own."""
    origin = _origin(name)
    is_never = name.partition(".")[0] in _NEVER
    return origin.endswith(".py") and not is_never and not any(lib in origin for lib in _LIBRARIES)


# --- what a run keeps


def kept_modules(run: Path, suffix: str = "") -> UserModules | None:
    """Return a run's copies of modules; None if it has none."""
    code = Path(CODE + suffix)
    facts = read_object(run / Path(FACTS).with_stem(code.name))
    table = facts.get("modules")
    if not isinstance(table, dict):
        return None
    return UserModules(
        files={name: run / code / module["file"] for name, module in table.items()},
        originals={name: Path(module["from"]) for name, module in table.items()},
        whole=tuple(facts["whole"]),
        complete=facts["complete"],
    )


def modules_note(run: Path) -> list[str]:
    """Return notes if a run has not kept all code of the user's own."""
    modules = kept_modules(run) or UserModules()
    files = [path for name in ("recipe.py", "script.py") if (path := run / name).is_file()]
    notes = [
        f"{path.name} runs code with {match[1]}() instead of an import: the run neither keeps nor "
        "compares that code. Import it by name, so that a resume notices edits."
        for path in (*files, *modules.files.values())
        if (match := _BY_PATH.search(path.read_text(encoding="utf-8", errors="replace")))
    ]
    if modules.complete:
        return notes
    note = (
        f"Your code imports more than {MOST_FILES} files or {MOST // MB} MB of your own. The run "
        f"keeps the first {len(modules.files)}: a resume does not notice edits of the others."
    )
    return [*notes, note]


def copied_modules(file: Path) -> UserModules | None:
    """Return the modules that a recipe's file in a run's directory was copied with."""
    stem = file.stem.removeprefix("recipe")
    if file.stem.startswith("recipe") and (modules := kept_modules(file.parent, stem)):
        return modules
    inside = (folder.parent for folder in file.absolute().parents if folder.name == CODE)
    return next((modules for run in inside if (modules := kept_modules(run))), None)


def keep_modules(run: Path, modules: UserModules, number: int | None = None) -> None:
    """Copy modules into a run's directory; with a number, what it has gets that in its name.

    They are in `code/` as they are imported; those in a job's copy of all code stay there.
    """
    facts, code = read_object(run / FACTS), run / CODE
    is_job = "root" in facts
    if not is_job and number is not None and code.is_dir():
        code.rename(code.with_name(f"{CODE}_before_{number}"))
        (run / FACTS).rename((run / FACTS).with_stem(f"{CODE}_before_{number}"))
    if not modules.files and modules.complete:
        return
    table = {}
    temporary = run / f".{CODE}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    target = code / _OUTSIDE if is_job else code
    for name, path in modules.files.items():
        if is_job and path.resolve().is_relative_to(code.resolve()):
            where = path.resolve().relative_to(code.resolve()).as_posix()
        else:
            below = module_path(name, path)
            where = f"{_OUTSIDE}/{below}" if is_job else below
            try:
                (temporary / below).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, temporary / below)
            except OSError as error:
                raise cannot_write(target / below, error) from error
        table[name] = {"file": where, "from": str(path.absolute())}
    if temporary.is_dir():
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    facts |= {"modules": table, "whole": modules.whole, "complete": modules.complete}
    write_object(run / FACTS, facts)


# --- where a recipe's file imports from


@dataclass
class _Imported:
    """What reading a recipe's file has imported."""

    names: set[str] = field(default_factory=set)
    before: frozenset[str] = frozenset()
    """Modules that were there before it was read the last time."""


_imported: dict[str, _Imported] = {}
_as_read: dict[str, tuple[int, int]] = {}
"""Own module → when its file was written, and its size, as it was imported."""


@contextmanager
def imports_of(file: Path, original: Path) -> Iterator[None]:
    """Let a recipe's file import what belongs to it; `original` is what it was copied from.

    A run's copy gets the run's copies. A module that is imported already, from another file or
    before it was edited, is imported anew.
    """
    copy = copied_modules(file)
    wanted = copy if copy or not _imported else modules_of(file)
    before, _copies.modules = _copies.modules, copy or UserModules()
    of_before = before.files if before.files != _copies.modules.files else ()
    _forget({} if wanted is None else wanted.files, of_before)
    # For its neighbours; the copies, too, for processes that loaders spawn.
    roots = (
        path.absolute().parents[name.count(".") + (path.name == "__init__.py")]
        for name, path in _copies.modules.files.items()
    )
    folders = [*dict.fromkeys(roots), file.parent.resolve(), original.parent.resolve()]
    sys.path[:0] = map(str, folders)
    imported = _imported.setdefault(os.path.realpath(file), _Imported())
    imported.before = frozenset(sys.modules)
    try:
        yield
    finally:
        new = {name for name in sys.modules.keys() - imported.before if _is_own(name)}
        imported.names |= new
        for name in new:
            _as_read[name] = _stamp(_origin(name))


def _stamp(path: str | Path) -> tuple[int, int]:
    try:
        status = Path(path).stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _forget(wanted: Mapping[str, Path], others: Collection[str]) -> None:
    """Forget modules that are imported from elsewhere than is wanted, or were edited since."""
    tops = {name.partition(".")[0] for name in others}
    for name, path in wanted.items():
        if origin := _origin(name):
            is_other = os.path.realpath(origin) != os.path.realpath(path)
            is_edited = _as_read.get(name, _stamp(path)) != _stamp(path)
            if is_edited:  # byte code has whole seconds only
                with suppress(OSError, NotImplementedError):
                    Path(importlib.util.cache_from_source(path)).unlink()
            if is_other or is_edited:
                tops.add(name.partition(".")[0])
    if tops:
        for name in [name for name in sys.modules if name.partition(".")[0] in tops]:
            del sys.modules[name]
            _as_read.pop(name, None)
        importlib.invalidate_caches()


class _CopyLoader(importlib.machinery.SourceFileLoader):
    """Read a copied module; it finds data where the original does, and leaves no byte code."""

    def __init__(self, name: str, path: str, original: Path) -> None:
        super().__init__(name, path)
        self._original = original

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError(path)

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self._original)
        super().exec_module(module)


class _Copies(importlib.abc.MetaPathFinder):
    """Finds the modules of a run whose own copy of the recipe was read."""

    modules = UserModules()

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        files, originals = self.modules.files, self.modules.originals
        if (file := files.get(name)) is not None:
            both = [str(module.parent) for module in (file, originals[name])]
            return importlib.util.spec_from_file_location(
                name,
                file,
                loader=_CopyLoader(name, str(file), originals[name]),
                submodule_search_locations=both if file.name == "__init__.py" else None,
            )
        inner = [module for module in files if module.startswith(f"{name}.")]
        if not inner:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        levels = {module: module.count(".") - name.count(".") for module in inner}
        places = (
            str(of[module].parents[levels[module] - (of[module].name != "__init__.py")])
            for of in (files, originals)
            for module in inner
        )
        spec.submodule_search_locations = list(dict.fromkeys(places))
        return spec


_copies = _Copies()
if _copies not in sys.meta_path:
    sys.meta_path.insert(0, _copies)
