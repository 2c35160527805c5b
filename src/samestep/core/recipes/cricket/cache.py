"""Matches read once and cached: read in parallel, resumed after a kill, shared by processes.

The holder of the lock reads; others wait and find the result. Without file locks several may read
at once: each writes files of its own and renames them, so the result is the same. An unfinished
reading is resumed.
"""

import contextlib
import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import samestep
from samestep.base import words
from samestep.base.counting import counting
from samestep.base.errors import UserError, listed
from samestep.base.machine import usable_cores
from samestep.base.run.files import Held, hold
from samestep.core.recipes.cricket.corpus import VERSION, Corpus, from_documents, load, merge
from samestep.core.recipes.cricket.match_files import Document, MatchFiles, open_match_files

_FILES_PER_PART = 64
_ASK_EVERY_S = 0.05
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)

# A process that reads matches: a fresh interpreter, which ends with the one that started it. Not a
# fork, since the training has threads, and not `multiprocessing`, which would run the user's script
# again. -P: nothing in the user's folder may pose as a package.
_PROGRAM = """\
import sys
sys.path.append(sys.argv.pop(1))
from samestep.core.recipes.cricket.corpus import serve
serve()
"""
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM, str(Path(samestep.__file__).parent.parent))


class Matches(NamedTuple):
    """The matches of a source, and what the user should know of them."""

    corpus: Corpus
    notes: tuple[str, ...] = ()


def open_corpus(
    path: Path, *, folder: Path | None = None, skip_bad: int = 0, jobs: int | None = None
) -> Matches:
    """Return the matches of a folder, an archive or a file, from the cache if they are there.

    Args:
        path: folder, zip, tar or JSON file.
        folder: where read matches are kept; by default ~/.cache/samestep/cricket.
        skip_bad: how many files may be unreadable; they are left out and named.
        jobs: processes that read; by default one for each core that this process may use.
    """
    source = open_match_files(path)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = folder or Path(home) / "samestep" / "cricket"
    named = hashlib.sha256(os.path.realpath(path).encode("utf-8", "surrogateescape")).hexdigest()
    stamp = hashlib.sha256(f"{VERSION} {source.stamp}".encode()).hexdigest()
    final = folder / f"{named[:16]}-{stamp[:16]}.npz"
    note = ""
    corpus = _load(final)
    if corpus is None:
        jobs = jobs or len(usable_cores())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            corpus, note = _build(source, final, jobs)
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


def _build(source: MatchFiles, final: Path, jobs: int) -> tuple[Corpus, str]:
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
            corpus = merge(_read_parts(source, parts, jobs))
            corpus.save_at(final, parts)
            shutil.rmtree(parts, ignore_errors=True)
            # What was kept by another version, or before the files changed.
            others = [path for path in final.parent.glob(f"{name}-*") if path != final]
            for path in others:
                shutil.rmtree(path, ignore_errors=True)
                if path.is_file():
                    path.unlink(missing_ok=True)
            what = "What was kept of these matches was of another version, or of other files"
            return corpus, f"{what}: read anew." if others else ""


def _read_parts(source: MatchFiles, parts: Path, jobs: int) -> list[Corpus]:
    """Read what is not there yet; return all parts in order."""
    num_files = len(source.list_names())
    paths = [parts / f"{start:07}.npz" for start in range(0, num_files, _FILES_PER_PART)]
    there = [_load(path) for path in paths]
    missing = [path for path, part in zip(paths, there, strict=True) if part is None]

    def tasks() -> Iterator[tuple[Path, list[Document]]]:
        documents = source.read()
        for path, part in zip(paths, there, strict=True):
            chunk = list(islice(documents, _FILES_PER_PART))
            if part is None:
                yield path, chunk

    total = num_files - _FILES_PER_PART * (len(paths) - len(missing))
    with counting("reading matches", max(total, 0)) as count:
        _read_all(tasks(), min(jobs, len(missing)), count)
    loaded = (part or _load(path) for path, part in zip(paths, there, strict=True))
    whole = [part for part in loaded if part is not None]
    if len(whole) < len(paths):
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
            from_documents(documents).save_at(path, path.parent)
            count(len(documents))
        return
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        idle = []
        for _ in range(jobs):  # Ctrl-C is for the one that waits
            reader = subprocess.Popen(_COMMAND, stdin=pipe, stdout=pipe, start_new_session=True)
            idle.append(reader)
            stack.callback(reader.communicate)  # lets it end
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        stack.callback(pool.shutdown, cancel_futures=True)

        def read(path: Path, documents: list[Document]) -> int:
            process = idle.pop()
            try:
                _ask(process, (path, documents))
            finally:
                idle.append(process)
            return len(documents)

        pending: set[Future[int]] = set()
        for task in tasks:
            if len(pending) >= 2 * jobs:  # so that a large archive never lies in memory
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for each in done:
                    count(each.result())
            pending.add(pool.submit(read, *task))
        for each in pending:
            count(each.result())


def _ask(process: subprocess.Popen[bytes], task: tuple[Path, list[Document]]) -> None:
    """Have a process read the documents of a part, and raise what it could not write."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(task, process.stdin, protocol=5)
        process.stdin.flush()
        error = pickle.load(process.stdout)  # noqa: S301 - our own process
    except (BrokenPipeError, EOFError, pickle.UnpicklingError) as lost:
        raise UserError(
            f"A process that read matches ended with exit code {process.wait()}; the system may "
            "have ended it for its memory. Start again: what was read is kept."
        ) from lost
    if error is not None:
        raise error


def _check_bad(corpus: Corpus, path: Path, skip_bad: int) -> None:
    bad = corpus.lists["bad"]
    if len(bad) > skip_bad:
        shown = listed(bad, between="\n  ")
        raise UserError(
            f"{len(bad):,} of the matches in {path} cannot be read:\n  {shown}\n"
            f"Mend or remove them, or leave them out: --skip-bad {len(bad)}"
        )
    if not corpus.num_balls:
        passed = corpus.lists["passed"]
        first = f", such as {passed[0]}" if passed else ""
        raise UserError(
            f"There are no twenty-over matches with balls in {path}: {len(passed)} files are "
            f"others{first}. Name Cricsheet's T20 matches with --data-dir."
        )


def _about(corpus: Corpus) -> Iterator[str]:
    reasons = {"bad": "cannot be read", "passed": "are not twenty-over matches with balls"}
    for name, what in reasons.items():
        if files := corpus.lists[name]:
            shown = listed(files, between="; ")
            yield f"Left out because they {what}: {words.count(len(files), 'file')}. {shown}."
