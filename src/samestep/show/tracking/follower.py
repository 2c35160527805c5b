"""A tracker's process: follow a run directory and hand over each new record once.

`tracking.processes` starts it and listens to it. It samples rank 0's machine if a tracker does not.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import msgspec
import psutil

from samestep.base import tracker_choice
from samestep.base.errors import UserError
from samestep.base.machine import nvidia_smi
from samestep.base.run.files import Held, hold, read_object
from samestep.base.run.records import SYSTEM
from samestep.base.run.summary import first_start
from samestep.show.tracking import Server, Started, TrackedResult, TrackedRun
from samestep.show.tracking.processes import (
    FOLDER,
    HYPERPARAMETERS,
    MessageReader,
    TrackerOrder,
    end_descendants,
    read_deliveries,
    write_deliveries,
)
from samestep.show.tracking.record_stream import RecordStream, scalars

_EVERY_S = 15.0
_FIRST_S = 1.0
_GPU = {
    "utilization_percent": "utilization.gpu",
    "memory_used_mib": "memory.used",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}


class MachineSampler:
    """Append a sample to system.jsonl every few seconds, in one of the trackers' processes."""

    def __init__(self, pid: int) -> None:
        self._held: BinaryIO | None = None
        self._due = time.monotonic() + _FIRST_S
        self._taken = False
        psutil.cpu_percent()  # counts from here
        self._training: psutil.Process | None = None
        with contextlib.suppress(psutil.Error):
            self._training = psutil.Process(pid)
            self._training.cpu_percent()

    def sample(self, run: Path, step: int, *, last: bool = False) -> None:
        """Take a sample if one is due, or, at the end, if none was."""
        if self._taken if last else time.monotonic() < self._due:
            return
        if self._held is None:
            with contextlib.suppress(Held, OSError):
                self._held = hold((run / SYSTEM).with_suffix(".lock"))
        if self._held is None:
            return
        self._due = time.monotonic() + _EVERY_S
        self._taken = True
        wanted, measured = gpus_of(run), self._measure()
        if wanted is None or wanted:
            rows = nvidia_smi("gpu", "uuid", *_GPU.values())
            measured |= numbers_of_gpus(rows, wanted)
        line = json.dumps({"event": "system", "time": time.time(), "step": step, **measured})
        with contextlib.suppress(OSError), (run / SYSTEM).open("ab") as file:
            file.write(line.encode() + b"\n")

    def _measure(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        measured: dict[str, Any] = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_percent": memory.percent,
            "memory_used_gib": (memory.total - memory.available) / 2**30,
        }
        with contextlib.suppress(psutil.Error):
            if self._training is not None:
                measured["process_cpu_percent"] = self._training.cpu_percent()
                measured["process_memory_gib"] = self._training.memory_info().rss / 2**30
        return measured


def gpus_of(run: Path) -> Sequence[str] | None:
    """Return the UUIDs of the GPUs that a run computes on; None where it does not say.

    samestep's own runs say it; of a Trainer with nothing but samestep's logger it is not known.
    """
    with contextlib.suppress(OSError, ValueError):
        gpus: Sequence[str] | None = json.loads((run / "environment.json").read_text()).get("gpus")
        return gpus
    return ()  # it is not written yet


def numbers_of_gpus(
    rows: Sequence[Sequence[str]], wanted: Sequence[str] | None
) -> dict[str, dict[str, float]]:
    """Return the numbers of some GPUs from the rows of nvidia-smi, by their number on the machine.

    A row is `GPU-8d1f…, 37, 5120, 210.5, 61`, with `[N/A]` for some. UUIDs that are wanted have no
    `GPU-`, as PyTorch has them; None takes all.
    """
    gpus: dict[str, dict[str, float]] = {}
    for number, (uuid, *texts) in enumerate(rows):
        if wanted is None or uuid.removeprefix("GPU-") in wanted:
            values = gpus[f"gpu{number}"] = {}
            for name, text in zip(_GPU, texts, strict=True):
                with contextlib.suppress(ValueError):
                    values[name] = float(text)
    return gpus


