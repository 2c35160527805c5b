"""The trackers of a training, from its side: started beside it, told of its end, never waited for.

Each is a process of its own, a fresh interpreter, so that a tracker that raises, hangs or is
killed harms nothing here; what it has to say is read without waiting.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import samestep
from samestep.errors import UserError
from samestep.ranks.startup import PARENT
from samestep.run.records import Record
from samestep.settings import Settings
from samestep.tracking.access import Access, find_access
from samestep.tracking.choice import PROJECT_VARIABLES, chosen, default_project, short_name, split
from samestep.tracking.deliveries import read_deliveries
from samestep.tracking.messages import MessageReader, TrackerOrder, wait_for
from samestep.tracking.time_limits import end_descendants

END_S, STOP_S = 30.0, 3.0
"""How long trackers are waited for once the training is done, and once it was told to stop.
One that is offline, or has not started yet, has --track-timeout: a busy machine may need it to
import the tracker."""
_ASK_EVERY_S = 0.1
_REAP_S = 0.5

# -P: nothing in the user's folder may pose as a package.
_PROGRAM = """\
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("samestep.tracking", run_name="__main__")
"""
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM, str(Path(samestep.__file__).parent.parent))


class TrackerProcess:
    """One tracker's process."""

    def __init__(self, order: TrackerOrder, source: str, *, has_server: bool = True) -> None:
        self.name, self.source = order.name, source
        self.link: str | None = None
        self.offline = order.offline
        self.has_server = has_server
        """Whether there is another place than its files, so that these are to be sent."""
        self.failed: str | None = None
        self.started = self.done = False
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
            # It outlives a rank that is killed, to send what there is.
            env={name: value for name, value in os.environ.items() if name != PARENT},
        )
        assert self._process.stdout is not None
        self.messages = MessageReader(self._process.stdout.fileno())
        self.tell(asdict(order))

    def tell(self, message: dict[str, Any]) -> None:
        """Tell the process something, if it is still there."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def heard(self) -> list[dict[str, Any]]:
        """Return what the process has said since, without waiting."""
        news = []
        while (message := self.messages.read(0.0)) is not None:
            if "failed" in message and self.failed:
                continue  # the process and its time limit may both say so: one warning
            news.append(message)
            self.link = message.get("link", self.link)
            self.offline = message.get("offline", self.offline)
            self.started = self.started or "link" in message
            self.failed = message.get("failed", self.failed)
            self.done = message.get("done", self.done)
        if self.messages.closed and not (self.done or self.failed):
            self._await_exit()
            code = self._process.returncode
            self.failed = f"its process ended with exit code {code}"
            if code is None:
                self.failed = "its process has fallen silent"
            elif code < 0:
                self.failed = f"its process was killed by signal {-code}"
            news.append({"failed": self.failed})
        return news

    def close(self, *, at_once: bool) -> None:
        """Let go of the process; with `at_once`, end it and what it has started."""
        if at_once and self._process.poll() is None:
            end_descendants(self._process.pid)
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        if at_once or self.messages.closed:
            self._await_exit()

    def _await_exit(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)


def make_order(
    settings: Settings, tracker: str, project: str, access: Access, *, live: bool
) -> TrackerOrder:
    """Return the order that the settings give one tracker's process."""
    return TrackerOrder(
        tracker=str(Path(tracker).resolve()) if tracker.endswith(".py") else tracker,
        name=short_name(tracker),
        project=settings.track_project
        or os.environ.get(PROJECT_VARIABLES.get(tracker, ""))
        or default_project(project),
        run_name=settings.track_name,
        workspace=settings.track_workspace,
        tags=tuple(split(settings.track_tags)),
        offline=settings.track_offline or access.offline,
        checkpoints=settings.track_checkpoints,
        timeout_s=settings.track_timeout,
        pid=os.getpid() if live else None,
    )


