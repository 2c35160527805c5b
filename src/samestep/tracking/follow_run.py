"""The work of a tracker's process: follow a run directory, and hand over what is new, once."""

import importlib
import importlib.util
import os
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from samestep.errors import UserError
from samestep.run.files import Held, hold, read_object
from samestep.run.records import first_start
from samestep.tracking.access import why_unreachable
from samestep.tracking.choice import PACKAGES
from samestep.tracking.contract import (
    Scalar,
    Server,
    Started,
    TrackedRecord,
    TrackedResult,
    TrackedRun,
)
from samestep.tracking.deliveries import (
    FOLDER,
    Deliveries,
    Delivery,
    read_deliveries,
    write_deliveries,
)
from samestep.tracking.machine_samples import MachineSampler
from samestep.tracking.messages import Instructions, Reports, TrackerOrder
from samestep.tracking.record_stream import RecordStream, scalars
from samestep.tracking.time_limits import TimeLimits

HYPERPARAMETERS = "hyperparameters"
"""In settings.toml: the table of those of a script of the user's own, in place of our settings."""

# How often a run that goes on is looked at; its records wait in their file meanwhile.
_LOOK_EVERY_S = 0.5
# Of environment.json; the variables and the command stay in the run directory.
_FACTS = (
    *("host", "platform", "processor", "cores", "cores_usable", "versions", "world_size"),
    *("num_nodes", "launcher", "device", "backend", "threads"),
)
_SIZES = ("parameters", "num_samples", "global_batch_size", "steps_per_epoch", "total_steps")


@dataclass(kw_only=True)
class _Open:
    """A run that is open at its tracker."""

    order: TrackerOrder
    path: Path
    module: ModuleType
    client: Any
    entries: RecordStream
    ledger: Deliveries
    account: Delivery
    counts_at_end: bool
    """Whether what was handed over counts only once the tracker has closed its files."""


def load_tracker(source: str) -> ModuleType:
    """Import a tracker: one of samestep's, a file or a module.

    Raises:
        Exception: whatever importing it raises.
    """
    if source in PACKAGES:
        return importlib.import_module(f"samestep.tracking.{source}")
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


def follow_run(
    order: TrackerOrder, instructions: Instructions, reports: Reports, limits: TimeLimits
) -> None:
    """Send a run to its tracker, while it goes on if it does, until its end.

    Raises:
        Exception: whatever the tracker raises; the records stay where they are.
    """
    machine = MachineSampler(order.pid) if order.live else None
    with limits.within(order.timeout_s, "importing it"):
        module = load_tracker(order.tracker)
    why = None
    if order.tracker in PACKAGES and hasattr(module, "find_server"):
        with limits.within(order.timeout_s, "looking for its server"):
            why = why_offline(module, order, reports)
    path = instructions.go()
    if path is None:
        return
    (path / FOLDER).mkdir(exist_ok=True)
    reports.log_to(path / FOLDER / f"{order.name}.log")
    if why is not None and not order.live:
        raise UserError(f"{why}, and nothing was sent")
    lock = _wait_for_lock(path / FOLDER / f"{order.name}.lock", order.timeout_s)
    try:
        open_run = _start(
            order,
            path,
            module,
            offline=order.offline or why is not None,
            limits=limits,
            scrub=reports.scrub,
        )
        offline = open_run.account is open_run.ledger.offline
        reports.tell(link=open_run.account.link, offline=offline, why=why)
        _follow_to_end(open_run, instructions, limits, machine)
        reports.tell(done=True, offline=offline)
    finally:
        lock.close()


def why_offline(module: ModuleType, order: TrackerOrder, reports: Reports) -> str | None:
    """Return why the client cannot go online although it may, in its own words."""
    try:
        server: Server = module.find_server()
    except Exception as error:  # whatever it makes of its configuration
        return None if order.offline else " ".join(str(error).split()).rstrip(".")
    reports.hide(server.secrets)
    if order.offline or server.address is None:
        return None
    return why_unreachable(server.address)