_ORPHANS_S = 20.0


class Reports:
    """What a tracker's process says: messages to the training's, all else to a log of its own.

    Trackers print a lot, to descriptors too, and children of theirs do. None of it reaches the
    user's screen, and no secret reaches the log.
    """

    def __init__(self, secrets: tuple[str, ...] = ()) -> None:
        self._messages = os.dup(1)
        reading, writing = os.pipe()
        for descriptor in (1, 2):
            os.dup2(writing, descriptor)
        os.close(writing)
        self._secrets: tuple[str, ...] = ()
        self.hide(secrets)
        self._log: Path | None = None
        self._early = ""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, args=(reading,), daemon=True)
        self._thread.start()

    def hide(self, secrets: tuple[str, ...]) -> None:
        """Add secrets that must not be shown."""
        # Longest first: one may be a part of another.
        self._secrets = tuple(sorted({*self._secrets, *secrets} - {""}, key=len, reverse=True))

    def log_to(self, path: Path) -> None:
        """Keep what is printed in a file; it is made once there is something."""
        with self._lock:
            self._log = path
            self._write("")

    def send(self, **message: Any) -> None:
        """Send a message to the training, if it still runs."""
        # The values, not the text: in JSON a secret may be written otherwise, and keys are ours.
        hidden = {k: self.scrub(v) if isinstance(v, str) else v for k, v in message.items()}
        with contextlib.suppress(OSError):
            os.write(self._messages, json.dumps(hidden).encode() + b"\n")

    def close(self) -> None:
        """Log what was printed last."""
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

    @contextlib.contextmanager
    def within(self, seconds: float, task: str) -> Iterator[None]:
        """End the process if the block takes longer."""
        timer = self.all_within(seconds, task)
        try:
            yield
        finally:
            timer.cancel()

    def all_within(self, seconds: float, task: str) -> threading.Timer:
        """End the process after this time, unless the timer is cancelled."""

        def expire() -> None:
            self.send(failed=f"{task} took more than {seconds:.3g} s")
            end_descendants(os.getpid())
            os._exit(1)  # the call that hangs cannot be ended otherwise

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        timer.start()
        return timer

    def scrub(self, text: str) -> str:
        """Return a text without secrets, and without names and passwords in addresses."""
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return tracker_choice.without_credentials(text)


# How often a run is looked at until it ends; its records wait in their file meanwhile.
_POLL_EVERY_S = 0.5
# Of environment.json; the variables and the command stay in the run directory.
_FACTS = (
    *("host", "platform", "processor", "cores", "cores_usable", "versions", "world_size"),
    *("num_nodes", "launcher", "device", "backend", "threads"),
)
_SIZES = (
    *("parameters", "num_samples", "global_batch_size", "steps_per_epoch", "total_steps"),
    *("monitor", "lower_is_better"),
)


def load_tracker(source: str) -> ModuleType:
    """Import a tracker: one of samestep's, a file or a module."""
    if source in tracker_choice.TRACKERS:
        tracker: ModuleType = tracker_choice.TRACKERS.load(source)
        return tracker
    if not source.endswith(".py"):
        sys.path.append(str(Path.cwd()))
        return importlib.import_module(source)
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.append(str(path.parent))  # the file may import its neighbours
    spec.loader.exec_module(module)
    return module


