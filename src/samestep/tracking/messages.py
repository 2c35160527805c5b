"""How the training's process and a tracker's process speak: lines of JSON over two pipes.

The training never waits for an answer, and a pipe that closes is news too: the other is gone.
"""

import contextlib
import json
import os
import selectors
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from samestep.tracking.access import without_credentials

_ORPHANS_S = 20.0


@dataclass(frozen=True, kw_only=True)
class TrackerOrder:
    """What a tracker's process is to do; the first line that it is given. No secret is in it."""

    tracker: str
    """A name, a file or a module."""
    name: str
    """What its files are called."""
    project: str
    run_name: str | None
    workspace: str | None
    tags: tuple[str, ...]
    offline: bool
    checkpoints: bool
    timeout_s: float
    pid: int | None
    """The training that goes on, which it follows and may choose to be offline; None after it."""


def wait_for(descriptors: Sequence[int], within_s: float | None) -> bool:
    """Wait until one of some pipes has news, or has closed; return whether one has."""
    with selectors.DefaultSelector() as selector:  # select() itself knows no descriptor above 1023
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(within_s))


class MessageReader:
    """Messages from a pipe: one JSON object per line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self._buffer = descriptor, b""
        self.closed = False
        """Whether the other side has closed the pipe."""

    def read(self, within_s: float | None) -> dict[str, Any] | None:
        """Return the next message; None if none comes within so many seconds, or ever."""
        while b"\n" not in self._buffer and not self.closed:
            if not wait_for([self.descriptor], within_s):
                return None
            more = os.read(self.descriptor, 65536)
            self._buffer += more
            self.closed = not more
        if b"\n" not in self._buffer:
            return None  # the end, with half a message at the most
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class Instructions:
    """What a tracker's process is told: its order, `go` with the run directory, `end`."""

    def __init__(self) -> None:
        self._messages = MessageReader(0)

    def order(self) -> TrackerOrder:
        """Wait for the order."""
        return msgspec.convert(self._messages.read(None), TrackerOrder)

    def go(self) -> Path | None:
        """Wait for the run directory; None if there will be no run."""
        message = self._messages.read(None)
        return Path(message["go"]) if message and "go" in message else None

    def end(self, within_s: float) -> float | None:
        """Wait so long for the end; return the seconds left for it, or None if it has not come.

        A training that was killed has said nothing; there is time enough then.
        """
        message = self._messages.read(within_s)
        if message is None:
            return _ORPHANS_S if self._messages.closed else None
        return float(message["end"])


class Reports:
    """What a tracker's process says: messages to the training's, all else to a log of its own.

    Trackers print a lot, to descriptors too, and children of theirs do. None of it reaches the
    user's screen, and no secret reaches the log.
    """

    def __init__(self) -> None:
        self._messages = os.dup(1)
        reading, writing = os.pipe()
        for descriptor in (1, 2):
            os.dup2(writing, descriptor)
        os.close(writing)
        self._secrets: tuple[str, ...] = ()
        self._log: Path | None = None
        self._early = ""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, args=(reading,), daemon=True)
        self._thread.start()

    def hide(self, secrets: tuple[str, ...]) -> None:
        """Show these nowhere either."""
        # Longest first: one may be a part of another.
        self._secrets = tuple(sorted({*self._secrets, *secrets} - {""}, key=len, reverse=True))

    def log_to(self, path: Path) -> None:
        """Keep what is printed in a file; it is made once there is something."""
        with self._lock:
            self._log = path
            self._write("")

    def tell(self, **message: Any) -> None:
        """Say something to whoever gave the order, if it is still there."""
        # The values, not the text: in JSON a secret may be written otherwise, and keys are ours.
        hidden = {k: self.scrub(v) if isinstance(v, str) else v for k, v in message.items()}
        with contextlib.suppress(OSError):
            os.write(self._messages, json.dumps(hidden).encode() + b"\n")

    def close(self) -> None:
        """Write down what was printed last."""
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        self._thread.join(0.5)  # a child that the tracker left behind may keep it open

    def _keep(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                with self._lock:
                    self._write(line)

    def _write(self, line: str) -> None:
        self._early += line
        if self._log is None or not self._early:
            return
        with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
            file.write(self.scrub(self._early))
        self._early = ""

    def scrub(self, text: str) -> str:
        """Return a text without secrets, and without names and passwords in addresses."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return without_credentials(text)
