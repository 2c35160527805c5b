"""The processes of trackers, from the side of the training or of `samestep track`.

Each is a fresh interpreter, so a tracker that raises, hangs or is killed does not harm the
training. It has its order as an argument and follows the run directory. Its input says what no file
can: where the run is, and how long the end may take. What it reports is read without waiting.
"""

import contextlib
import json
import os
import secrets
import selectors
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

import samestep
from samestep.base import tracker_choice
from samestep.base.errors import UserError
from samestep.base.nearby import nearby
from samestep.base.run.directory import lock_run
from samestep.base.run.files import write_text
from samestep.base.run.records import Record
from samestep.base.settings import Settings
from samestep.base.startup import PARENT
from samestep.show.tracking.record_stream import RecordStream

HYPERPARAMETERS = "hyperparameters"
"""In settings.toml of a script without samestep's settings: the table of its hyperparameters."""
FOLDER = "tracking"
"""In a run directory: what was sent, a log and a folder of files, for each tracker."""

END_S, STOP_S = 30.0, 3.0
"""How long trackers are waited for once the training is done, and once it got the signal to stop.
One that is offline, or has not started yet, has --track-timeout: a busy machine may need it to
import the tracker."""
_ALL_IN_TIMEOUTS = 10.0
"""How long sending a finished run may take, in start timeouts: checkpoints may be large."""
_ASK_EVERY_S = 0.1
_REAP_S = 0.5

# -P: nothing in the user's folder may pose as a package.
_PROGRAM = """\
import runpy, sys
sys.path.append(sys.argv.pop(1))
runpy.run_module("samestep.show.tracking.follower", run_name="__main__")
"""
_COMMAND = (sys.executable, "-P", "-c", _PROGRAM, str(Path(samestep.__file__).parent.parent))


@dataclass(kw_only=True)
class Delivery:
    """What one place has of a run."""

    run: str | None = None  # the tracker's own name of the run
    link: str | None = None
    lines: int = 0
    """Lines of events.jsonl that were sent, or have nothing to send."""
    system_lines: int = 0  # lines of system.jsonl that were sent
    finished: bool = False  # whether the tracker has closed the run
    checkpoints: bool = False  # whether the checkpoints were sent with it
    files: list[str] = field(default_factory=list)
    """Its complete files, for trackers whose files count only once they are closed."""


@dataclass(kw_only=True)
class Deliveries:
    """What one tracker has of a run: its service, and its files in the run directory."""

    id: str = field(default_factory=lambda: secrets.token_hex(16))
    online: Delivery = field(default_factory=Delivery)
    offline: Delivery = field(default_factory=Delivery)


def deliveries_path(run: Path, tracker: str) -> Path:
    """Return the file that says what a tracker has."""
    return run / FOLDER / f"{tracker}.json"


def read_deliveries(run: Path, tracker: str) -> Deliveries:
    """Return the records that a tracker already has of a run: none without a file."""
    path = deliveries_path(run, tracker)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Deliveries)
    except FileNotFoundError:
        return Deliveries()
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}), so it is not known which records {tracker} has. "
            "Look there; delete the file to send the whole run as a new one."
        ) from error


def write_deliveries(run: Path, tracker: str, deliveries: Deliveries) -> None:
    """Write a tracker's deliveries, atomically."""
    text = msgspec.json.format(msgspec.json.encode(deliveries), indent=2)
    write_text(deliveries_path(run, tracker), text.decode() + "\n")


@dataclass(frozen=True, kw_only=True)
class TrackerOrder:
    """What a tracker's process is to do. It holds no secret."""

    tracker: str  # a name, a file or a module
    name: str  # what its files are called
    project: str
    run_name: str | None
    workspace: str | None
    tags: tuple[str, ...]
    offline: bool
    checkpoints: bool
    timeout_s: float
    pid: int | None
    """The running training; None if the run has ended. Only with it may the process go offline."""


def make_order(
    settings: Settings, tracker: str, project: str, access: tracker_choice.Access, *, live: bool
) -> TrackerOrder:
    """Make one tracker's order from the settings."""
    return TrackerOrder(
        tracker=str(Path(tracker).resolve()) if tracker.endswith(".py") else tracker,
        name=tracker_choice.short_name(tracker),
        project=settings.track_project
        or os.environ.get(tracker_choice.PROJECT_VARIABLES.get(tracker, ""))
        or tracker_choice.default_project(project),
        run_name=settings.track_name,
        workspace=settings.track_workspace,
        tags=tuple(tracker_choice.split(settings.track_tags)),
        offline=settings.track_offline or access.offline,
        checkpoints=settings.track_checkpoints,
        timeout_s=settings.track_timeout,
        pid=os.getpid() if live else None,
    )


def wait_for(descriptors: Sequence[int], within_s: float | None) -> bool:
    """Wait until a pipe can be read or was closed; return False after the time limit."""
    with selectors.DefaultSelector() as selector:  # select() itself knows no descriptor above 1023
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(within_s))


