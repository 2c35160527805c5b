"""`--mirror URL`: a thread copies what a run announces to a store while it trains.

Nothing is queued: the thread compares what the run directory has now with what it has copied. A
checkpoint's files come first, then the records, and last the index that names it.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Self

from samestep.base.errors import UserError
from samestep.base.run.files import read_object, write_object
from samestep.base.run.index import Entry, Index, Retention, index_text, read_index, shards_of
from samestep.base.run.records import Record
from samestep.base.run.store import FILES, INDEX, RECORDS, Store
from samestep.base.settings import Settings

LOOK_EVERY_S = 30.0
"""Between two looks without a new checkpoint; longer where to copy the records takes long."""
_SHARE = 0.1
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Before a store that has failed is tried again, at first and at most."""
QUIET_S, HURRIED_S = 300.0, 30.0
"""How long the end waits for a store that takes nothing more; and for one that never answered, or
in all after a signal or failure."""
_ASK_EVERY_S, _SAY_AFTER_S = 0.1, 1.0


class Mirror:
    """Copies a run to a store. Rank 0 has it."""

    def __init__(
        self,
        settings: Settings,
        show_message: Callable[[Record], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._address = str(settings.mirror)
        self._show_message, self._stopped = show_message, stopped
        self._keeps_all = settings.keep_top_k is settings.keep_newest is settings.keep_hours is None
        self._here, self._run = Path.cwd(), Path()  # a recipe may change the working directory
        self._store: Store | None = None
        self._there = Index()
        """The store's index."""
        self._sent: dict[str, tuple[int, int]] = {}
        """Files as they were when they were copied: time and size."""
        self._news, self._over = threading.Event(), threading.Event()
        self._got_on, self._why = 0.0, "no answer"
        self._refused = self._told = False
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread.ident is not None:
            self._end(failed=kind is not None)

    def take(self, record: Record) -> None:
        """Begin with the run's first record; after a checkpoint, look at once."""
        event = record["event"]
        if "run_dir" in record and self._thread.ident is None:
            self._run = (self._here / record["run_dir"]).resolve()
            self._thread.start()
        if self._refused:
            self._complain()
        if event == "checkpoint":
            self._news.set()

    def _follow(self) -> None:
        pause_s = 0.0
        while True:
            ending, began = self._over.is_set(), time.monotonic()
            self._news.clear()  # before the look: what comes meanwhile is looked at again
            try:
                self._copy()
            except Exception as error:  # whatever a store's client raises
                self._why = (str(error).strip() or type(error).__name__).splitlines()[0]
                pause_s = min(2 * pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                (time.sleep if ending else self._over.wait)(FIRST_PAUSE_S if ending else pause_s)
                continue
            if ending or self._refused:
                return
            pause_s = 0.0
            took_s = time.monotonic() - began
            if not self._over.is_set():
                self._news.wait(max(LOOK_EVERY_S, took_s / _SHARE))

    def _copy(self) -> None:
        """Copy what the store lacks, the newest checkpoint first."""
        if (store := self._store or self._connected()) is None:
            return
        folder = self._run / "checkpoints"
        while lacking := self._lacking(index := read_index(folder)):
            entry = max(lacking, key=lambda e: e.step)
            others = tuple(e for e in self._there.checkpoints if e.path != entry.path)
            self._publish(store, replace(self._there, checkpoints=others))  # other bytes, if any
            try:
                for name in (entry.path, *entry.files):
                    store.put(folder / name, f"checkpoints/{name}", self._note)
            except FileNotFoundError:
                if entry in read_index(folder).checkpoints:
                    raise
            else:
                self._announce(store, index, entry)
        self._announce(store, index)

    def _connected(self) -> Store | None:
        store = Store(self._address)
        self._there = store.index()
        if self._there.checkpoints:
            head = (store.read(RECORDS, 1 << 16) or b"another run").partition(b"\n")[0]
            with (self._run / RECORDS).open("rb") as file:
                self._refused = file.read(len(head)) != head
            if self._refused:
                self._why = "it holds another run"
                return None
        for name in {*self._there.gone} - {e.path for e in self._there.checkpoints}:
            _remove(store, name)  # what a kill has left
        self._store = store
        return store

    def _lacking(self, index: Index) -> list[Entry]:
        has = {(entry.path, entry.sha256) for entry in self._there.checkpoints}
        return [entry for entry in index.checkpoints if (entry.path, entry.sha256) not in has]

    def _announce(self, store: Store, index: Index, new: Entry | None = None) -> None:
        """Copy the records, then the index of what is there: `new` is.

        What the run has removed goes as soon as it lacks nothing there; until then the last and the
        best stay. Newer ones are of a run that continued elsewhere, and stay.
        """
        lacking = [entry for entry in self._lacking(index) if entry != new]
        named, step = {e.path for e in index.checkpoints}, index.last.step if index.last else 0
        others = tuple(e for e in self._there.checkpoints if e.path not in named)
        if not self._keeps_all:
            old = replace(index, checkpoints=tuple(e for e in others if e.step <= step))
            newest = old.prune(Retention(newest=1)).checkpoints if lacking else ()
            others = (*newest, *(e for e in others if e.step > step))
        entries = (*others, *(e for e in index.checkpoints if e not in lacking))
        for name, file in self._changed().items():
            state, content = _state(file), file.read_bytes()
            end = content.rfind(b"\n") + 1 if file.suffix == ".jsonl" else None  # whole lines
            store.write(name, content[:end])
            self._sent[name] = state
            self._note()
        entries = tuple(sorted(entries, key=lambda entry: entry.step))
        self._publish(store, replace(index, checkpoints=entries))

    def _publish(self, store: Store, index: Index) -> None:
        """Write the store's index if it has changed, then remove what it names no more."""
        if index.checkpoints == self._there.checkpoints:
            return
        gone = {e.path for e in self._there.checkpoints} - {e.path for e in index.checkpoints}
        index = replace(index, gone=tuple(sorted(gone)))
        store.write(INDEX, index_text(index).encode())
        self._there = index
        for name in gone:
            _remove(store, name)
        self._note()

    def _changed(self) -> dict[str, Path]:
        matches = (file for pattern in FILES for file in sorted(self._run.glob(pattern)))
        files = [f for f in matches if f.name[0] != "." and f.is_file() and not f.is_symlink()]
        named = {file.relative_to(self._run).as_posix(): file for file in files}
        return {name: file for name, file in named.items() if self._sent.get(name) != _state(file)}

    def _note(self) -> None:
        """Note that the store has taken something."""
        self._got_on = time.monotonic()

    def _end(self, *, failed: bool) -> None:
        """Wait until all is copied, as long as the store takes anything; say how it ended."""
        began = time.monotonic()
        waits = False
        self._over.set()
        self._news.set()
        while self._thread.is_alive():
            now, hurried = time.monotonic(), failed or self._stopped() or self._store is None
            if now > (began + HURRIED_S if hurried else max(began, self._got_on) + QUIET_S):
                break
            if now > began + _SAY_AFTER_S and not waits:
                waits = True
                self._say("note", f"waits until {self._address} has the whole run.")
            self._thread.join(_ASK_EVERY_S)
        if not self._thread.is_alive() and not self._refused:
            self._say("link", f"{self._address} has the whole run.")
            return
        self._complain()
        missing = [*self._changed()]
        with contextlib.suppress(UserError):  # a damaged index, a full disk
            index = read_index(self._run / "checkpoints")
            missing += [f"checkpoints/{entry.path}" for entry in self._lacking(index)]
            lacks = {"address": self._address, "why": self._why, "missing": missing}
            if result := read_object(self._run / "result.json"):
                write_object(self._run / "result.json", result | {"mirror": lacks})

    def _complain(self) -> None:
        """Say once why the store does not have the run."""
        helps = "--resume copies what is missing; the local run is complete."
        if self._refused:
            helps = "Resume with a different --mirror."
        if not self._told:
            self._say("warning", f"not copied to {self._address}: {self._why}. {helps}")
        self._told = True

    def _say(self, kind: str, text: str) -> None:
        self._show_message({"event": "tracker", "tracker": "mirror", "kind": kind, "text": text})


def _state(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_mtime_ns, stat.st_size


def _remove(store: Store, name: str) -> None:
    for file in (name, shards_of(name)):
        store.remove(f"checkpoints/{file}")
