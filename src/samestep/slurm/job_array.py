"""Submit many runs as one job array: Slurm starts them, at most so many at a time.

Each task runs the job script of a run of its own. Links in the array's folder, named after the
tasks, lead to the runs, so that Slurm itself can name a task's log and samestep its run.
"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from samestep.errors import UserError
from samestep.run.files import cannot_write, write_text
from samestep.slurm.queue import my_jobs
from samestep.slurm.script import MARK, JobScript, directives, sbatch_options
from samestep.slurm.submission import check_with_slurm, hand_in, prepare

_LINKS = ".array"
_RANGES = re.compile(r"(\d+(?:-\d+(?::[1-9]\d*)?)?(?:,(?!%|$)|(?=%|$)))+(?:%([1-9]\d*))?")


def read_array(text: str) -> tuple[list[int], int | None]:
    """Return the tasks of `0-9:2,12%4`, sbatch's form of an array, and how many run at a time."""
    match = _RANGES.fullmatch(text)
    ranges = []
    for part in text.partition("%")[0].split(",") if match else ():
        first, _, rest = part.partition("-")
        last, _, step = rest.partition(":")
        ranges.append(range(int(first), int(last or first) + 1, int(step or 1)))
    tasks = [task for numbers in ranges for task in numbers]
    if match is None or not all(ranges) or len({*tasks}) < len(tasks):
        raise UserError(
            f"--array {text} should be the numbers of tasks: 0-9, 1,3,5 or 0-99:10, each once; "
            "0-9%2 runs two at a time."
        )
    return tasks, int(match[2]) if match[2] else None


def task_folder(folder: Path, task: int) -> Path:
    """Return the run directory of a task where nothing else names it."""
    return folder / f"task-{task}"


def with_task(words: list[str], task: int) -> list[str]:
    """Return a command of one task: `%a` is its number, as in Slurm's own file names."""
    return [word.replace("%a", str(task)) for word in words]


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
    for job in jobs.values():
        prepare(job, queue)
    try:
        (folder / _LINKS).mkdir(exist_ok=True)
        for task, job in jobs.items():
            link = folder / _LINKS / str(task)
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(job.run, link.parent))
    except OSError as error:
        raise cannot_write(folder / _LINKS, error) from error
    script = folder / "array.sbatch"
    write_text(script, array_text(jobs, folder, at_once))
    try:
        return hand_in(_options(jobs, folder, at_once), first.options.sbatch, script, made)
    except UserError:
        if is_new:
            shutil.rmtree(folder)
        raise


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
