"""Begin to watch a process: a rank that `check` started, or one that the script starts itself.

In a rank, a script that starts ranks itself (by `torch.multiprocessing` or `multiprocessing`) would
start ranks of ranks. Once that is noticed, `check` starts the script again as a single process, and
each process notes its events under its process id until it joins a group and has a rank.
"""

import contextlib
import ctypes
import functools
import multiprocessing.spawn
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils.worker import _worker_loop

from samestep.base.errors import LOST_PEER, error_text
from samestep.base.patches import Patch, patched
from samestep.base.phases import Phases
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.guard import guarding
from samestep.scripts.checking.ranks_of_script import SPAWNS, Job, read_job
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.checking.substitute import frameworks_adapted, substituting
from samestep.scripts.checking.watch import (
    data,
    evaluation,
    files,
    life,
    losses,
    model,
    parity,
    resume,
    step,
)
from samestep.scripts.hooks import Hooks
from samestep.scripts.probes import Around, Probe, ProbedCall, listening
from samestep.scripts.running import Done

_WATCHERS = (data, model, step, losses, evaluation, files, life, parity)
_RAN_OUT = "`check` had cut its epochs short, which may be why. "
_spawn = sys.modules["torch.multiprocessing.spawn"]  # its own name is that of a function
_START_PROCESSES = Probe((_spawn, "start_processes"), (torch.multiprocessing, "start_processes"))
_START_PROCESS = Probe((BaseProcess, "start"))
_watching = contextlib.ExitStack()
"""Never left: what the script does as Python exits is watched too."""


def watch(job: Job, rank: int) -> Recorder:
    """Note from here on what this process does."""
    if sys.platform == "linux":  # PR_SET_PDEATHSIG: the parent is `check`, or the script
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    hooks = Hooks(Phases(), several=False)
    scratch = Scratch(Path(job.place), Path(job.scratch.removeprefix(f"{job.place}/root")))
    recorder = Recorder(job, rank, hooks, scratch)
    signal.signal(signal.SIGTERM, functools.partial(_end, recorder))
    # Another start of a training may look for its checkpoints in a folder of temporary files.
    _watching.enter_context(guarding(scratch, job.began, temporary=not job.resumes))
    _watching.enter_context(substituting(recorder))
    _watching.enter_context(frameworks_adapted(job))
    _watching.enter_context(hooks.installed())
    hooks.on_step = recorder.pulse.step
    for watcher in (resume,) if job.resumes else _WATCHERS:
        _watching.enter_context(watcher.watching(recorder))
    own = _OwnRanks(recorder)
    patches: list[Patch] = [
        # torch's own SIGINT is ignored by whatever a shell has put into the background.
        (_spawn, "_prctl_pr_set_pdeathsig", lambda original, _signum: original(signal.SIGKILL)),
        (BaseProcess, "run", own.around_run),
        (multiprocessing.spawn, "get_preparation_data", own.around_preparation),
    ]
    if job.alone and not job.substitute:  # how many ranks it starts
        patches.append((torch.cuda, "device_count", lambda _original: job.nproc))
    _watching.enter_context(patched(*patches))
    _watching.enter_context(
        listening(
            (probes.INIT_GROUP, own.on_init),
            (_START_PROCESSES, own.on_start_processes),
            (_START_PROCESS, own.on_start_process),
        )
    )
    return recorder


def note_end(recorder: Recorder, code: int, text: str, error: BaseException | None = None) -> None:
    """Record a rank's end; an error after an epoch was cut short may come from the cut."""
    ended_well = not code
    if isinstance(error, Exception) and not LOST_PEER.search(error_text(error)):
        where, first_line = recorder.raised_at(error), error_text(error).partition("\n")[0]
        said = f"The script ended at {where} with {first_line}. {_RAN_OUT * recorder.is_cut}"
        recorder.note(ev.Remark(f"{said}What came before was judged."), where="")
        if recorder.is_cut:
            ended_well = True
            recorder.note(ev.EpochRanOut(), where=where)
    for at_end in recorder.at_end if ended_well else []:
        at_end(recorder.world_size)
    recorder.note(ev.RankEnded(code, text=text), where="")
    recorder.pulse.ended(code)


def _end(recorder: Recorder, _signum: int, _frame: FrameType | None) -> None:
    recorder.is_ended = True
    raise Done


class _OwnRanks:
    """What one process knows of the ranks that its script starts, and whether it is one."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self._job = recorder, recorder.job
        self._process = os.getpid()
        self._starts_worker = False

    def on_start_processes(self, _call: ProbedCall) -> None:
        if not self._job.alone:
            self._end_with_ranks()

    def on_init(self, _call: ProbedCall) -> Around:
        """Learn which rank this is; a child of a rank is none."""
        if not self._job.alone and (self.recorder.rank < 0 or os.getpid() != self._process):
            self._end_with_ranks()
        yield
        if self.recorder.rank < 0:
            self.recorder.become(dist.get_rank(), dist.get_world_size())

    def on_start_process(self, call: ProbedCall) -> None:
        """Tell a loader's worker from what may be a rank."""
        self._starts_worker = _is_worker(call.args[0])

    def around_preparation(self, original: Callable[..., Any], name: str) -> dict[str, Any]:
        """Let a new Python be watched before it imports the script."""
        watching = {} if self._starts_worker else {"samestep": _Watched(self._job.folder)}
        prepared: dict[str, Any] = original(name)
        return watching | prepared

    def around_run(self, original: Callable[..., Any], process: Any) -> None:
        if _is_worker(process):
            original(process)
            return
        if os.getpid() != self._process:  # a fork: it has all that the parent is watched by
            self.recorder.quiet += 1
            self.recorder.hooks.on_step = lambda _step: None
            self.recorder, self._process = watch(self._job, -os.getpid()), os.getpid()
        code, text = 0, ""
        try:
            original(process)
        except Done:
            return
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            raise
        except BaseException:
            code, text = 1, traceback.format_exc()
            raise
        finally:
            if not isinstance(sys.exc_info()[1], Done):
                note_end(self.recorder, code, text, sys.exc_info()[1])

    def _end_with_ranks(self) -> None:
        (Path(self._job.folder) / SPAWNS).touch()
        raise Done


def _is_worker(process: Any) -> bool:
    return process._target is _worker_loop  # noqa: SLF001 - it has no other mark


class _Watched:
    """Begins to watch a process where it is unpickled."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return _watch_child, (f"{self._folder}/job.json",)


def _watch_child(job_path: str) -> None:
    watch(read_job(Path(job_path)), -os.getpid())
