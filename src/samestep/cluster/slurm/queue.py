"""What `samestep slurm status` shows: Slurm's queue, and how far the run of each job has come."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.nearby import nearby
from samestep.base.run.directory import is_run, read_summary
from samestep.base.run.files import read_object
from samestep.cluster.slurm.options import OPTIONS, read_time
from samestep.cluster.slurm.restarts import BEGUN, last_start
from samestep.cluster.slurm.script import MARK

_TIMEOUT_S = 60.0
_BEGINS_WITHIN_S, _POLL_EVERY_S = 15.0, 0.2

# Variables that Slurm, MPI and torchrun set for the processes of a job.
_OF_A_JOB = re.compile(
    r"SLURM(?!_CONF$|_CLUSTERS$).*|(SRUN_|SALLOC_|PMI|TORCHELASTIC_).*|ROLE_NAME"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)

# What squeue calls the fields of a job, by what scontrol calls them; one query tells of all jobs.
_FIELDS = {
    "JobId": "JobID",
    "JobName": "Name",
    "UserId": "UserName",
    "JobState": "State",
    "Reason": "Reason",
    "NodeList": "NodeList",
    "Restarts": "RestartCnt",
    "RunTime": "TimeUsed",
    "TimeLimit": "TimeLimit",
    "StartTime": "StartTime",
    "ExitCode": "exit_code",
    "StdOut": "STDOUT",
    "Command": "Command",
    "Comment": "Comment",
    "ArrayJobId": "ArrayJobID",
    "ArrayTaskId": "ArrayTaskID",
}
_SEPARATOR = "\x1f"

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
            f"There is no Slurm here: {name} is not on the PATH. Use a cluster's login node "
            "(perhaps after `module load slurm`); on Debian or Ubuntu, `apt install slurm-wlm "
            "munge` installs it and `samestep slurm sandbox up` starts one. `samestep slurm submit "
            "… --dry-run` prints the job script without it."
        )
    conf = os.environ.get("SLURM_CONF", "")
    if conf and not Path(conf).exists():
        raise UserError(
            f"SLURM_CONF is {conf}, which does not exist; perhaps it belonged to a sandbox that is "
            "down. `unset SLURM_CONF` uses this machine's own Slurm; `samestep slurm sandbox up` "
            "starts a sandbox."
        )
    # Variables that narrow the user's own lists (SQUEUE_PARTITION, …) must not hide a job from us.
    narrows = () if name == "sbatch" else (f"{name.upper()}_",)
    outside = outside_of_any_job(os.environ)
    env = {k: v for k, v in outside.items() if k not in without and not k.startswith(narrows)}
    words = [name, *arguments]
    try:
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{name}` got no answer from Slurm within {_TIMEOUT_S:.0f} s. Try `scontrol ping`: "
            "the controller may be down, or SLURM_CONF may name another cluster."
        ) from None
    if done.returncode:
        message = done.stderr.strip() or done.stdout.strip()
        if "Unable to contact slurm controller" in message and conf:
            message += (
                f"\nSLURM_CONF is {conf}. If that is a sandbox's, `samestep slurm sandbox status` "
                "shows whether it is up."
            )
        if "configuration source" in message and not conf:
            raise UserError(
                "Slurm's programs find no configuration in this shell. For a sandbox, set "
                "SLURM_CONF as `samestep slurm sandbox up` printed it."
            )
        raise ProgramError(name, arguments, message)
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
    array_task: str = ""  # its number and task, as 12_3, if it is of a job array

    @property
    def target(self) -> str:
        """The id for Slurm's commands: in a job array, the plain id may mean every task."""
        return self.array_task or str(self.job)

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
        return f"The queue could not be read: {why}" if self.queue_error else ""