def follow_run(order: TrackerOrder, reports: Reports) -> None:
    """Send a run to its tracker, until the end of a run that still trains.

    Standard input has the run directory, and in the end how many seconds are left.
    """
    machine = None if order.pid is None else MachineSampler(order.pid)
    messages = MessageReader(0)
    with reports.within(order.timeout_s, "importing it"):
        module = load_tracker(order.tracker)
    why = None
    if order.tracker in tracker_choice.PACKAGES and hasattr(module, "find_server"):
        with reports.within(order.timeout_s, "connecting to its server"):
            why = why_offline(module, order, reports)
    named = messages.read(None)
    if not isinstance(named, str):
        return  # there will be no run
    path = Path(named)
    (path / FOLDER).mkdir(exist_ok=True)
    reports.log_to(path / FOLDER / f"{order.name}.log")
    if why is not None and order.pid is None:
        raise UserError(f"{why}, and nothing was sent")
    with _lock(path / FOLDER / f"{order.name}.lock", order.timeout_s):
        order = replace(order, offline=order.offline or why is not None)
        run = _FollowedRun(order, path, module, reports)
        run.start()
        reports.send(link=run.delivery.link, offline=order.offline, why=why)
        run.follow(messages, machine)
        reports.send(done=True, offline=order.offline)


def why_offline(module: ModuleType, order: TrackerOrder, reports: Reports) -> str | None:
    """Return the client's reason why it cannot go online; None if it can."""
    try:
        server: Server = module.find_server()
    except Exception as error:  # whatever it makes of its configuration
        return None if order.offline else " ".join(str(error).split()).rstrip(".")
    reports.hide(server.secrets)
    if order.offline or server.address is None:
        return None
    return tracker_choice.why_unreachable(server.address)


