"""Check a script inside a launched job, on its own ranks and devices: `check --here`.

Each process of the job starts its rank of the script as a watched process. The ranks share a folder
that rank 0 makes: in the working directory if there are several nodes.
"""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from samestep.base.run.files import write_text
from samestep.launch.ranks.launch import Launch, detect_launch
from samestep.launch.stall.judge import StallVerdict
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.check_script import job_of, prepare, report_on, what_was_seen
from samestep.scripts.checking.events import read_job, write_job
from samestep.scripts.checking.ranks_of_script import end, script_variables, start_rank, wait
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.running import ScriptRanks

_OTHERS_WITHIN_S, _LOOK_EVERY_S = 60.0, 0.05
_OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")


def check_here(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    steps: int = 10,
    seconds: float = 40.0,
    stall_s: float | None = None,
) -> CheckReport | None:
    """Run this process's rank of a script under watch; on rank 0, return what is wrong with it.

    Raises UserError if the script cannot be checked.
    """
    began = time.perf_counter()
    launch = detect_launch(os.environ)
    job = job_of(script, arguments, module=module, steps=steps, nproc=launch.world_size)
    ranks = ScriptRanks(launch)
    ranks.join()
    if launch.rank:
        place = Path(ranks.share(""))
        ranks.leave()
        _run_rank(launch, place, seconds, stall_s)
        return None
    beside = None if _one_node(launch) else Path.cwd()
    with tempfile.TemporaryDirectory(
        prefix=".samestep-check-", dir=beside, ignore_cleanup_errors=True
    ) as name:
        place = Path(name).resolve()
        scratch, job = prepare(job, script, place)
        write_job(job)
        ranks.share(str(place))
        ranks.leave()
        stall = _run_rank(launch, place, seconds, stall_s)
        codes = [_code_of(place, rank) for rank in range(launch.world_size)]
        seen, output = what_was_seen(scratch, place / "seen", codes, stall, asked=True)
    return report_on(seen, output, script, began)


def _run_rank(
    launch: Launch, place: Path, seconds: float, stall_s: float | None
) -> StallVerdict | None:
    """Run this process's rank to its end, and leave its exit code in a file."""
    path = place / "seen" / "job.json"
    given = script_variables(Scratch(place, Path("/")))
    variables = {name: value for name, value in given.items() if name not in _OF_ONE_MACHINE}
    cwd = Path(read_job(path).scratch)
    process = start_rank(path, launch.rank, os.environ | variables, cwd)
    try:
        looks = _one_node(launch)
        codes, stall = wait([process], path.parent, seconds, stall_s, looks=looks)
    finally:
        end([process])
    write_text(_code_file(place, launch.rank), json.dumps(codes[0]))
    return stall


def _code_of(place: Path, rank: int) -> int | None:
    """Wait for the exit code that a rank leaves."""
    path = _code_file(place, rank)
    until = time.monotonic() + _OTHERS_WITHIN_S
    while not path.exists() and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
    code: int | None = json.loads(path.read_text()) if path.exists() else None
    return code


def _code_file(place: Path, rank: int) -> Path:
    return place / "seen" / f"code-{rank}.json"


def _one_node(launch: Launch) -> bool:
    return launch.local_world_size == launch.world_size