def find_job(job: int | str) -> QueuedJob | None:
    """Return a job by its number, or 12_3, or None if Slurm does not know it (any more)."""
    try:
        text = call("scontrol", "-o", "show", "job", str(job))
    except ProgramError as error:
        if re.search("Invalid job id|Job .* not found", error.said):
            return None
        raise
    lines = text.splitlines()
    if len(lines) > 1 or re.search("ArrayTaskId=(?![0-9]+ )", lines[0]):
        raise UserError(
            f"Job {job} is a job array. Name one of its jobs, such as {job}_0, or its run; "
            "samestep slurm status lists them."
        )
    return parse_job(lines[0])


def exclusion(job: str, nodes: Collection[str]) -> str:
    """Return a job's nodes to exclude, with these; raise an error if too few others are left."""
    line = call("scontrol", "-o", "show", "job", job)
    before = re.search(r" ExcNodeList=(?!\(null\))(\S+)", line)
    script = re.search(r" Command=(.*?) \w+=", line)
    excluded = ",".join([*([before[1]] if before else []), *nodes])
    if script is not None:
        submitters = [name for name in os.environ if name.startswith("SBATCH_")]
        call("sbatch", "--test-only", f"--exclude={excluded}", script[1], without=submitters)
    return excluded


def my_jobs(of_run: Path | None = None) -> list[QueuedJob]:
    """Return this user's jobs (of one run) that samestep submitted and Slurm still knows."""
    # With --me the controller does not list the jobs of other users. squeue pads to the width.
    columns = ",".join(f"{name}:4096{_SEPARATOR}" for name in _FIELDS.values())
    text = call(
        "squeue", "--me", "--all", "--states=all", "--array", "--noheader", f"--Format={columns}"
    )
    rows = ([v.strip() for v in line.split(_SEPARATOR)] for line in text.split("\n"))
    jobs = [_queued(dict(zip(_FIELDS, row, strict=False))) for row in rows if row[0].isdigit()]
    run = of_run and of_run.resolve()
    return [job for job in jobs if job.run and run in (None, job.run.resolve())]


def parse_job(line: str) -> QueuedJob:
    """Return the job that a line of `scontrol -o show job` describes."""
    fields = dict(re.findall(r"(?:^| )([A-Z][A-Za-z/:]*)=(.*?)(?= [A-Z][A-Za-z/:]*=|$)", line))
    return _queued(fields)


def _queued(fields: Mapping[str, str]) -> QueuedJob:
    number, task = fields["JobId"], fields.get("ArrayTaskId", "")
    task = task if task.isdigit() else ""
    # squeue leaves the job's number in the name to be filled in.
    filled = {"%j": number, "%A": fields.get("ArrayJobId", "") or number, "%a": task, "%%": "%"}
    log = re.sub("%[jAa%]", lambda match: filled[match[0]], fields.get("StdOut", "").strip())
    comment = fields.get("Comment", "").strip()
    if task:
        comment = comment.replace("%a", task)
    user, _, uid = fields.get("UserId", "").partition("(")
    return QueuedJob(
        job=int(number),
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
        run=_run_of(comment, fields.get("Command", "").strip(), log),
        array_task=f"{fields.get('ArrayJobId', '')}_{task}" if task else "",
    )


def _run_of(comment: str, command: str, log: str) -> Path | None:
    """Return the run directory that a job's comment names; an admin may have replaced that."""
    if comment.startswith(MARK):
        run = Path(comment.removeprefix(MARK))
        return run.resolve() if run.is_symlink() else run  # of a job array
    folders = (Path(path).parent for path in (command, log) if path.startswith("/"))
    return next((folder for folder in folders if (folder / OPTIONS).is_file()), None)


def ended_runs(folder: Path, queued: Collection[Path | None], most: int = 20) -> list[Path]:
    """Return the newest runs in a folder whose jobs have started and Slurm no longer knows."""
    begun = ((path.stat().st_mtime, path.parent) for path in folder.glob(f"*/{BEGUN}"))
    resolved = {path.resolve() for path in queued if path is not None}
    runs = [run.absolute() for _, run in sorted(begun) if run.resolve() not in resolved]
    return runs[-most:]


