"""Send a run that has ended to trackers: what they do not have yet, and no second time."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from samestep.errors import UserError
from samestep.nearby import nearby
from samestep.run.directory import lock_run
from samestep.settings import Settings
from samestep.tracking.access import find_access
from samestep.tracking.choice import check_choice, check_installed, chosen
from samestep.tracking.deliveries import read_deliveries
from samestep.tracking.messages import TrackerOrder, wait_for
from samestep.tracking.record_stream import RecordStream
from samestep.tracking.tracker_processes import TrackerProcess, make_order

# Of everything, in start timeouts: checkpoints may be large.
_ALL_IN_TIMEOUTS = 10.0


def send_run(
    run: Path, overrides: dict[str, object], say: Callable[[str], None]
) -> list[TrackerProcess]:
    """Send a run to trackers, one after the other; return their processes, which have ended.

    The overrides, settings by name, win over those of the run; their `track` names the trackers.
    `say` is called with a sentence for each thing that is amiss.

    Raises:
        UserError: there is no run, it is going on, a tracker has it already, or cannot be used.
    """
    if not run.is_dir():
        raise UserError(
            f"There is no directory {run}. Give the directory of a run: runs/ID."
            f"{nearby(run, 'run')}"
        )
    settings, recipe = _settings_of(run, overrides, say)
    trackers = chosen(settings.track)
    if not trackers:
        raise UserError(
            f"--to {settings.track} names no tracker: comet, mlflow, tensorboard, wandb."
        )
    check_choice(settings)
    check_installed(trackers)
    with lock_run(run):  # a training that goes on is followed by its own trackers
        entries = RecordStream(run)
        for _ in entries.read():
            pass
        if entries.events.num_read == len(entries.events.damaged):
            raise UserError(f"{run / 'events.jsonl'} has no records, so there is nothing to send.")
        _say_what_is_amiss(run, entries, say)
        lines = entries.events.num_read
        orders = [_order(run, settings, tracker, recipe, lines) for tracker in trackers]
        return [_send(run, order) for order in orders]


def _settings_of(
    run: Path, overrides: dict[str, object], say: Callable[[str], None]
) -> tuple[Settings, str]:
    """Return the settings of trackers of a run, and its recipe's name."""
    table: dict[str, Any] = {}
    try:
        table = tomllib.loads((run / "settings.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        say(f"{run / 'settings.toml'} cannot be read ({error}): the settings are not sent.")
    own = {key: value for key, value in table.items() if key.startswith("track")}
    try:
        settings = msgspec.convert({**own, **overrides}, Settings)
    except msgspec.ValidationError as error:
        say(f"{run / 'settings.toml'}: {error}: what it says of trackers does not count.")
        settings = msgspec.convert(overrides, Settings)
    return settings, Path(str(table.get("recipe") or settings.track_name or "samestep")).stem


def _say_what_is_amiss(run: Path, entries: RecordStream, say: Callable[[str], None]) -> None:
    events = run / "events.jsonl"
    if damaged := sorted(entries.events.damaged):
        which, are = ("lines", "are") if len(damaged) > 1 else ("line", "is")
        lines = ", ".join(map(str, damaged))
        say(f"{events}: {which} {lines} cannot be read and {are} left out.")
    if entries.events.torn:
        say(f"{events}: its last line is half-written and is left out.")
    for name, what in (("result.json", "the result"), ("environment.json", "the machine")):
        path = run / name
        try:
            msgspec.json.decode(path.read_bytes(), type=dict)
        except (OSError, msgspec.DecodeError) as error:
            how = "is missing" if isinstance(error, FileNotFoundError) else "cannot be read"
            say(f"{path} {how}: {what} is not sent.")


def _order(run: Path, settings: Settings, tracker: str, recipe: str, lines: int) -> TrackerOrder:
    """Return the order for one tracker, unless it has the run already or cannot be reached."""
    access = find_access(tracker)
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
            hint += " Checkpoints go with a run or not at all: they cannot be added."
        has = f"{order.name} has all of {run} already{where}"
        raise UserError(f"{has}; it is not sent again.{hint}")
    return order


def _send(run: Path, order: TrackerOrder) -> TrackerProcess:
    tracker = TrackerProcess(order, order.tracker)
    try:
        tracker.tell({"go": str(run.resolve())})
        tracker.tell({"end": _ALL_IN_TIMEOUTS * order.timeout_s})
        while not tracker.messages.closed:
            wait_for([tracker.messages.descriptor], None)  # its own limits bounds it
            tracker.heard()
    finally:
        tracker.close(at_once=True)
    return tracker