class MessageReader:
    """Messages from a pipe: one JSON value per line."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._buffer = b""
        self.closed = False
        """Whether the other side has closed the pipe."""

    def read(self, within_s: float | None) -> Any:
        """Return the next message; None after the time limit, or if the pipe was closed."""
        while b"\n" not in self._buffer and not self.closed:
            if not wait_for([self.descriptor], within_s):
                return None
            more = os.read(self.descriptor, 65536)
            self._buffer += more
            self.closed = not more
        if b"\n" not in self._buffer:
            return None  # the end, with half a message at the most
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def end_descendants(pid: int) -> None:
    """Kill all descendants of a process: trackers start helpers in other sessions."""
    import psutil  # noqa: PLC0415 - only when something has to be ended

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()


class TrackerProcess:
    """One tracker's process."""

    def __init__(self, order: TrackerOrder, source: str, *, has_server: bool = True) -> None:
        self.name, self.source, self.offline = order.name, source, order.offline
        self.has_server = has_server
        """Whether its offline files can be sent to a server later."""
        self.link: str | None = None
        self.failed: str | None = None
        self.started = self.done = False
        self._process = subprocess.Popen(
            [*_COMMAND, json.dumps(asdict(order))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
            # It outlives a rank that is killed, to send what there is.
            env={name: value for name, value in os.environ.items() if name != PARENT},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self.messages = MessageReader(self._stdout.fileno())

    def send(self, message: str | float) -> None:
        """Tell the process the run directory, or how long its end may take, if it still runs."""
        with contextlib.suppress(OSError, ValueError):
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()

    def heard(self) -> list[dict[str, Any]]:
        """Return the new messages of the process, without waiting."""
        news = []
        while (message := self.messages.read(0.0)) is not None:
            if "failed" in message and self.failed:
                continue  # the process and its time limit may both say so: one warning
            news.append(message)
            self.link = message.get("link", self.link)
            self.offline = message.get("offline", self.offline)
            self.failed = message.get("failed", self.failed)
            self.done = message.get("done", self.done)
            self.started = self.started or "link" in message
        if self.messages.closed and not (self.done or self.failed):
            self._await_exit()
            code = self._process.returncode
            self.failed = f"its process ended with exit code {code}"
            if code is None:
                self.failed = "its process does not respond"
            elif code < 0:
                self.failed = f"its process was killed by signal {-code}"
            news.append({"failed": self.failed})
        return news

    def close(self, *, at_once: bool) -> None:
        """Close the pipes; with `at_once`, kill the process and its descendants."""
        if at_once and self._process.poll() is None:
            end_descendants(self._process.pid)
            self._process.kill()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        if at_once or self.messages.closed:
            self._await_exit()

    def _await_exit(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_S)


class TrackerProcesses:
    """The trackers of one training. Rank 0 has them."""

    def __init__(
        self,
        settings: Settings,
        recipe: str,
        show_message: Callable[[Record], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._settings, self._recipe = settings, recipe
        self._show_message, self._stopped = show_message, stopped
        self._trackers: list[TrackerProcess] = []
        self._run: str | None = None
        self._here = Path.cwd()  # a recipe may change it before the run is named

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def start(self) -> Self:
        """Start the processes, which import their trackers while the training starts."""
        for tracker in tracker_choice.chosen(self._settings.track):
            access, name = tracker_choice.find_access(tracker), tracker_choice.short_name(tracker)
            if access.why and not self._settings.track_offline:
                self._say(name, "note", f"{access.why}, so {name} is offline.")
            order = make_order(self._settings, tracker, self._recipe, access, live=True)
            try:
                self._trackers.append(TrackerProcess(order, tracker, has_server=access.has_server))
            except OSError as error:
                self._say(name, "warning", f"{name} could not be started: {error}")
        return self

    def take(self, record: Record) -> None:
        """Send the trackers the run's path once it begins; pass on their new messages.

        The records themselves they read from the run directory.
        """
        begins = record["event"] in ("start", "going_on")
        if begins:
            self._run = record["run_dir"]
        for tracker in self._trackers:
            if begins:
                tracker.send(str((self._here / record["run_dir"]).resolve()))
            self._pass_on(tracker)

    def close(self, *, failed: bool) -> None:
        """Wait a bounded time until all is sent, but not after a failure."""
        if not failed:
            self._wait()
        # After a failure the message to the user comes first: they close by themselves.
        by_themselves = failed and self._run is not None
        for tracker in self._trackers:
            if by_themselves:
                tracker.send(END_S)
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
            tracker.send(patience_s[tracker.name])
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
                tracker.failed = f"it had not accepted all records {waited}"
                self._warn(tracker)

    def _patience_s(self, tracker: TrackerProcess) -> float:
        """Return the seconds to wait: longer if a tracker still starts, or only writes files."""
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
        """Say why a tracker failed, how many records it has if that is known, and what to do."""
        lacks = ""
        if self._run is not None:
            run = self._here / self._run
            with contextlib.suppress(OSError, UserError), (run / "events.jsonl").open("rb") as file:
                both = read_deliveries(run, tracker.name)
                has = (both.offline if tracker.offline else both.online).lines
                lacks = f"It has {has:,} of {sum(1 for _ in file):,} records. "
        remedy = f"events.jsonl is complete; send it with: {self._command([tracker])}"
        text = f"{tracker.name} failed: {tracker.failed}. {lacks}{remedy}"
        self._say(tracker.name, "warning", text)

    def _command(self, trackers: list[TrackerProcess]) -> str:
        return f"samestep track {self._run or 'RUN'} --to {','.join(t.source for t in trackers)}"

    def _say(self, tracker: str, kind: str, text: str) -> None:
        self._show_message({"event": "tracker", "tracker": tracker, "kind": kind, "text": text})


def send_run(
    run: Path, overrides: dict[str, object], say: Callable[[str], None]
) -> list[TrackerProcess]:
    """Send a run to trackers, one after the other; return their processes, which have ended.

    The overrides, settings by name, win over those of the run; their `track` names the trackers.
    `say` is called with a sentence for each thing that is amiss.
    """
    if not run.is_dir():
        raise UserError(
            f"There is no directory {run}. Name the directory of a run: "
            f"runs/ID.{nearby(run, 'run')}"
        )
    settings, recipe = _settings_of(run, overrides, say)
    trackers = tracker_choice.chosen(settings.track)
    if not trackers:
        raise UserError(f"--to {settings.track}: name comet, mlflow, tensorboard, trackio, wandb.")
    tracker_choice.check_choice(settings)
    tracker_choice.check_installed(trackers)
    with lock_run(run):  # a training that continues is followed by its own trackers
        records = RecordStream(run)
        for _ in records.read():
            pass
        lines = records.events.num_read
        if lines == len(records.events.damaged):
            raise UserError(f"{run / 'events.jsonl'} has no records, so there is nothing to send.")
        _say_what_is_amiss(run, records, say)
        orders = [_order(run, settings, tracker, recipe, lines) for tracker in trackers]
        return [_send(run, order) for order in orders]


def _settings_of(
    run: Path, overrides: dict[str, object], say: Callable[[str], None]
) -> tuple[Settings, str]:
    """Return the tracker settings of a run, and its recipe's name."""
    table: dict[str, Any] = {}
    try:
        table = tomllib.loads((run / "settings.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        say(f"{run / 'settings.toml'} cannot be read ({error}): the settings are not sent.")
    own = {key: value for key, value in table.items() if key.startswith("track")}
    try:
        settings = msgspec.convert({**own, **overrides}, Settings)
    except msgspec.ValidationError as error:
        say(f"{run / 'settings.toml'}: {error}: its tracker settings are ignored.")
        settings = msgspec.convert(overrides, Settings)
    return settings, Path(str(table.get("recipe") or settings.track_name or "samestep")).stem


def _say_what_is_amiss(run: Path, records: RecordStream, say: Callable[[str], None]) -> None:
    events = run / "events.jsonl"
    if damaged := sorted(records.events.damaged):
        which, are = ("lines", "are") if len(damaged) > 1 else ("line", "is")
        say(f"{events}: {which} {str(damaged)[1:-1]} cannot be read and {are} left out.")
    if records.events.torn:
        say(f"{events}: its last line is incomplete and is left out.")
    for name, content in (("result.json", "the result"), ("environment.json", "the machine")):
        path = run / name
        try:
            msgspec.json.decode(path.read_bytes(), type=dict)
        except (OSError, msgspec.DecodeError) as error:
            problem = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
            say(f"{path} {problem}: {content} is not sent.")


def _order(run: Path, settings: Settings, tracker: str, recipe: str, lines: int) -> TrackerOrder:
    """Make one tracker's order; refuse one that has the run or cannot be reached."""
    access = tracker_choice.find_access(tracker)
    if access.why and not settings.track_offline:
        raise UserError(f"{access.why}, so {run} cannot be sent; --offline writes files instead.")
    order = make_order(settings, tracker, recipe, access, live=False)
    both = read_deliveries(run, order.name)
    delivery = both.offline if order.offline else both.online
    if delivery.finished and delivery.lines >= lines:
        where = f" at {delivery.link}" if delivery.link else ""
        hint = ""
        if tracker == "mlflow" and order.offline:
            hint = " Set MLFLOW_TRACKING_URI to send it to a server."
        if settings.track_checkpoints and not delivery.checkpoints:
            hint += " Checkpoints are sent with the run; they cannot be added later."
        has = f"{order.name} has all of {run} already{where}"
        raise UserError(f"{has}; it is not sent again.{hint}")
    return order


def _send(run: Path, order: TrackerOrder) -> TrackerProcess:
    tracker = TrackerProcess(order, order.tracker)
    try:
        tracker.send(str(run.resolve()))
        tracker.send(_ALL_IN_TIMEOUTS * order.timeout_s)
        while not tracker.messages.closed:
            wait_for([tracker.messages.descriptor], None)  # its own limits bound it
            tracker.heard()
    finally:
        tracker.close(at_once=True)
    return tracker