def find_job_or_run(text: str) -> JobAndRun:
    """Return the job and the run of a number or run directory.

    Of a run's jobs, a running one comes first, then a waiting one, then the last that began.
    """
    run = Path(text)
    if re.fullmatch("[0-9]+(_[0-9]+)?", text):
        return _find_number(text)
    if not (is_run(run) or (run / "job.sbatch").is_file()):
        raise UserError(f"{text} is neither a job number nor a run.{nearby(run, 'run')}")
    run = run.absolute()
    try:
        jobs = my_jobs(run)
    except UserError as error:
        return JobAndRun(run=run, queue_error=error)
    began = (last_start(run) or (0,))[0]
    jobs.sort(key=lambda j: (not j.ended, j.state == "RUNNING", j.job == began, j.job))
    return JobAndRun(job=jobs[-1] if jobs else None, run=run)


def _find_number(number: str) -> JobAndRun:
    queue_error = job = None
    try:
        job = find_job(number)
    except UserError as error:
        queue_error = error
    if job is not None:
        if job.uid not in (os.getuid(), None):  # $USER may differ from the kernel's name
            raise UserError(f"Job {job.job} belongs to user {job.user}; samestep shows only yours.")
        return JobAndRun(job=job, run=job.run)
    if logs := list(Path("runs").glob(f"*/slurm-{number}.out")):
        return JobAndRun(run=logs[0].parent.absolute(), queue_error=queue_error)
    raise queue_error or UserError(
        f"Slurm does not know job {number}, and no run in ./runs has its log. Slurm forgets jobs "
        "some minutes after they end: name the run directory, runs/ID, instead."
    )


def has_begun(job: QueuedJob, run: Path) -> bool:
    """Whether the script of a job's present start has begun; Slurm calls it running before."""
    start = last_start(run)
    return start is not None and (start.job, start.restarts) == (job.job, job.restarts)


def ask_to_stop(job: QueuedJob, run: Path) -> bool:
    """Let a running job's ranks save and end; return whether its script had begun to listen.

    Before that, a signal is lost or ends the job.
    """
    deadline = time.monotonic() + _BEGINS_WITHIN_S
    while not (listens := has_begun(job, run)) and time.monotonic() < deadline:
        time.sleep(_POLL_EVERY_S)
    # To the script only: it signals the ranks, waits for them, and does not start again.
    call("scancel", "--batch", "--signal=USR2", job.target)
    return listens


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The training state of a run."""

    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    epochs: int = 0
    loss: float | None = None
    checkpoint_step: int | None = None
    eta_s: float | None = None  # seconds of training that are left at the latest speed
    starts: int = 0
    status: str = ""  # from result.json: completed, stopped or failed; empty while it runs
    why: str = ""
    quiet_s: float | None = None
    """Seconds since the last step or record, of a job that runs; None for any other."""
    damage: str = ""  # what cannot be read, so that the others may be incomplete


def read_progress(run: Path) -> Progress | None:
    """Return a run's progress, or None if it has not begun."""
    (summary, damage), result = read_summary(run), read_object(run / "result.json")
    before = Progress(
        status="" if summary.state in ("running", "killed") else summary.state,
        why=summary.reason or str(result.get("reason", "")),
        damage="; ".join(damage),
    )
    if not summary.starts:
        return before if result or damage else None
    steps, epoch = summary.steps, summary.epoch  # of a stream
    if summary.steps_per_epoch is not None:
        epoch = min(steps // summary.steps_per_epoch + 1, summary.total_epochs or sys.maxsize)
    total = summary.total_steps or 0  # the end of a stream is unknown
    return replace(
        before,
        step=steps,
        total_steps=total,
        epoch=epoch,
        epochs=summary.total_epochs or 0,
        loss=summary.loss,
        checkpoint_step=summary.checkpoint_step,
        eta_s=(total - steps) * summary.step_s if total and summary.step_s else None,
        starts=summary.starts,
    )
