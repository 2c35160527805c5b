"""Hand a job in: check it against the cluster, write its script into the run directory, sbatch."""

import dataclasses
import difflib
import os
import re
import sys
from pathlib import Path

from samestep.errors import UserError
from samestep.files import cannot_write, write_text
from samestep.slurm.options import JobOptions, seconds
from samestep.slurm.script import Job, write_script
from samestep.slurm.target import Target
from samestep.slurm.tools import ToolError, call

# What sbatch's refusals speak of → the directive that they mean.
_MEANS = (
    (r"partition", "partition"),
    (r"account", "account"),
    (r"qos", "qos"),
    (r"time limit|time specification", "time"),
    (r"node count|more processors|too many nodes", "nodes"),
    (r"memory", "mem"),
    (r"dependency", "dependency"),
    (r"gres|gpu|tres", "gpus-per-node"),
    (r"cpu count|cpus", "cpus-per-task"),
    (r"node configuration", "ntasks-per-node"),
)


def make_job(target: Target, options: JobOptions, folder: Path) -> Job:
    """Return the job that runs a target with these options, from this interpreter."""
    venv = options.venv
    if venv is not None and not (Path(venv) / "bin" / "activate").is_file():
        raise UserError(f"--venv {venv}: there is no bin/activate in it. Name the environment.")
    in_venv = sys.prefix != sys.base_prefix
    if venv is None and not options.conda and not options.container and in_venv:
        venv = sys.prefix
    if venv is not None:
        venv = str(Path(venv).absolute())
    entered = bool(venv or options.conda)
    container = ("apptainer", "exec", options.container) if options.container else ()
    own = ("samestep",) if entered else (sys.executable, "-m", "samestep")
    size = f"{options.nodes} node{'s' * (options.nodes > 1)} × {options.ranks_per_node}"
    return Job(
        options=options,
        name=options.job_name or target.name,
        title=f"{target.name}, {target.kind}: {size} rank{'s' * (options.ranks_per_node > 1)}.",
        run=str(target.run),
        folder=str(folder.absolute()),
        command=target.command,
        kind=target.kind,
        python=sys.executable,
        venv=venv,
        own=(*container, "samestep") if container else own,
    )


def submit(job: Job) -> tuple[int, Path]:
    """Hand a job in; return its number and the script, which lies in the run directory.

    Raises:
        UserError: there is no Slurm, the job is impossible on it, or it was refused.
    """
    check_sizes(job.options)
    run = Path(job.run)
    known = run.exists()
    script = run / "job.sbatch"
    make_folder(run)
    write_text(script, write_script(job))
    try:
        answer = call("sbatch", "--parsable", str(script))
    except ToolError as error:
        if not known:
            script.unlink()
            run.rmdir()
        raise _refused(error, write_script(job)) from error
    return int(answer.strip().split(";")[0]), script


def make_folder(run: Path) -> None:
    """Make the run directory: Slurm opens the job's log in it."""
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(run, error) from error


def check_sizes(options: JobOptions) -> None:
    """Refuse what this cluster can never give.

    Raises:
        UserError: the partition is unknown, or no nodes of it are that many or that large.
    """
    rows = [line.split("|") for line in call("sinfo", "-h", "-o", "%R|%D|%c|%l|%G").splitlines()]
    names = sorted({row[0] for row in rows})
    if options.partition and options.partition not in names:
        close = difflib.get_close_matches(options.partition, names, n=1)
        hint = f"Did you mean {close[0]!r}? " if close else ""
        raise UserError(
            f"There is no partition {options.partition!r} here. {hint}"
            f"The partitions are: {', '.join(names)}."
        )
    default = next((line.rstrip("*") for line in call("sinfo", "-h", "-o", "%P").split()
                    if line.endswith("*")), None)  # fmt: skip
    name = options.partition or default
    mine = [row for row in rows if row[0] == name]
    if not mine:
        return
    nodes = sum(int(row[1]) for row in mine)
    if options.nodes > nodes:
        raise UserError(f"--nodes {options.nodes}: partition {name} has {nodes} in all.")
    _check_gpus(options, name, [row[4] for row in mine])
    cores = max(int(row[2].rstrip("+")) for row in mine)
    wanted = options.ranks_per_node * (options.cpus_per_task or 1)
    if wanted > cores:
        raise UserError(
            f"{options.ranks_per_node} ranks a node × {options.cpus_per_task or 1} cores = {wanted}"
            f" cores, and the largest node of partition {name} has {cores}. Lower "
            "--ntasks-per-node or --cpus-per-task."
        )
    limit = mine[0][3]
    if options.time and limit not in ("infinite", "n/a") and seconds(options.time) > seconds(limit):
        raise UserError(f"--time {options.time}: partition {name} allows {limit}.")


def _check_gpus(options: JobOptions, name: str | None, resources: list[str]) -> None:
    if not options.gpus_per_node:
        return
    most = 0
    for text in resources:
        counts = re.findall(r"gpu(?::[^:,(]+)*:([0-9]+)", text)
        most = max(most, sum(map(int, counts)))
    if options.gpus_per_node > most:
        raise UserError(
            f"--gpus-per-node {options.gpus_per_node}: the nodes of partition {name} have "
            f"{most or 'no'} GPUs each, by what sinfo says. Choose another --partition or fewer."
        )


def _refused(error: ToolError, script: str) -> UserError:
    """Return sbatch's own words with the line of the script that they mean."""
    lines = script.splitlines()
    for pattern, directive in _MEANS:
        if re.search(pattern, error.said, re.IGNORECASE):
            found = [(n, line) for n, line in enumerate(lines, 1)
                     if line.startswith(f"#SBATCH --{directive}=")]  # fmt: skip
            if found:
                number, line = found[0]
                return UserError(f"sbatch refused the job:\n{error.said}\nLine {number}: {line}")
    return UserError(
        f"sbatch refused the job:\n{error.said}\nThe directives are the #SBATCH lines that "
        "`samestep slurm submit … --dry-run` prints."
    )


def without_resolved(options: JobOptions) -> JobOptions:
    """Return options with `~` in their paths written out."""
    changes = {
        name: os.path.expanduser(value)  # noqa: PTH111 - a string, perhaps with %j
        for name in ("venv", "container", "output")
        if (value := getattr(options, name))
    }
    return dataclasses.replace(options, **changes)
