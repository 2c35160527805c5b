"""Submit many runs as one Slurm job array, with a limit on how many run at once.

Each task runs the job script of its own run. `.array/N` in the array's folder is a link to the run
of task N, so Slurm's `%a` leads to that run's log, and samestep finds the run of a task.
"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.run.files import cannot_write, write_text
from samestep.cluster.slurm.queue import my_jobs
from samestep.cluster.slurm.script import MARK, JobScript, directives, sbatch_options
from samestep.cluster.slurm.submission import check_with_slurm, hand_in, prepare

_LINKS = ".array"
_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::([1-9]\d{0,6}))?)?")
_MOST = 10_000


def read_array(text: str) -> tuple[list[int], int | None]:
    """Return the tasks of `0-9:2,12%4`, sbatch's form of an array, and how many run at a time."""
    parts, limits, limit = text.partition("%")
    found = [_PART.fullmatch(part) for part in parts.split(",")]
    ranges = [range(int(m[1]), int(m[2] or m[1]) + 1, int(m[3] or 1)) for m in found if m]
    if (number := sum(map(len, ranges))) > _MOST:
        raise UserError(
            f"--array {text} has {number:,} tasks, each with a run of its own; at most {_MOST:,} "
            "can be submitted at once."
        )
    tasks = [task for numbers in ranges for task in numbers]
    is_limit = limit.isdecimal() and int(limit) > 0 if limits else True
    if not (is_limit and all(found) and all(ranges) and len({*tasks}) == len(tasks)):
        raise UserError(
            f"--array {text} should be the numbers of tasks: 0-9, 1,3,5 or 0-99:10, each once; "
            "0-9%2 runs two at a time."
        )
    return tasks, int(limit) if limits else None


def array_text(jobs: Mapping[int, JobScript], folder: Path, at_once: int | None) -> str:
    """Return the script that each task of the array runs first."""
    job = next(iter(jobs.values()))
    links = shlex.quote(str(folder / _LINKS))
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {len(jobs)} runs as one job array: {job.title}",
        "# Written by samestep. Each task runs the job script of its own run.",
        *directives(_options(jobs, folder, at_once), job.options.sbatch),
        f'exec bash {links}/"$SLURM_ARRAY_TASK_ID"/job.sbatch',
        "",
    ])  # fmt: skip


def submit_array(jobs: Mapping[int, JobScript], folder: Path, at_once: int | None) -> int:
    """Submit the jobs of runs as tasks of one array, by their numbers; return the array's number.

    Raises UserError if Slurm refuses it; the runs that were made for it are removed then.
    """
    first = next(iter(jobs.values()))
    check_with_slurm(first.options)
    is_new = not folder.exists()
    made = [Path(job.run) for job in jobs.values() if not Path(job.run).exists()]
    queue = my_jobs() if len(made) < len(jobs) else []
    try:
        for job in jobs.values():
            prepare(job, queue)
        _link(jobs, folder / _LINKS)
        script = folder / "array.sbatch"
        write_text(script, array_text(jobs, folder, at_once))
        return hand_in(_options(jobs, folder, at_once), first.options.sbatch, script, made)
    except UserError:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _link(jobs: Mapping[int, JobScript], links: Path) -> None:
    try:
        links.mkdir(exist_ok=True)
        for task, job in jobs.items():
            (links / str(task)).unlink(missing_ok=True)
            (links / str(task)).symlink_to(os.path.relpath(job.run, links))
    except OSError as error:
        raise cannot_write(links, error) from error


def _options(
    jobs: Mapping[int, JobScript], folder: Path, at_once: int | None
) -> dict[str, str | None]:
    job = next(iter(jobs.values()))
    links = str(folder / _LINKS)
    tasks = ",".join(map(str, jobs)) + (f"%{at_once}" if at_once else "")
    own = {"array": tasks, "comment": f"{MARK}{links}/%a"}
    if not job.options.output:
        own["output"] = f"{links.replace('%', '%%')}/%a/slurm-%j.out"
    return sbatch_options(job) | own
