"""Hand a job in: check it against the cluster, write its script into the run directory, sbatch."""

import dataclasses
import itertools
import os
import re
import shlex
import sys
from pathlib import Path

from samestep.errors import UserError
from samestep.run.files import cannot_write, write_text
from samestep.slurm.defaults import OPTIONS, keep_options
from samestep.slurm.options import ENVIRONMENTS, JobOptions, refuse_secret_flags
from samestep.slurm.partitions import check_partitions
from samestep.slurm.preflight import check_after, check_place
from samestep.slurm.programs import ProgramError, call
from samestep.slurm.queue import my_jobs
from samestep.slurm.script import JobScript, sbatch_options, script_text
from samestep.slurm.workload import Workload

# The directive → what sbatch's refusals speak of when they mean it.
_MEANS = {
    **{word: word for word in ("partition", "account", "qos")},
    "time": r"time limit|time specification",
    "nodes": r"node count|more processors|too many nodes",
    "mem": "memory",
    "dependency": "dependency",
    "gpus-per-node": "gres|gpu|tres",
    "cpus-per-task": "cpu count|cpus",
    **dict.fromkeys(("ntasks-per-node", "mincpus"), "node configuration"),
}

_PARTITION = re.compile(r"(?:--partition[= ]|-p ?)(\S+)")
# Of one run there is one job; and who submits does not wait for its end.
_NOT_FOR_A_RUN = ("SBATCH_ARRAY_INX", "SBATCH_WAIT")


def make_script(workload: Workload, options: JobOptions, folder: Path) -> JobScript:
    """Return the job that runs a workload with these options, from this interpreter.

    Raises:
        UserError: the environment is none, or the command holds a secret.
    """
    refuse_secret_flags(workload.command)
    check_place(options, workload.kind)
    venv = options.venv
    if not any(getattr(options, name) for name in ENVIRONMENTS) and sys.prefix != sys.base_prefix:
        venv = sys.prefix
    in_container = options.container or options.container_image
    return JobScript(
        options=options,
        name=options.job_name or workload.name,
        title=f"{workload.name}, {workload.kind}: {options.size}.",
        run=str(workload.run),
        folder=str(folder.absolute()),
        command=workload.command,
        kind=workload.kind,
        python=sys.executable,
        venv=venv and str(Path(venv).absolute()),
        mounts=_mounts(workload, folder) if in_container else (),
    )


def _mounts(workload: Workload, folder: Path) -> tuple[str, ...]:
    """Return the folders that the ranks need in a container, none of them below another."""
    words = [word for text in workload.command for word in text.split("=", 1)]
    data = [
        folder / value
        for flag, value in itertools.pairwise(words)
        if flag.replace("_", "-") == "--data-dir" and (folder / value).is_dir()
    ]
    files = [Path(word).parent for word in words if Path(word).is_absolute() and word[-3:] == ".py"]
    wanted = {path.absolute() for path in (folder, workload.run, *files, *data)}
    return tuple(sorted(str(path) for path in wanted if not wanted & set(path.parents)))


def submit(job: JobScript) -> tuple[int, Path]:
    """Hand a job in; return its number and the script, which lies in the run directory.

    Raises:
        UserError: there is no Slurm, the job is impossible on it, or it was refused.
    """
    text = script_text(job)
    named = (_PARTITION.match(option) for option in job.options.sbatch)
    partitions = [job.options.partition, *(match[1] for match in named if match)]
    partitions.append(os.environ.get("SBATCH_PARTITION"))
    check_partitions(job.options, next(filter(None, partitions), None))
    check_after(job.options)
    run = Path(job.run)
    if known := run.exists():
        _refuse_beside_another(run, job.options)
    script = run / "job.sbatch"
    make_folder(run)
    write_text(script, text)
    keep_options(run, job.options)
    # Slurm takes the shell's SBATCH_* over what the script says, and options that are typed over
    # both: what was asked for this job has to win.
    options = sbatch_options(job).items()
    words = [f"--{name}" + ("" if value is None else f"={value}") for name, value in options]
    words += [word for option in job.options.sbatch for word in shlex.split(option)]
    try:
        answer = call("sbatch", "--parsable", *words, str(script), without=_NOT_FOR_A_RUN)
    except ProgramError as error:
        if not known:
            for name in (script.name, OPTIONS):
                (run / name).unlink()
            run.rmdir()
        raise _refused(error, text) from error
    return int(answer.strip().split(";")[0]), script


def _refuse_beside_another(run: Path, options: JobOptions) -> None:
    """Refuse a second job on a run, unless it comes after those that have not ended."""
    after = {int(re.split("[:_]", text)[0]) for text in options.after}
    going = [job for job in my_jobs(run) if not job.ended]
    if {job.job for job in going} <= after:
        return
    first = min(going, key=lambda job: job.job in after)
    wait = " ".join(f"--after {job.job}:any" for job in going)
    raise UserError(
        f"Job {first.job} of this run has not ended ({first.state}), and two jobs would write to "
        f"{run} at once. Stop it first (samestep slurm cancel {first.job}), or let the new job "
        f"wait for it: {wait}."
    )


def make_folder(run: Path) -> None:
    """Make the run directory: Slurm opens the job's log in it."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(run, error) from error


def _refused(error: ProgramError, script: str) -> UserError:
    """Return sbatch's own words with the line of the script that they mean."""
    lines = script.splitlines()
    meant = [word for word, what in _MEANS.items() if re.search(what, error.said, re.IGNORECASE)]
    found = (
        f"Line {number}: {line}"
        for directive in meant
        for number, line in enumerate(lines, 1)
        if line.startswith(f"#SBATCH --{directive}=")
    )
    where = "The directives are the #SBATCH lines that `samestep slurm submit … --dry-run` prints."
    return UserError(f"sbatch refused the job:\n{error.said}\n{next(found, where)}")


def with_home_expanded(options: JobOptions) -> JobOptions:
    """Return options with `~` in their paths written out."""
    paths = {name: getattr(options, name) for name in ("venv", "container", "output")}
    # They are strings, perhaps with %j.
    changes = {name: path and os.path.expanduser(path) for name, path in paths.items()}  # noqa: PTH111
    return dataclasses.replace(options, **changes)
