"""Check a script inside a launched job: on its ranks, its nodes and its devices.

Each process of the launcher starts one rank of the script. They share a scratch copy in the
current folder, which all nodes of a job see, and rank 0 reads there what all have noted.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep.checking.check_report import CheckReport
from samestep.checking.check_script import prepared, report_of, seen_by
from samestep.checking.job import Job, read_job, write_job
from samestep.checking.ranks_of_script import end, script_variables, wait
from samestep.checking.scratch import Scratch
from samestep.ranks.launch import Launch
from samestep.ranks.world import agent_serves
from samestep.script.running import ScriptRanks

_PATIENCE_S = 300.0


def check_here(
    script: Path,
    arguments: Sequence[str],
    launch: Launch,
    *,
    module: bool,
    steps: int,
    seconds: float,
    stall_s: float | None,
) -> CheckReport | None:
    """Run a script on this rank under watch; return the report on rank 0, and None elsewhere."""
    began = time.perf_counter()
    # Without an agent the script's own rank 0 serves at the master's port.
    ours = launch if agent_serves() else replace(launch, master_port=launch.master_port + 1)
    ranks = ScriptRanks(ours, _PATIENCE_S + seconds)
    ranks.join()
    asked = Job(script=str(script), arguments=list(arguments), module=module, steps=steps)

    def prepare() -> str:
        place = Path(tempfile.mkdtemp(prefix=".samestep-check-", dir=Path.cwd()))
        return str(write_job(prepared(place, script, asked)[1]))

    path = Path(ranks.tell(prepare))
    job, folder = read_job(path), path.parent
    try:
        scratch = Scratch(Path(job.place), Path(job.scratch.removeprefix(f"{job.place}/root")))
        variables = script_variables(scratch)
        del variables["CUDA_VISIBLE_DEVICES"]
        with (folder / f"output-{launch.rank:05}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "samestep.checking.rank", str(path)],
                cwd=job.scratch,
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            codes, stall = wait([process], folder, seconds, stall_s)
        finally:
            end([process])
        told = ranks.gather("" if codes[0] is None else str(codes[0]))
        if launch.rank:
            return None
        all_codes = [int(code) if code else None for code in told]
        seen, texts = seen_by(scratch, folder, all_codes, stall, asked=True)
        return report_of(seen, texts, script, began)
    finally:
        if launch.rank == 0:
            shutil.rmtree(job.place, ignore_errors=True)