def _wait_for_lock(path: Path, patience_s: float) -> Any:
    """Hold a tracker's ledger; the process of an attempt that was killed may still be closing."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return hold(path)
        except Held as owner:
            if time.monotonic() > deadline:
                raise UserError(f"{owner} is still sending this run") from None
        time.sleep(0.2)  # a lock that another process holds gives no event


def _start(
    order: TrackerOrder,
    path: Path,
    module: ModuleType,
    *,
    offline: bool,
    limits: TimeLimits,
    scrub: Callable[[str], str],
) -> _Open:
    """Open the run at the tracker, and find out what it has."""
    ledger = read_deliveries(path, order.name)
    account = ledger.account(offline=offline)
    counts_at_end = offline and getattr(module, "COUNTS_AT_END", False)
    folder = path / FOLDER / order.name
    folder.mkdir(exist_ok=True)
    if counts_at_end:
        _remove_unfinished(folder, set(account.files))
    write_deliveries(path, order.name, ledger)  # its id is settled before anybody hears of it
    entries = RecordStream(path, with_checkpoints=order.checkpoints)
    with limits.within(order.timeout_s, "starting"):
        started: Started = module.start(_tracked_run(order, path, ledger, account, offline))
    if not isinstance(started, Started):
        raise UserError(f"its start() returned {type(started).__name__}, not Started(client=…)")
    account.run = started.run or ledger.id
    link = started.link or (_shown(folder) if offline else None)
    account.link = None if link is None else scrub(link)
    account.finished = False
    if started.lines is not None:
        account.lines = started.lines
    write_deliveries(path, order.name, ledger)
    return _Open(
        order=order,
        path=path,
        module=module,
        client=started.client,
        entries=entries,
        ledger=ledger,
        account=account,
        counts_at_end=counts_at_end,
    )


def _shown(folder: Path) -> str:
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _remove_unfinished(folder: Path, whole: set[str]) -> None:
    """Remove what an attempt that was killed left of its files: all of it is written again."""
    for file in sorted(folder.rglob("*"), reverse=True):
        if str(file.relative_to(folder)) in whole:
            continue
        if file.is_dir() and not file.is_symlink():
            if not any(file.iterdir()):
                file.rmdir()
        else:
            file.unlink(missing_ok=True)


def _tracked_run(
    order: TrackerOrder, path: Path, ledger: Deliveries, account: Delivery, offline: bool
) -> TrackedRun:
    try:
        settings = tomllib.loads((path / "settings.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        settings = {}  # said by whoever gave the order
    own = settings.get(HYPERPARAMETERS)  # of a script that is not samestep's
    settings = own if isinstance(own, dict) else settings
    environment = read_object(path / "environment.json")
    start = first_start(path)
    facts = {key: environment[key] for key in _FACTS if key in environment}
    facts |= {key: start[key] for key in _SIZES if key in start}
    return TrackedRun(
        path=path,
        folder=path / FOLDER / order.name,
        id=ledger.id,
        known=account.run,
        offline=offline,
        project=order.project,
        name=order.run_name or path.resolve().name,
        workspace=order.workspace,
        tags=order.tags,
        settings=scalars(settings),
        facts=scalars(facts),
        started_at=start.get("time", time.time()),
        timeout_s=order.timeout_s,
        pid=order.pid if order.live else None,
    )


def _follow_to_end(
    run: _Open, instructions: Instructions, limits: TimeLimits, machine: MachineSampler | None
) -> None:
    """Hand over what is there and what comes, then close the run."""
    order = run.order
    left = instructions.end(0.0)
    while left is None:
        _hand_over(run, limits)
        if machine is not None:
            machine.sample(run.path, run.entries.step)
        left = instructions.end(_LOOK_EVERY_S)
    limits.all_within(left, "sending what was left")
    _hand_over(run, limits)
    if machine is not None:
        machine.sample(run.path, run.entries.step, last=True)
        _hand_over(run, limits)
    with limits.within(max(left, order.timeout_s), "closing"):
        run.module.finish(run.client, _result(run))
    account = run.account
    account.lines, account.system_lines = run.entries.lines, run.entries.system_lines
    account.finished, account.checkpoints = True, order.checkpoints
    if run.counts_at_end:
        folder = run.path / FOLDER / order.name
        account.files = sorted(str(f.relative_to(folder)) for f in folder.rglob("*"))
    write_deliveries(run.path, order.name, run.ledger)


def _hand_over(run: _Open, limits: TimeLimits) -> None:
    """Give the tracker what it does not have, and note what it has."""
    account = run.account
    for entries in run.entries.read(account.lines, account.system_lines):
        if entries:
            with limits.within(run.order.timeout_s, "taking records"):
                run.module.record(run.client, entries)
        if not run.counts_at_end:
            _note(run, entries)


def _note(run: _Open, entries: list[TrackedRecord]) -> None:
    before = (run.account.lines, run.account.system_lines)
    run.account.lines = max(run.account.lines, run.entries.lines)
    run.account.system_lines = max(run.account.system_lines, run.entries.system_lines)
    if entries or before != (run.account.lines, run.account.system_lines):
        write_deliveries(run.path, run.order.name, run.ledger)


def _result(run: _Open) -> TrackedResult:
    """Return how the run ended: result.json counts only if this execution has come to write it."""
    if run.entries.last.get("event") != "stop":
        return TrackedResult(status="killed", values={})
    table = read_object(run.path / "result.json")
    known = ("completed", "stopped", "failed")
    status: Any = table.get("status") if table.get("status") in known else "killed"
    return TrackedResult(status=status, values=_final(table))


def _final(table: dict[str, Any]) -> dict[str, Scalar]:
    dropped = ("recipe", "versions", "device", "backend", "world_size", "global_batch_size")
    test = table.get("test")
    if isinstance(test, dict):
        table = {**table, "test": {k: v for k, v in test.items() if k != "confusion"}}
    return scalars({key: value for key, value in table.items() if key not in dropped})
