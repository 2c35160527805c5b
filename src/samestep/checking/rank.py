"""One rank of a script that is checked: run it as Python would, and note what it does."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from samestep.checking.guard import guarding
from samestep.checking.job import Job, read_job
from samestep.checking.recorder import Recorder
from samestep.checking.scratch import Scratch
from samestep.checking.substitute import substituting
from samestep.checking.watch import data, evaluation, files, life, model, parity, step
from samestep.ranks.launch import detect_launch
from samestep.script.hooks import Hooks
from samestep.script.running import Done, ScriptFailed, run_script
from samestep.training.phases import Phases

_WATCHERS = (data, model, step, evaluation, files, life, parity)
_watching = contextlib.ExitStack()
"""Never left: what the script does as Python exits is watched too."""


def main(job_path: str) -> int:
    """Run the script of a job on this rank and return its exit code."""
    job = read_job(Path(job_path))
    _die_with_parent()
    launch = detect_launch(os.environ)
    recorder = watch(job, -os.getpid() if job.alone else launch.rank)
    code, text = 0, ""
    try:
        run_script(Path(job.script), job.arguments, module=job.module)
    except ScriptFailed as error:
        code, text = error.code, error.text
        sys.stderr.write(text)
    for at_end in [] if code else recorder.at_end:
        at_end(launch.world_size)
    recorder.note("end", where="", code=code, text=text)
    recorder.pulse.ended(code)
    return code


def watch(job: Job, rank: int) -> Recorder:
    """Note from here on what this process does."""
    hooks = Hooks(Phases(), several=False)
    scratch = Scratch(Path(job.place), Path(job.scratch.removeprefix(f"{job.place}/root")))
    recorder = Recorder(Path(job.folder), rank, hooks, scratch)
    signal.signal(signal.SIGTERM, _end)
    _watching.enter_context(guarding(scratch, job.began))
    _watching.enter_context(substituting(recorder, job))
    _watching.enter_context(hooks.installed())
    hooks.on_step = recorder.pulse.step
    for watcher in _WATCHERS:
        _watching.enter_context(watcher.watching(recorder, job))
    return recorder


def _die_with_parent() -> None:
    """Let the kernel end this rank when its parent is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _end(_signum: int, _frame: FrameType | None) -> None:
    raise Done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
