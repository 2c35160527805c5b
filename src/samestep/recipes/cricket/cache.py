"""Matches read once and cached: read in parallel, resumed after a kill, shared by processes.

The holder of the lock reads; others wait and find the result. Without file locks several may read
at once: each writes files of its own and renames them, so the result is the same. An unfinished
reading is resumed.
"""

import contextlib
import hashlib
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from samestep.errors import UserError
from samestep.machine import usable_cores
from samestep.recipes.cricket.corpus import VERSION, Corpus, from_documents, load, merge
from samestep.recipes.cricket.match_files import Document, MatchFiles, open_match_files
from samestep.recipes.cricket.reading import Reader, save
from samestep.reporting import words
from samestep.reporting.progress import counting
from samestep.run.files import Held, hold

_FILES_PER_PART = 64
_ASK_EVERY_S = 0.05
_NUM_SHOWN = 3
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


@dataclass(frozen=True)
class Matches:
    """The matches of a source, and what the user should know of them."""

    corpus: Corpus
    notes: tuple[str, ...] = ()


def default_folder() -> Path:
    """Return where read matches are kept unless the user names another folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "samestep" / "cricket"


def open_corpus(
    path: Path,
    *,
    folder: Path | None = None,
    skip_bad: int = 0,
    jobs: int | None = None,
    shown: bool = True,
) -> Matches:
    """Return the matches of a folder, an archive or a file, from the cache if they are there.

    Args:
        path: folder, zip, tar or JSON file.
        folder: where read matches are kept.
        skip_bad: how many files may be unreadable; they are left out and named.
        jobs: processes that read; by default one for each core that this process may use.
        shown: whether this process speaks: a progress bar on a terminal.
    """
    source = open_match_files(path)
    folder = folder or default_folder()
    named = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()
    stamp = hashlib.sha256(f"{VERSION} {source.stamp}".encode()).hexdigest()
    final = folder / f"{named[:16]}-{stamp[:16]}.npz"
    note = ""
    corpus = _load(final)
    if corpus is None:
        jobs = jobs or len(usable_cores())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            corpus, note = _build(source, final, jobs, shown=shown)
        except OSError as error:
            why = error.strerror or error
            note = f"The matches are read anew by every process: {folder} cannot be used ({why})."
            source.list_names()
            corpus = merge([from_documents(source.read())])
    _check_bad(corpus, path, skip_bad)
    return Matches(corpus, tuple(filter(None, (note, *_about(corpus)))))


def _load(path: Path) -> Corpus | None:
    """Return a kept corpus, or None if it is absent or no such thing."""
    try:
        with path.open("rb") as file:
            return load(file)
    except _UNREADABLE:
        return None


def _build(source: MatchFiles, final: Path, jobs: int, *, shown: bool) -> tuple[Corpus, str]:
    """Read the matches, or wait for another process that does; return them, and a note."""
    name = final.name.partition("-")[0]
    while True:
        try:
            lock = hold(final.with_name(f"{name}.lock"))
        except Held:
            time.sleep(_ASK_EVERY_S)
            continue
        with contextlib.closing(lock):
            if (corpus := _load(final)) is not None:
                return corpus, ""
            parts = final.with_suffix(".parts")
            parts.mkdir(exist_ok=True)
            corpus = merge(_read_parts(source, parts, jobs, shown=shown))
            save(corpus, final, parts)
            shutil.rmtree(parts, ignore_errors=True)
            return corpus, _remove_others(final, name)


def _remove_others(final: Path, name: str) -> str:
    """Remove what was kept of the same source by another version, or before its files changed."""
    others = [path for path in final.parent.glob(f"{name}-*") if path != final]
    for path in others:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if not others:
        return ""
    return "What was kept of these matches was of another version, or of other files: read anew."


def _read_parts(source: MatchFiles, parts: Path, jobs: int, *, shown: bool) -> list[Corpus]:
    """Read what is not there yet; return all parts in order."""
    num_files = len(source.list_names())
    starts = range(0, num_files, _FILES_PER_PART)
    paths = [parts / f"{start:07}.npz" for start in starts]
    there = [_load(path) for path in paths]
    missing = [path for path, part in zip(paths, there, strict=True) if part is None]

    def tasks() -> Iterator[tuple[Path, list[Document]]]:
        documents = source.read()
        for path, part in zip(paths, there, strict=True):
            chunk = list(islice(documents, _FILES_PER_PART))
            if part is None:
                yield path, chunk

    total = num_files - _FILES_PER_PART * (len(paths) - len(missing))
    with counting("reading matches", max(total, 0), shown=shown) as count:
        _read_all(tasks(), min(jobs, len(missing)), count)
    found = [
        part if part is not None else _load(path) for path, part in zip(paths, there, strict=True)
    ]
    whole = [part for part in found if part is not None]
    if len(whole) < len(found):
        raise UserError(
            f"{parts} lost files while matches were read into it. See that nothing clears this "
            "folder, and start again."
        )
    return whole


def _read_all(
    tasks: Iterator[tuple[Path, list[Document]]], jobs: int, count: Callable[[int], object]
) -> None:
    """Read matches in `jobs` processes; a part is one task."""
    if jobs <= 1:
        for path, documents in tasks:
            save(from_documents(documents), path, path.parent)
            count(len(documents))
        return
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Reader()) for _ in range(jobs)]
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(pool.shutdown, cancel_futures=True)

        def read(path: Path, documents: list[Document]) -> int:
            reader = readers.pop()
            try:
                reader.read(path, documents)
            finally:
                readers.append(reader)
            return len(documents)

        pending: set[Future[int]] = set()
        for path, documents in tasks:
            if len(pending) >= 2 * jobs:  # so that a large archive never lies in memory
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for each in done:
                    count(each.result())
            pending.add(pool.submit(read, path, documents))
        for each in pending:
            count(each.result())


def _check_bad(corpus: Corpus, path: Path, skip_bad: int) -> None:
    bad = corpus.lists["bad"]
    if len(bad) > skip_bad:
        more = f"\n  and {len(bad) - _NUM_SHOWN:,} more" if len(bad) > _NUM_SHOWN else ""
        raise UserError(
            f"{len(bad):,} of the matches in {path} cannot be read:"
            + "".join(f"\n  {each}" for each in bad[:_NUM_SHOWN])
            + f"{more}\nMend or remove them, or leave them out: --skip-bad {len(bad)}"
        )
    if not corpus.num_balls:
        passed = corpus.lists["passed"]
        first = f", such as {passed[0]}" if passed else ""
        raise UserError(
            f"There are no twenty-over matches with balls in {path}: {len(passed)} files are "
            f"others{first}. Name Cricsheet's T20 matches with --data-dir."
        )


def _about(corpus: Corpus) -> Iterator[str]:
    reasons = {"bad": "cannot be read", "passed": "are no twenty-over matches with balls"}
    for name, what in reasons.items():
        if found := corpus.lists[name]:
            more = f"; and {len(found) - _NUM_SHOWN:,} more" if len(found) > _NUM_SHOWN else ""
            shown = "; ".join(found[:_NUM_SHOWN])
            yield f"Left out because they {what}: {words.count(len(found), 'file')}. {shown}{more}."
