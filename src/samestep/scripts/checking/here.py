"""Check a script inside a launched job, on its own ranks and devices: `check --here`.

Each process of the job starts its rank of the script as a watched process, once or, with
`--resume`, as often as rank 0 says. The ranks share a folder that rank 0 makes, with the scratch
copies: in the working directory if there are several nodes.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.run.files import write_text
from samestep.launch.ranks.launch import Launch, detect_launch
from samestep.launch.ranks.world import agent_serves
from samestep.launch.stall.stall_verdict import StallVerdict
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.check_resume import check_resume
from samestep.scripts.checking.check_script import job_of, prepare, report_on, run_job
from samestep.scripts.checking.ranks_of_script import (
    SPAWNS,
    Job,
    end,
    free_port,
    is_given_up,
    read_job,
    script_variables,
    start_rank,
    wait,
    write_job,
)
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.running import ScriptRanks

_OTHERS_WITHIN_S, _NEXT_WITHIN_S, _LOOK_EVERY_S = 60.0, 600.0, 0.05
_OF_ONE_MACHINE = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR")


def check_here(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    resume: str | None = None,
    module: bool = False,
    steps: int = 10,
    seconds: float = 40.0,
    stall_s: float | None = None,
    tell: Callable[[str], object] = lambda _text: None,
) -> CheckReport | None:
    """Run this process's rank of a script under watch; on rank 0, return what is wrong with it.

    `resume` and `tell` are those of `check_resume`.

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
        _Crew(launch, place, seconds, stall_s).follow()
        return None
    beside = None if _one_node(launch) else Path.cwd()
    with tempfile.TemporaryDirectory(
        prefix=".samestep-check-", dir=beside, ignore_cleanup_errors=True
    ) as name:
        place = Path(name).resolve()
        ranks.share(str(place))
        ranks.leave()
        crew = _Crew(launch, place, seconds, stall_s)
        if resume is not None:
            return check_resume(
                job, resume=resume, seconds=seconds, here=(place, crew.run), tell=tell
            )
        seen, output = run_job(*prepare(job, place), crew.run)
    return report_on(seen, output, job.script, began)


@dataclass
class _Crew:
    """The processes of the job: rank 0 leaves a file for each start of the script."""

    launch: Launch
    place: Path
    seconds: float
    stall_s: float | None
    starts: int = 0

    def run(self, _scratch: Scratch, job: Job) -> tuple[Sequence[int | None], StallVerdict | None]:
        """Run all ranks of a job, on rank 0."""
        variables: dict[str, str] = {}
        if self.starts and agent_serves():
            # The agent's store has the addresses of the last start's ranks.
            port = str(free_port())
            variables = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": port}
        write_text(self._file(), json.dumps([str(write_job(job)), variables]))
        stall = self._run_rank()
        if (Path(job.folder) / SPAWNS).exists():
            raise UserError(
                f"{job.script} starts ranks of its own, so it cannot run on those of a job. "
                "Check it in a single process, without --here."
            )
        return [self._code_of(job, rank) for rank in range(self.launch.world_size)], stall

    def follow(self) -> None:
        """Run this process's rank of each start, until rank 0 has removed the folder."""
        until = time.monotonic() + _NEXT_WITHIN_S
        while self.place.exists() and time.monotonic() < until:
            if self._file().exists():
                self._run_rank()
                until = time.monotonic() + _NEXT_WITHIN_S
            time.sleep(_LOOK_EVERY_S)

    def _file(self) -> Path:
        return self.place / f"start-{self.starts}.json"

    def _run_rank(self) -> StallVerdict | None:
        """Run this process's rank of a start to its end, and leave its exit code in a file."""
        name, variables = json.loads(self._file().read_text())
        self.starts += 1
        path = Path(name)
        given = script_variables(Scratch(self.place, Path("/"))) | variables
        variables = {name: value for name, value in given.items() if name not in _OF_ONE_MACHINE}
        process = start_rank(
            path, self.launch.rank, os.environ | variables, Path(read_job(path).scratch)
        )
        try:
            looks = _one_node(self.launch)
            codes, stall = wait([process], path.parent, self.seconds, self.stall_s, looks=looks)
        finally:
            end([process], politely=not is_given_up(path.parent))
        write_text(path.parent / f"code-{self.launch.rank}.json", json.dumps(codes[0]))
        return stall

    def _code_of(self, job: Job, rank: int) -> int | None:
        path = Path(job.folder) / f"code-{rank}.json"
        until = time.monotonic() + _OTHERS_WITHIN_S
        while not path.exists() and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
        code: int | None = json.loads(path.read_text()) if path.exists() else None
        return code


def _one_node(launch: Launch) -> bool:
    return launch.local_world_size == launch.world_size
