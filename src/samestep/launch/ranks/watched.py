"""What a rank does so that a hang of it is seen: its pulse, and the process that watches the node.

A process has one pulse, as it has one handler per signal. Unwatched, each call costs a comparison.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import samestep
from samestep.base.errors import UserError
from samestep.base.startup import JOB_RUN, PARENT
from samestep.launch.ranks.launch import STEP_ID, Launch, detect_launch

if TYPE_CHECKING:
    from samestep.launch.stall.pulse import Pulse

STALLED = 75
"""The exit code of ranks that hung: a failure that may not come again (EX_TEMPFAIL)."""

FOLDER = "SAMESTEP_PULSES"
"""Set, to the folder of the pulses, in ranks that `samestep --nproc` starts."""

PULSES = "samestep-pulses-{own}"
"""That folder of other ranks; what is their own begins with the user's number."""

STALL_S = "SAMESTEP_STALL_S"
"""Set by the user, for scripts: seconds without a sign of life that count as a stall; 0: never."""

_SCRIPT_LEAST_S = 480.0  # others may wait minutes for rank 0 to evaluate; NCCL gives up after 10

RUN = "run"
"""In that folder: the run directory, once there is one."""

HEARTBEAT = ".pulse-{node}.json"
"""In the run directory: what the ranks of a node do, every few seconds."""

CLAIM = ".stall-{name}"
"""In the run directory: by it one node asks the others where their ranks stand."""

START, FIRST_STEP, EVALUATION, CHECKPOINT, COMPILING, END = (
    *("start", "first step", "evaluation", "checkpoint", "compiling", "end"),
)
_TIMES = {START: 30.0, FIRST_STEP: 30.0, COMPILING: 30.0, END: 30.0} | dict.fromkeys(
    (EVALUATION, CHECKPOINT), 10.0
)
"""How many times as long as a step each may take."""

_VERDICT_S = 10.0  # the watchers of all nodes look, one after the other

_own: "Pulse | None" = None
_folder = Path()
_begun = 0
_terminal = 2


def begin(*, alone: bool = False) -> "Pulse | None":
    """Begin this rank's pulse if there are several ranks, or a job; if `alone`, always."""
    global _own, _folder, _begun  # noqa: PLW0603 - one per process
    if _own is not None:
        return _own
    try:
        launch = detect_launch(os.environ)
    except UserError:  # it is reported where the ranks join
        return None
    if launch.world_size == 1 and not alone and JOB_RUN not in os.environ:
        return None
    from samestep.launch.stall.pulse import Pulse  # noqa: PLC0415 - one rank has none

    with contextlib.suppress(OSError):  # a full disk, or no folder for temporary files
        _begun += 1  # the folder of the last one is removed meanwhile
        _folder = _pulses(launch)
        _folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _own = Pulse(_folder, launch.rank)
        # A single rank may load data as long as it likes; others would wait for it.
        _own.turn_to(START, _TIMES[START] if launch.world_size > 1 else 1e4)
    return _own


def _pulses(launch: Launch) -> Path:
    """Return the folder of this node's pulses: alike for its ranks, another for each start."""
    if folder := os.environ.get(FOLDER):
        return Path(folder)
    names = ("SLURM_JOB_ID", *STEP_ID, "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")
    attempt = [os.environ.get(name, "") for name in (*names, "TORCHELASTIC_RESTART_COUNT")]
    own = [os.getpid()] if launch.world_size == 1 else [launch.master_addr, launch.master_port]
    parts = [*map(str, [os.getuid(), *own, _begun]), *attempt]
    name = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, parts)))
    return Path(tempfile.gettempdir(), PULSES.format(own=f"{name}-node{launch.node}"))


def start_watcher(launch: Launch, stall_s: float | None, least_s: float = 60.0) -> None:
    """Let a process of its own watch this node's ranks; the first that calls it starts one.

    `stall_s` is the user's word; without it `least_s` is the shortest stall.
    """
    if stall_s == 0:
        end()
    if (begin(alone=stall_s is not None) if stall_s != 0 else None) is None:
        return
    from samestep.launch.stall.stacks import state_of  # noqa: PLC0415 - where ranks are watched

    mark = _folder / "watched"
    with contextlib.suppress(OSError, ValueError):
        if not state_of(int(mark.read_text())):  # of an earlier start that was killed
            mark.unlink()
    try:
        with mark.open("x") as file:
            file.write(str(os.getpid()))
    except OSError:  # another rank was first
        return
    names = ("node", "num_nodes", "local_world_size", "world_size")
    watched = {"folder": str(_folder), **{name: getattr(launch, name) for name in names}}
    watched |= {"least_s": stall_s or least_s, "exact": stall_s is not None}
    # Elsewhere a parent or the job's script reports, and a pipe must not stay open for the watcher.
    needs_terminal = not {PARENT, JOB_RUN} & {*os.environ}
    variables = dict(os.environ)
    place = str(Path(samestep.__file__).parents[1])
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
    with contextlib.suppress(OSError):
        watcher = subprocess.Popen(
            [sys.executable, "-P", "-m", "samestep.launch.ranks.watcher", json.dumps(watched)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=_terminal if needs_terminal else subprocess.DEVNULL,
            env=variables,
            start_new_session=True,
        )
        watcher.returncode = 0  # no process waits for it: it ends when the ranks have


def watch_script(launch: Launch) -> "Pulse | None":
    """Let this rank of a user's script be watched; return its pulse."""
    try:
        stall_s = float(os.environ.get(STALL_S, "nan"))
    except ValueError:
        stall_s = math.nan
    start_watcher(launch, stall_s if stall_s >= 0 else None, _SCRIPT_LEAST_S)
    return _own


def speak_at(descriptor: int) -> None:
    """Let a watcher write to this descriptor, where standard error is not what the user sees."""
    global _terminal  # noqa: PLW0603
    _terminal = descriptor


def in_run(run: Path) -> None:
    """Tell the watcher where the run is; all ranks of a node tell the same."""
    if _own is not None:
        file = _folder / f"{RUN}-{_own.rank}"
        with contextlib.suppress(OSError):
            file.write_text(str(run.absolute()))
            file.rename(_folder / RUN)


def step(number: int) -> None:
    """Note that a step has ended."""
    if _own is not None:
        _own.step(number)


def alive() -> None:
    """Note a sign of life."""
    if _own is not None:
        _own.alive()


def turn_to(phase: str) -> None:
    """Set the rank's phase from now on, until the next step."""
    if _own is not None:
        _own.turn_to(phase, _TIMES.get(phase, 1.0))


@contextlib.contextmanager
def within(phase: str) -> Iterator[None]:
    """Set the rank's phase for the lines inside."""
    if _own is None:
        yield
        return
    before = _own.phase
    turn_to(phase)
    try:
        yield
    finally:
        _own.turn_to(*before)


def end() -> None:
    """End the pulse: what follows is not watched."""
    global _own  # noqa: PLW0603
    if _own is not None:
        _own.ended(0)
        _own.close()
        _own = None


def wait_for_verdict(error: BaseException, seconds: float) -> None:
    """Wait as a rank that another has kept waiting in vain, so that the watcher finds out which."""
    if _own is None:
        time.sleep(seconds)
        return
    from samestep.launch.stall.pulse import PEER, TIMED_OUT, users_place  # noqa: PLC0415

    frames = traceback.extract_tb(error.__traceback__)
    place = users_place((frame.filename, frame.lineno or 0, "") for frame in reversed(frames))
    with _own.inside("a collective", "", place, PEER):
        turn_to(TIMED_OUT)
        time.sleep(seconds + _VERDICT_S)
