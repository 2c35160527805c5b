"""`samestep.train`: in this process, or on ranks that it starts; and what one rank does."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base.errors import UserError, blame
from samestep.base.flags import NumRanks
from samestep.base.run.records import RecordFile
from samestep.base.run.summary import first_start
from samestep.base.settings import Settings
from samestep.base.startup import forget_signals
from samestep.core.session.request import Request
from samestep.core.session.session import Outcome, Sink
from samestep.core.session.training_run import Shown, engine_named, run_elastic, run_session
from samestep.core.training.stopping import Again, ReceivedSignal, catch_signals, end_process
from samestep.launch.ranks import watched
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.process import MEMBER, STARTED_AT, RankLog
from samestep.launch.ranks.world import World, find_world, join, leave
from samestep.show.progress import Nothing, Screen

if TYPE_CHECKING:
    from samestep.launch.ranks.keeper import Elastic
    from samestep.shell.api.call import Call
    from samestep.shell.api.trained_run import TrainedRun

_busy = threading.Lock()
_POLL_EVERY_S = 0.1
AnyScreen = Nothing | Screen


def train_call(
    call: "Call",
    nproc: NumRanks,
    screen: AnyScreen,
    log: RankLog,
    elastic: "Callable[[int, Settings], Elastic] | None",
) -> "TrainedRun":
    """Train as a call of `samestep.train` asks, here or on new ranks; return the run."""
    from samestep.core.session.fetching import fetched  # noqa: PLC0415 - the shell calls a part
    from samestep.shell.api.call import as_in_fresh_process, request_of  # noqa: PLC0415

    if not _busy.acquire(blocking=False):
        raise UserError(
            "samestep.train() was called while this process trains. Wait until that training has "
            "ended, or train in another process."
        )
    try:
        forget_signals()
        with as_in_fresh_process():
            request = request_of(call)
            if request.resume and request.settings.run_dir is None:
                raise UserError(
                    "resume=True needs a run: pass its directory first, samestep.train(run, "
                    "resume=True); or run_dir, to start there and continue when called again."
                )
            number = _number(nproc, request)
            if elastic is not None:
                request = fetched(request, World())  # its ranks meet only later
            if number > 1:
                keeping = elastic and elastic(number, request.settings)
                run = _on_ranks(number, call, screen, keeping)
            else:
                if elastic is not None:
                    raise UserError("elastic needs several ranks: nproc=N.")
                run = _train_here(request, screen, log)
            return replace(run, recipe=call.recipe)
    finally:
        _busy.release()


def _number(nproc: NumRanks, request: Request) -> int:
    """Return the number of ranks to start; 1 if this process is to train."""
    from samestep.launch.ranks.nproc import ranks_to_start, refuse_inside_launcher  # noqa: PLC0415

    settings = request.settings
    if not (nproc == "auto" or (isinstance(nproc, int) and not isinstance(nproc, bool))):
        raise UserError(f'nproc={nproc!r}: it must be a number of ranks, or "auto".')
    if nproc == "auto" and detect_launch(os.environ).world_size > 1:
        return 1
    if nproc not in ("auto", 1):
        refuse_inside_launcher(f"nproc={nproc}", "Leave nproc out.")
    return ranks_to_start(nproc, settings.device, oversubscribe=settings.oversubscribe)


def _train_here(request: Request, screen: AnyScreen, log: RankLog) -> "TrainedRun":
    """Train in this process, as the one rank or as one of a launcher's."""
    path: Path | None = None

    def begin(run: Path) -> None:
        nonlocal path
        path = run
        log.move_to(run)

    def again() -> None:
        raise UserError(_interrupted_twice(path))

    outcome = train_as_rank(request, screen, begin, again=again)
    watched.end()
    return _stopped(outcome.path, outcome.signum)