class TrackerProcesses:
    """The trackers of one training, on rank 0; on other ranks there are none."""

    def __init__(
        self,
        settings: Settings,
        recipe: str,
        show: Callable[[Record], None],
        *,
        is_main: bool,
        stopped: Callable[[], bool],
    ) -> None:
        self._settings, self._recipe, self._show, self._stopped = settings, recipe, show, stopped
        self._names = chosen(settings.track) if is_main else []
        self._trackers: list[TrackerProcess] = []
        self._run: str | None = None
        self._here = Path.cwd()  # a recipe may change it before the run is named

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def start(self) -> Self:
        """Start their processes, which import what they need beside the training's own start."""
        for tracker in self._names:
            access = find_access(tracker)
            name = short_name(tracker)
            if access.why and not self._settings.track_offline:
                self._say(name, "note", f"{access.why}, so {name} is offline.")
            order = make_order(self._settings, tracker, self._recipe, access, live=True)
            try:
                self._trackers.append(TrackerProcess(order, tracker, has_server=access.has_server))
            except OSError as error:
                self._say(name, "warning", f"{name} could not be started: {error}")
        return self

    def show(self, record: Record) -> None:
        """Show a record, and what the trackers have said meanwhile."""
        self._show(record)
        if record["event"] == "start":
            self._run = record["run_dir"]
            for tracker in self._trackers:
                tracker.tell({"go": str((self._here / record["run_dir"]).resolve())})
        for tracker in self._trackers:
            self._pass_on(tracker)

    def close(self, *, failed: bool) -> None:
        """Wait a bounded time until all is sent, and say what is not; not after a failure."""
        if not failed:
            self._wait()
        # After a failure the message to the user comes first: they close by themselves.
        by_themselves = failed and self._run is not None
        for tracker in self._trackers:
            if by_themselves:
                tracker.tell({"end": END_S})
            tracker.close(at_once=not by_themselves)
        # How what lies in files is sent; of those that failed it was said.
        local = [t for t in self._trackers if t.done and t.offline and t.has_server]
        if local and not failed:
            names = " and ".join(t.name for t in local)
            self._say("unsent", "later", f"{names}; with a network: {self._command(local)}")

    def _wait(self) -> None:
        was_stopped, began = self._stopped(), time.monotonic()
        patience_s = {t.name: self._patience_s(t) for t in self._trackers}
        for tracker in self._trackers:
            tracker.tell({"end": patience_s[tracker.name]})
        while going := [t for t in self._trackers if not t.messages.closed]:
            waited_s = time.monotonic() - began
            if self._stopped() and not was_stopped:  # a signal while waiting
                was_stopped = True
                patience_s = {t.name: waited_s + STOP_S for t in going}
            left_s = max(patience_s[t.name] for t in going) + 0.5 - waited_s
            if left_s <= 0:
                break
            wait_for([t.messages.descriptor for t in going], min(_ASK_EVERY_S, left_s))
            for tracker in going:
                self._pass_on(tracker)
        for tracker in going:
            if tracker.failed is None:
                waited = f"{patience_s[tracker.name]:.0f} s after the end"
                tracker.failed = f"it had not taken everything {waited}"
                self._warn(tracker)

    def _patience_s(self, tracker: TrackerProcess) -> float:
        """Return how long to wait: one that starts or only writes files is slow, not stuck."""
        if self._stopped():
            return STOP_S
        unhurried = tracker.offline or not tracker.started
        return max(END_S, self._settings.track_timeout) if unhurried else END_S

    def _pass_on(self, tracker: TrackerProcess) -> None:
        for message in tracker.heard():
            if message.get("link"):
                why = f" ({message['why']})" if message.get("why") else ""
                offline = "offline: " if message.get("offline") and tracker.has_server else ""
                self._say(tracker.name, "link", f"{offline}{message['link']}{why}")
            if "failed" in message:
                self._warn(tracker)

    def _warn(self, tracker: TrackerProcess) -> None:
        how = f"The records are whole; send them with: {self._command([tracker])}"
        what = f"{tracker.name} failed: {tracker.failed}. {self._lacks(tracker)}{how}"
        self._say(tracker.name, "warning", what)

    def _lacks(self, tracker: TrackerProcess) -> str:
        """Say how much of the run a tracker has, where that is noted."""
        if self._run is None:
            return ""
        run = self._here / self._run
        with contextlib.suppress(OSError, UserError), (run / "events.jsonl").open("rb") as lines:
            both = read_deliveries(run, tracker.name)
            has = (both.offline if tracker.offline else both.online).lines
            return f"It has {has:,} of {sum(1 for _ in lines):,} records. "
        return ""

    def _command(self, trackers: list[TrackerProcess]) -> str:
        return f"samestep track {self._run or 'RUN'} --to {','.join(t.source for t in trackers)}"

    def _say(self, tracker: str, kind: str, text: str) -> None:
        self._show({"event": "tracker", "tracker": tracker, "kind": kind, "text": text})
