"""What Slurm says of a job, and which run belongs to it."""

import getpass
import os
import re
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError
from samestep.run import is_run
from samestep.slurm.options import seconds
from samestep.slurm.script import MARK
from samestep.slurm.tools import ToolError, call

ENDED = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE",
     "BOOT_FAIL", "PREEMPTED"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Queued:
    """One job as Slurm knows it."""

    job: int
    name: str
    user: str
    state: str
    reason: str
    nodes: str
    restarts: int
    elapsed_s: int
    limit_s: int | None
    starts_at: str
    exit_code: str
    log: Path | None
    run: Path | None

    @property
    def ended(self) -> bool:
        """Whether it will not run any more."""
        return self.state in ENDED


def find_job(job: int) -> Queued | None:
    """Return a job, or None if Slurm does not know it (any more)."""
    try:
        text = call("scontrol", "-o", "show", "job", str(job))
    except ToolError as error:
        if "Invalid job id" in error.said:
            return None
        raise
    return parse_job(text.splitlines()[0])


def my_jobs() -> list[Queued]:
    """Return the jobs of this user that samestep submitted and Slurm still knows."""
    text = call("scontrol", "-o", "show", "job")
    jobs = [parse_job(line) for line in text.splitlines() if line.startswith("JobId=")]
    return [job for job in jobs if job.user == getpass.getuser() and job.run is not None]


def parse_job(line: str) -> Queued:
    """Return the job that a line of `scontrol -o show job` describes."""
    fields = dict(re.findall(r"(?:^| )([A-Z][A-Za-z/:]*)=(.*?)(?= [A-Z][A-Za-z/:]*=|$)", line))
    comment = fields.get("Comment", "").strip()
    log = fields.get("StdOut", "").strip()
    limit = fields.get("TimeLimit", "UNLIMITED")
    return Queued(
        job=int(fields["JobId"]),
        name=fields.get("JobName", ""),
        user=fields.get("UserId", "").split("(")[0],
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        restarts=int(fields.get("Restarts", "0")),
        elapsed_s=_clock(fields.get("RunTime", "00:00:00")),
        limit_s=_clock(limit) if limit[:1].isdigit() else None,
        starts_at=fields.get("StartTime", "Unknown"),
        exit_code=fields.get("ExitCode", ""),
        log=Path(log) if log and log != "/dev/null" else None,
        run=Path(comment.removeprefix(MARK)) if comment.startswith(MARK) else None,
    )


def _clock(text: str) -> int:
    return seconds(text) if re.search(r"[1-9]", text) else 0


def find(text: str) -> tuple[Queued | None, Path | None]:
    """Return the job and the run that a job's number or a run directory names.

    A job that Slurm has forgotten is looked for in the runs below this directory.

    Raises:
        UserError: there is neither, or the job is another user's.
    """
    if text.isdigit():
        job = find_job(int(text))
        if job is not None:
            if job.user not in (getpass.getuser(), ""):
                raise UserError(f"Job {job.job} is of user {job.user}; samestep shows your own.")
            return job, job.run
        runs = [log.parent for log in Path("runs").glob(f"*/slurm-{text}.out")]
        if not runs:
            raise UserError(
                f"Slurm knows no job {text}, and no run in ./runs has its log. It forgets a job "
                "some minutes after its end; then give the run directory: "
                "samestep slurm status runs/ID."
            )
        return None, runs[0].absolute()
    run = Path(text)
    if not (is_run(run) or (run / "job.sbatch").is_file()):
        raise UserError(f"{text} is neither a job's number nor the directory of a run.")
    run = run.absolute()
    logs = sorted(run.glob("slurm-*.out"), key=os.path.getmtime)
    numbers = [int(match[1]) for log in logs if (match := re.search(r"slurm-(\d+)\.out", log.name))]
    known = next((job for job in my_jobs() if job.run == run), None)
    if known is None and numbers:
        known = find_job(numbers[-1])
    return known, run