def _on_ranks(
    number: int, call: "Call", screen: AnyScreen, elastic: "Elastic | None"
) -> "TrainedRun":
    """Train on new ranks; a thread shows the records of rank 0 meanwhile."""
    from samestep.launch.ranks.start import run_ranks  # noqa: PLC0415 - a rank starts none
    from samestep.shell.api.call import RECORDS, send  # noqa: PLC0415
    from samestep.shell.api.trained_run import TrainedRun  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="samestep-") as folder, screen:
        file = Path(folder, "call")
        path = None
        over = threading.Event()
        records = RecordFile(file.with_name(RECORDS))
        send(call, file)

        def follow() -> None:
            nonlocal path
            last = False
            while not last:
                last = over.wait(_POLL_EVERY_S)
                for record in records.read_all():
                    if record["event"] == "start":
                        path = Path(record["run_dir"])
                    screen.show(record)

        follower = threading.Thread(target=follow, name="samestep-screen", daemon=True)
        follower.start()
        try:
            ended = run_ranks(number, ["train"], str(file), elastic)
        finally:
            over.set()
            follower.join()
    if ended.message:
        raise UserError(ended.message)
    signum = max(0, ended.code - 128)
    if path is None or TrainedRun(path).history[-1]["event"] != "stop":
        if signum not in (0, signal.SIGINT):
            signal.raise_signal(signum)
        if path is None:  # no run had begun
            raise KeyboardInterrupt
        raise UserError(_interrupted_twice(path))
    screen.result(path, json.loads((path / "result.json").read_bytes()))
    return _stopped(path, signum)


def _stopped(path: Path, signum: int) -> "TrainedRun":
    """Return the run; a signal other than Ctrl-C now ends this process, as all is saved."""
    if signum not in (0, signal.SIGINT):
        sys.stdout.flush()
        signal.raise_signal(signum)
    from samestep.shell.api.trained_run import TrainedRun  # noqa: PLC0415 - not for the shell

    return TrainedRun(path)


def _interrupted_twice(path: Path | None) -> str:
    if path is None:
        return "Interrupted twice, before the run started: there is nothing to resume."
    return (
        "Interrupted twice: the training stopped at once, without a final checkpoint. Resume from "
        f"the newest one: samestep.train({str(path)!r}, resume=True)."
    )


def _call_on_record(
    function: Callable[[Mapping[str, Any]], object], record: Mapping[str, Any]
) -> None:
    """Give a record to the recipe's `on_record`; if the run was begun elsewhere, its `start`."""
    event = record["event"]
    if event == "progress":  # only for the screen
        return
    if event == "going_on":
        record = record["plan"] | {"run_dir": record["run_dir"]}
    try:
        function(dict(record))
    except Exception as error:
        blame("The recipe's on_record failed", error, function)


@dataclass
class _Reporter:
    """Shows a run on its rank 0; among elastic ranks another may become that."""

    request: Request
    screen: AnyScreen
    begin: Callable[[Path], None]
    speak: Callable[[], None]
    received: ReceivedSignal
    open_trackers: contextlib.ExitStack
    sinks: tuple[Sink, ...] = ()  # screen, trackers and the mirror, on rank 0

    def shown(self, world: World, going_on: Path | None = None) -> Shown:
        """Return the run's sinks in this world; it is `going_on` if it was begun before."""
        if world.is_main and not self.sinks:
            self._start(going_on)
        started_at = float(os.environ.get(STARTED_AT, time.time()))
        return Shown(self.sinks, self.begin, started_at)

    def _start(self, going_on: Path | None) -> None:
        on_record = self.request.recipe.on_record
        self.sinks = (
            self.screen.show,
            *([partial(_call_on_record, on_record)] if on_record else ()),
        )
        settings, name = self.request.settings, self.request.recipe.name
        show_message = self.screen.show_message

        def stopped() -> bool:
            return bool(self.received.now)

        if settings.track:
            from samestep.show.tracking.processes import TrackerProcesses  # noqa: PLC0415

            trackers = TrackerProcesses(settings, name, show_message, stopped)
            self.sinks += (self.open_trackers.enter_context(trackers).take,)
        if settings.mirror is not None:
            from samestep.base.run.store import address_of  # noqa: PLC0415 - of those that copy
            from samestep.show.mirroring import Mirror  # noqa: PLC0415

            if address_of(settings.mirror) is not None:
                mirror = Mirror(settings, show_message, stopped)
                self.sinks += (self.open_trackers.enter_context(mirror).take,)
        if going_on is not None:
            self.speak()
            if plan := first_start(going_on):  # else the rank 0 before has died before it wrote it
                going = {"event": "going_on", "run_dir": str(going_on), "plan": plan}
                for sink in self.sinks:
                    sink(going)


