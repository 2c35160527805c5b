"""One rank of a script that is checked: run it as Python would, and note what it does."""

import os
import sys
from pathlib import Path

from samestep.launch.ranks.launch import detect_launch
from samestep.scripts.checking.processes import note_end, watch
from samestep.scripts.checking.ranks_of_script import read_job
from samestep.scripts.running import ScriptFailed, run_script


def main(job_path: str) -> int:
    """Run the script of a job on this rank and return its exit code."""
    job = read_job(Path(job_path))
    launch = detect_launch(os.environ)
    recorder = watch(job, -os.getpid() if job.alone else launch.rank)
    recorder.world_size = launch.world_size
    code, text, cause = 0, "", None
    try:
        run_script(Path(job.script), job.arguments, module=job.module)
    except ScriptFailed as error:
        code, text, cause = error.code, error.text, error.__cause__
        sys.stderr.write(text)
    note_end(recorder, code, text, cause)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
