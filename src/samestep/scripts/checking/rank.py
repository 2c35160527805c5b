"""One rank of a script that is checked: run it as Python would, and note what it does."""

import os
import sys
from pathlib import Path

from samestep.launch.ranks.launch import detect_launch
from samestep.scripts.checking.events import read_job
from samestep.scripts.checking.processes import note_end, watch
from samestep.scripts.running import ScriptFailed, run_script

_RAN_OUT = (
    "The script counts on more batches than a shortened epoch has, and was ended there. What came "
    "before was judged."
)


def main(job_path: str) -> int:
    """Run the script of a job on this rank and return its exit code."""
    job = read_job(Path(job_path))
    launch = detect_launch(os.environ)
    recorder = watch(job, -os.getpid() if job.alone else launch.rank)
    recorder.world_size = launch.world_size
    code, text = 0, ""
    try:
        run_script(Path(job.script), job.arguments, module=job.module)
    except ScriptFailed as error:
        if recorder.is_cut and _ran_out(error.__cause__):
            recorder.note("ran_out", where="")
            recorder.note("note", where="", text=_RAN_OUT)
        else:
            code, text = error.code, error.text
            sys.stderr.write(text)
    note_end(recorder, code, text)
    return code


def _ran_out(error: BaseException | None) -> bool:
    """Whether a script asked a loader for more than it had; a generator tells it otherwise."""
    return isinstance(error, StopIteration) or isinstance(
        getattr(error, "__cause__", None), StopIteration
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