def train_as_rank(
    request: Request,
    screen: AnyScreen,
    begin: Callable[[Path], None],
    *,
    again: Again = end_process,
    speak: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train as one rank of the world that the environment describes.

    Rank 0 shows the records on the screen. Every rank calls `begin` with the run directory as soon
    as it exists, and `speak` if it becomes rank 0 later. `again` is what a second Ctrl-C does.
    """
    settings = request.settings
    check_engine(request)
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    watched.start_watcher(world, settings.stall_s)
    member = None
    if MEMBER in os.environ:
        from samestep.launch.ranks.regroup import membership  # noqa: PLC0415 - of elastic ranks

        member = membership(settings.timeout_s)
    if member is None:
        join(world, settings.timeout_s)
    if request.resume_from:
        from samestep.core.session.fetching import fetched  # noqa: PLC0415 - rarely needed

        request = fetched(request, world if member is None else World())
        settings = request.settings
        check_engine(request)
    engine = engine_named(settings.engine)
    if member is None and settings.track:
        from samestep.base.tracker_choice import check_installed, chosen  # noqa: PLC0415

        world.on_main(lambda: check_installed(chosen(settings.track)))
    if member is None and settings.mirror is not None:
        from samestep.base.run.store import check_mirror  # noqa: PLC0415

        world.on_main(lambda: check_mirror(settings.mirror, new=not request.resume))
    with catch_signals(again) as received, contextlib.ExitStack() as open_trackers:
        reporter = _Reporter(request, screen, begin, speak, received, open_trackers)
        with screen:
            if member is None:
                shown = reporter.shown(world)
                outcome = run_session(request, world, received=received, shown=shown, engine=engine)
            else:
                outcome, world = run_elastic(
                    request, world, member, received=received, shown=reporter.shown
                )
        # Before the ranks part: a launcher may end them all after the first that ends by a signal.
        if world.is_main:
            screen.result(outcome.path, json.loads((outcome.path / "result.json").read_text()))
            sys.stdout.flush()
        # Others may wait here for rank 0 to write: a signal that ended them would fail it, too.
        # What is left to do is done: of ranks that outlive each other, one may die even now.
        with contextlib.nullcontext() if member is None else contextlib.suppress(RuntimeError):
            leave(world)
    return outcome


def check_engine(request: Request) -> None:
    """Check that the engine takes these settings and this recipe."""
    settings = request.settings
    if settings.engine == "native":
        return
    from samestep.bridges.lightning.engine import check_settings  # noqa: PLC0415 - an extra

    check_settings(settings, request.recipe)
    if request.allow_change:
        raise UserError(
            "--allow-change needs --engine native: Lightning continues with the optimizer and "
            "the schedule of its own checkpoint.",
            flags=["allow_change", "engine"],
        )


def train_received(file: Path, log: RankLog) -> int:
    """Train as a rank that `samestep.train` has started; return the exit code."""
    from samestep.shell.api.call import RECORDS, ScreenFile, receive, request_of  # noqa: PLC0415

    screen = ScreenFile(file.with_name(RECORDS))
    outcome = train_as_rank(request_of(receive(file)), screen, log.move_to, speak=log.give_back)
    from samestep.core.session.picture_making import end_while_drawing  # noqa: PLC0415

    return end_while_drawing(outcome.signum)
