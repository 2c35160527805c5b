"""Look for the recipe file or run that a user named, where it is not at the given path.

The search is bounded in folders and time: it runs after a mistake, maybe in a home directory.
"""

import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Literal

Kind = Literal["file", "run", "runs"]
"""A file, the directory of a run, or a folder of runs."""

_MOST_FOLDERS, _MOST_ENTRIES, _MOST_S = 400, 2000, 0.3
_UP = 3
"""Search this many folders above the current one."""
_DEPTH, _DEPTH_BESIDE = 3, 2
"""Levels that are searched below the current folder, and below the one above it."""
_SKIPPED = {"node_modules", "site-packages", "venv", "env", "runs", "__pycache__"}


def nearby(target: str | Path, *kinds: Kind) -> str:
    """Return " There is one at …" for the nearest of that name, with the command; or nothing."""
    near = find_nearby(target, *kinds)
    if near is None:
        return ""
    command = _corrected(Path(target), near)
    return f" There is one at {near}: {command}" if command else f" There is one at {near}."


def find_nearby(target: str | Path, *kinds: Kind) -> str | None:
    """Return the path of the nearest target of that name, relative to the current folder."""
    path = Path(target)
    if path.name in ("", ".."):
        return None
    for folder in _folders(Path.cwd()):
        for candidate in _candidates(folder, path, kinds):
            if candidate.resolve() != path.resolve():  # what was named is known to be none
                return os.path.relpath(candidate)
    return None


def _candidates(folder: Path, target: Path, kinds: tuple[Kind, ...]) -> Iterator[Path]:
    """Yield the paths in a folder with the target's name and one of these kinds."""
    places = [folder / name for name in dict.fromkeys((target, Path(target.name)))]
    for kind in kinds:
        if kind == "file":
            yield from filter(_is_file, places)
        elif kind == "run":
            yield from filter(_is_run, (*places, folder / "runs" / target.name))
        else:
            yield from (place for place in places if any(map(_is_run, _folders_in(place))))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_run(path: Path) -> bool:
    return _is_file(path / "settings.toml") or _is_file(path / "events.jsonl")


def _folders(here: Path) -> Iterator[Path]:
    """Yield folders to search: the current one, its parents, folders below it and its siblings."""
    above = list(islice(here.parents, _UP))
    yield from (here, *above)
    # The root is not searched: some system folders answer slowly.
    tops = [(here, _DEPTH), *((folder, _DEPTH_BESIDE) for folder in above[:1])]
    below = chain.from_iterable(_below(*top) for top in tops if top[0] != top[0].parent)
    until = time.monotonic() + _MOST_S
    for folder in islice(below, _MOST_FOLDERS):
        if time.monotonic() > until:
            return
        yield folder


def _below(top: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below one, level by level."""
    waiting = deque([(top, depth)])
    while waiting:
        folder, levels = waiting.popleft()
        for inner in _folders_in(folder):
            if inner.name in _SKIPPED or _is_file(inner / "pyvenv.cfg"):
                continue
            yield inner
            if levels > 1:
                waiting.append((inner, levels - 1))


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders among a folder's first entries, without hidden ones and links."""
    try:
        with os.scandir(folder) as entries:
            some = [
                entry.name
                for entry in islice(entries, _MOST_ENTRIES)
                if entry.name[0] != "." and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
    return [folder / name for name in sorted(some)]


def _corrected(wrong: Path, right: str) -> str:
    """Return the command that was typed with the right place in it; nothing where none was."""
    program, *words = sys.argv
    meant = (wrong, wrong.with_suffix(""))  # a recipe file's name may lack its ending
    if Path(program).stem not in ("samestep", "__main__") or not words:
        return ""
    verb, *words = words
    corrected = [right if Path(word) in meant else word for word in words]
    return shlex.join(["samestep", verb, *corrected]) if corrected != words else ""