def _lock(path: Path, patience_s: float) -> BinaryIO:
    """Lock a tracker's deliveries; the process of a killed attempt may still hold them."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return hold(path)
        except Held as owner:
            if time.monotonic() > deadline:
                raise UserError(f"{owner} is still sending this run") from None
        time.sleep(0.2)  # a lock that another process holds gives no event


class _FollowedRun:
    """A run, and what the service or the offline files have of it."""

    def __init__(
        self, order: TrackerOrder, path: Path, module: ModuleType, reports: Reports
    ) -> None:
        self._order, self._path, self._module, self._reports = order, path, module, reports
        self._folder = path / FOLDER / order.name
        self._folder.mkdir(exist_ok=True)
        self._deliveries = read_deliveries(path, order.name)
        self.delivery = self._deliveries.offline if order.offline else self._deliveries.online
        self._counts_at_end = order.offline and getattr(module, "COUNTS_AT_END", False)
        self._records = RecordStream(path, with_checkpoints=order.checkpoints)
        self._client: Any = None

    def start(self) -> None:
        """Open the run at the tracker, and find out what it has."""
        delivery = self.delivery
        if self._counts_at_end:
            # The incomplete files of a killed attempt are written again.
            for file in sorted(self._folder.rglob("*"), reverse=True):
                if str(file.relative_to(self._folder)) in delivery.files:
                    continue
                if file.is_symlink() or not file.is_dir():
                    file.unlink(missing_ok=True)
                elif not any(file.iterdir()):
                    file.rmdir()
        self._write()  # its id is settled before anybody hears of it
        with self._reports.within(self._order.timeout_s, "starting"):
            started: Started = self._module.start(self._tracked_run())
        if not isinstance(started, Started):
            raise UserError(f"its start() returned {type(started).__name__}, not Started(client=…)")
        self._client = started.client
        delivery.run = started.run or self._deliveries.id
        link = started.link or None
        if self._order.offline and not link:
            near = self._folder.is_relative_to(Path.cwd())
            link = os.path.relpath(self._folder) if near else str(self._folder)
        delivery.link = None if link is None else self._reports.scrub(link)
        delivery.finished = False
        if started.lines is not None:
            delivery.lines = started.lines
        self._write()

    def follow(self, messages: MessageReader, machine: MachineSampler | None) -> None:
        """Hand over all records until the end, then close the run."""
        left_s = messages.read(0.0)
        while left_s is None and not messages.closed:
            self._hand_over()
            if machine is not None:
                machine.sample(self._path, self._records.step)
            left_s = messages.read(_POLL_EVERY_S)
        left_s = _ORPHANS_S if left_s is None else left_s  # a killed training has said nothing
        self._reports.all_within(left_s, "sending the remaining records")
        self._hand_over()
        if machine is not None:
            machine.sample(self._path, self._records.step, last=True)
            self._hand_over()
        with self._reports.within(max(left_s, self._order.timeout_s), "closing"):
            self._module.finish(self._client, self._result())
        delivery = self.delivery
        delivery.lines = self._records.events.num_read
        delivery.system_lines = self._records.system.num_read
        delivery.finished = True
        delivery.checkpoints = self._order.checkpoints
        if self._counts_at_end:
            files = self._folder.rglob("*")
            delivery.files = sorted(str(file.relative_to(self._folder)) for file in files)
        self._write()

    def _hand_over(self) -> None:
        """Give the tracker the new records, and note what it has."""
        delivery, records = self.delivery, self._records
        for new in records.read(delivery.lines, delivery.system_lines):
            if new:
                with self._reports.within(self._order.timeout_s, "taking records"):
                    self._module.record(self._client, new)
            before = delivery.lines, delivery.system_lines
            has = max(before[0], records.events.num_read), max(before[1], records.system.num_read)
            if not self._counts_at_end and (new or has != before):
                delivery.lines, delivery.system_lines = has
                self._write()

    def _write(self) -> None:
        write_deliveries(self._path, self._order.name, self._deliveries)

    def _tracked_run(self) -> TrackedRun:
        order, path = self._order, self._path
        try:
            settings = tomllib.loads((path / "settings.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            settings = {}  # said by the command that gave the order
        own = settings.get(HYPERPARAMETERS)  # of a script that is not samestep's
        environment, start = read_object(path / "environment.json"), first_start(path)
        facts = {key: environment[key] for key in _FACTS if key in environment}
        facts |= {key: start[key] for key in _SIZES if start.get(key) is not None}
        return TrackedRun(
            path=path,
            folder=self._folder,
            id=self._deliveries.id,
            known=self.delivery.run,
            offline=order.offline,
            project=order.project,
            name=order.run_name or path.resolve().name,
            workspace=order.workspace,
            tags=order.tags,
            settings=scalars(own if isinstance(own, dict) else settings),
            facts=scalars(facts),
            started_at=start.get("time", time.time()),
            timeout_s=order.timeout_s,
            pid=order.pid,
        )

    def _result(self) -> TrackedResult:
        """Return status and values: result.json counts only if the latest attempt wrote it."""
        if self._records.last.get("event") != "stop":
            return TrackedResult(status="killed", values={})
        table = read_object(self._path / "result.json")
        statuses = ("completed", "stopped", "failed")
        status: Any = table.get("status") if table.get("status") in statuses else "killed"
        for name in ("recipe", "versions", "device", "backend", "world_size", "global_batch_size"):
            table.pop(name, None)
        if isinstance(table.get("test"), dict):
            table["test"].pop("confusion", None)
        return TrackedResult(status=status, values=scalars(table))


# None of it is the user's choice to make: noise, and reports to the trackers' makers, who cannot
# be reached from a compute node.
_QUIET = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "COMET_DISABLE_ANNOUNCEMENT": "1",
}


def main() -> int:
    """Follow the run of the order; return 0 if all was sent."""
    # The training says when to end.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGPIPE"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        os.nice(10)
        # Linux may weigh whole sessions against each other, and this is one of its own.
        Path("/proc/self/autogroup").write_text("10")
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    reports = Reports(tracker_choice.secrets_of(os.environ))
    code = 1
    try:
        order = msgspec.convert(json.loads(sys.argv.pop()), TrackerOrder)  # not for the tracker
        follow_run(order, reports)
        code = 0
    except UserError as error:
        reports.send(failed=str(error))
    except BaseException as error:  # whatever a tracker does, here it ends
        traceback.print_exc()
        first_line = str(error).strip().splitlines()[:1]
        reports.send(failed=": ".join([type(error).__name__, *first_line]))
    reports.close()
    return code


if __name__ == "__main__":
    exit_code = main()
    # Trackers leave threads and hooks that would hold up an ordinary exit, or send once more.
    end_descendants(os.getpid())
    sys.stdout.flush()
    os._exit(exit_code)
