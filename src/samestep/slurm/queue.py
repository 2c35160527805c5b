"""Call Slurm's programs, and ask them for jobs and the runs that belong to them."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UserError
from samestep.nearby import nearby
from samestep.run.directory import is_run
from samestep.slurm.options import read_time
from samestep.slurm.script import MARK

_TIMEOUT_S = 60.0

# Variables that Slurm, MPI and torchrun set for the processes of a job.
_OF_A_JOB = re.compile(
    r"SLURM(?!_CONF$|_CLUSTERS$).*|(SRUN_|SALLOC_|PMI|TORCHELASTIC_).*|ROLE_NAME"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)

_ENDED = re.compile(
    "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY|DEADLINE|BOOT_FAIL|PREEMPTED"
)


class ProgramError(UserError):
    """One of Slurm's programs refused; its own words are in `said`."""

    def __init__(self, name: str, arguments: tuple[str, ...], said: str) -> None:
        super().__init__(f"`{' '.join([name, *arguments])}` was refused:\n{said}")
        self.said = said


def call(name: str, *arguments: str, without: Collection[str] = ()) -> str:
    """Run one of Slurm's programs without some variables; a refusal is a `ProgramError`."""
    if shutil.which(name) is None:
        raise UserError(
            f"There is no Slurm here: {name} is not on the PATH. On a cluster's login node it is "
            "(perhaps after `module load slurm`); on Debian or Ubuntu, `apt install slurm-wlm "
            "munge` installs it and `samestep slurm sandbox up` starts one. `samestep slurm submit "
            "… --dry-run` prints the job script without it."
        )
    conf = os.environ.get("SLURM_CONF", "")
    if conf and not Path(conf).exists():
        raise UserError(
            f"SLURM_CONF is {conf}, and there is no such file; perhaps it belonged to a sandbox "
            "that is down. `unset SLURM_CONF` uses this machine's own Slurm; `samestep slurm "
            "sandbox up` starts a sandbox."
        )
    # Variables that narrow the user's own lists (SQUEUE_PARTITION, …) must not hide a job from us.
    narrows = () if name == "sbatch" else (f"{name.upper()}_",)
    outside = outside_of_any_job(os.environ)
    shown = {k: v for k, v in outside.items() if k not in without and not k.startswith(narrows)}
    words = [name, *arguments]
    try:
        done = subprocess.run(
            words, env=shown, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{name}` got no answer from Slurm within {_TIMEOUT_S:.0f} s. Try `scontrol ping`: "
            "the controller may be down, or SLURM_CONF may name another cluster."
        ) from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        if "Unable to contact slurm controller" in said and conf:
            said += (
                f"\nSLURM_CONF is {conf}. If that is a sandbox's, `samestep slurm sandbox status` "
                "shows whether it is up."
            )
        raise ProgramError(name, arguments, said)
    return done.stdout


def outside_of_any_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without a job's variables, which a new job would inherit."""
    return {k: v for k, v in environment.items() if not _OF_A_JOB.fullmatch(k)}


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """One job as Slurm knows it."""

    job: int
    name: str
    user: str
    uid: int | None = None
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
        return bool(_ENDED.fullmatch(self.state))


@dataclass(frozen=True, kw_only=True)
class JobAndRun:
    """A job and its run, as far as they are known; the error if the queue did not answer."""

    job: QueuedJob | None = None
    run: Path | None = None
    queue_error: UserError | None = None

    @property
    def note(self) -> str:
        """The error as a sentence; empty if there was none."""
        why = " ".join(str(self.queue_error).split())
        return f"The queue could not be asked: {why}" if self.queue_error else ""


def find_job(job: int) -> QueuedJob | None:
    """Return a job, or None if Slurm does not know it (any more)."""
    try:
        text = call("scontrol", "-o", "show", "job", str(job))
    except ProgramError as error:
        if "Invalid job id" in error.said:
            return None
        raise
    return parse_job(text.splitlines()[0])


def my_jobs(of_run: Path | None = None) -> list[QueuedJob]:
    """Return this user's jobs (of one run) that samestep submitted and Slurm still knows."""
    # With --me the controller does not list the jobs of other users.
    text = call("squeue", "--me", "--all", "--states=all", "--noheader", "--format=%A %k")
    rows = [line.partition(f" {MARK}") for line in text.splitlines()]
    return [
        found
        for job, mark, run in rows
        if mark and job.isdigit() and (of_run is None or Path(run).resolve() == of_run.resolve())
        if (found := find_job(int(job)))
    ]


def parse_job(line: str) -> QueuedJob:
    """Return the job that a line of `scontrol -o show job` describes."""
    fields = dict(re.findall(r"(?:^| )([A-Z][A-Za-z/:]*)=(.*?)(?= [A-Z][A-Za-z/:]*=|$)", line))
    comment = fields.get("Comment", "").strip()
    log = fields.get("StdOut", "").strip()
    user, _, uid = fields.get("UserId", "").partition("(")
    return QueuedJob(
        job=int(fields["JobId"]),
        name=fields.get("JobName", ""),
        user=user,
        uid=int(uid.rstrip(")")) if uid else None,
        state=fields.get("JobState", "UNKNOWN"),
        reason=fields.get("Reason", ""),
        nodes=fields.get("NodeList", "").replace("(null)", ""),
        restarts=int(fields.get("Restarts", "0")),
        elapsed_s=read_time(fields.get("RunTime", "")) or 0,
        limit_s=read_time(fields.get("TimeLimit", "")),
        starts_at=fields.get("StartTime", "Unknown"),
        exit_code=fields.get("ExitCode", ""),
        log=Path(log) if log and log != "/dev/null" else None,
        run=Path(comment.removeprefix(MARK)) if comment.startswith(MARK) else None,
    )


def find_job_or_run(text: str) -> JobAndRun:
    """Return the job and the run of a number or run directory: its running or newest job."""
    run = Path(text)
    if text.isdigit():
        return _find_number(int(text))
    if not (is_run(run) or (run / "job.sbatch").is_file()):
        raise UserError(
            f"{text} is neither a job's number nor the directory of a run.{nearby(run, 'run')}"
        )
    run = run.absolute()
    try:
        jobs = my_jobs(run)
    except UserError as error:
        return JobAndRun(run=run, queue_error=error)
    jobs.sort(key=lambda job: (not job.ended, job.state == "RUNNING", job.job))
    return JobAndRun(job=jobs[-1] if jobs else None, run=run)


def _find_number(number: int) -> JobAndRun:
    queue_error = job = None
    try:
        job = find_job(number)
    except UserError as error:
        queue_error = error
    if job is not None:
        if job.uid not in (os.getuid(), None):  # $USER may differ from the kernel's name
            raise UserError(f"Job {job.job} belongs to user {job.user}; samestep shows your own.")
        return JobAndRun(job=job, run=job.run)
    if logs := list(Path("runs").glob(f"*/slurm-{number}.out")):
        return JobAndRun(run=logs[0].parent.absolute(), queue_error=queue_error)
    raise queue_error or UserError(
        f"Slurm knows no job {number}, and no run in ./runs has its log. It forgets a job some "
        "minutes after its end; then give the run directory: samestep slurm status runs/ID."
    )
