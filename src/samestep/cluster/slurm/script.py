"""The script of a job, or of an array of jobs: text from a pure function of frozen dataclasses."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from samestep.base.run.code_copy import HASHES, Code
from samestep.cluster.slurm.options import JobOptions, assignment, dependency, interface_names
from samestep.cluster.slurm.rank_ends import LATE, STDERR
from samestep.cluster.slurm.restarts import BEGUN, NOT_PASSED, PREFLIGHT
from samestep.launch.ranks.watched import STALLED

MARK = "samestep:"  # a job's comment begins with it; the run directory follows

ARRAY_LINKS = ".array"
"""In an array's folder: `.array/N` is a link to the run of task N. So Slurm's `%a` leads to that
run's log, and samestep finds the run of a task."""

STARTER = ".start.py"
"""In the run directory: what starts a script, so that a hang of it is seen."""

START = """\
# It starts a script as Python does, and lets samestep see where it hangs.
import os
import sys

try:
    from samestep.scripts.watched_script import main
except ImportError:
    if os.environ.get("RANK") == "0":
        why = "samestep is not installed where the ranks run: if they hang, it cannot say where."
        print(f"samestep: {why}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
main()
"""

_PLAIN = re.compile(r"[\w./:@%+,=-]+")

# Ranks import PyTorch for seconds before they handle signals, and Slurm may warn at the start.
_LISTEN_S = 20
_VERDICT_S = 30
_PREFLIGHT_S = 150
_SRUN_OF_ONE = "srun --overlap --nodes=1 --ntasks=1 --kill-on-bad-exit=0 --no-kill"
"""Starts one rank of those that outlive each other, on a node that it names. Each may use what the
job has on the node: the ranks pick a device and share the cores."""


@dataclass(frozen=True, kw_only=True)
class JobScript:
    """Everything that a job script says; paths are absolute."""

    options: JobOptions
    name: str
    title: str
    run: str
    folder: str  # the directory that the command was typed in
    command: tuple[str, ...]
    """What each rank runs: words after the interpreter, such as ("-m", "samestep", …)."""
    kind: Literal["recipe", "script"]
    python: str = "python"  # the interpreter, unless the ranks enter an environment with its own
    venv: str | None = None
    mounts: tuple[str, ...] = ()
    """Folders to mount in a container: of the run, of the command, of the code and the data."""
    code: Code | None = None
    """What is copied into the run directory before the job is submitted."""
    import_from: tuple[str, ...] = ()
    """Folders of the run's copy of the code, in place of those that they were copied from."""
    uncopied: Path | None = None
    """Without a copy, the file that runs: each start checks that it is that of the submit."""

    @property
    def enters_environment(self) -> bool:
        """Whether the ranks run in an environment that has its own interpreter."""
        options = self.options
        return bool(self.venv or options.conda or options.container or options.container_image)


def script_text(job: JobScript) -> str:
    """Return the text of the job script, from `job.sh.j2`."""
    import jinja2  # noqa: PLC0415 - the sandbox and the queue need none

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # noqa: S701 - it is for a shell: `quoted`
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quoted": shlex.quote, "assignment": assignment, "command": _command}
    options, patience_s = job.options, job.options.signal_s
    python = "python" if job.enters_environment else job.python
    enter = _apptainer(job, *(["--nv"] if options.gpus_per_node else []))
    from_python = [shlex.quote(job.python), "-m", "samestep"]
    words = (f"{job.run}/{STARTER}", *job.command) if job.kind == "script" else job.command
    verdict = ["samestep"] if job.enters_environment else from_python
    if options.container_image:  # this script runs outside of it
        verdict = from_python
    return environment.get_template("job.sh.j2").render(
        job=job,
        directives=directives(sbatch_options(job), options.sbatch),
        interfaces=interface_names,
        srun=partial(_srun, job),
        one_rank=f"{_SRUN_OF_ONE} --cpus-per-task={_cpus_per_node(options)}",
        enter=enter,
        samestep=["samestep"] if job.enters_environment else from_python,
        verdict=" ".join([*(_apptainer(job) if options.container else ()), *verdict]),
        rank_python=shlex.quote(python),
        words=[shlex.quote(word) for word in words],
        listen_s=min(_LISTEN_S, patience_s // 2),
        # The verdict and the requeue need some of the time that is left until the limit.
        saves_s=patience_s - min(_VERDICT_S, patience_s // 3),
        preflight_s=str(_PREFLIGHT_S),
        BEGUN=BEGUN,
        LATE=LATE,
        HASHES=HASHES,
        STALLED=STALLED,
        STDERR=STDERR,
        PREFLIGHT=PREFLIGHT,
        NOT_PASSED=NOT_PASSED,
    )


def sbatch_options(job: JobScript) -> dict[str, str | None]:
    """Return the options for sbatch with their values; None for those without a value."""
    options = job.options
    values = {
        "job-name": job.name,
        "comment": MARK + job.run,
        "chdir": job.folder,
        "output": options.output or f"{job.run.replace('%', '%%')}/slurm-%j.out",
        "open-mode": "append",
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "nodes": options.nodes,
        # Slurm keeps the first start's number of tasks, which may not fit on the nodes after a
        # requeue. So for a range, sbatch gets what each node needs, and srun gets the tasks.
        "ntasks-per-node": None if options.has_range else _tasks_per_node(options),
        "mincpus": _cpus_per_node(options) if options.has_range else None,
        "cpus-per-task": _cpus_per_task(options),
        "gpus-per-node": options.gpus_per_node or None,
        "mem": options.mem,
        "time": options.time,
        "signal": f"B:USR1@{options.signal_s}",
        "dependency": ",".join(map(dependency, options.after)) or None,
    }
    texts: dict[str, str | None] = {name: str(value) for name, value in values.items() if value}
    if options.after:
        texts["kill-on-invalid-dep"] = "yes"
    if options.elastic is not None:  # the job outlives a node
        texts["no-kill"] = None
    return texts | {"requeue" if options.requeue else "no-requeue": None}


def array_text(jobs: Mapping[int, JobScript], folder: Path, at_once: int | None) -> str:
    """Return the script of an array, of which each task runs the job script of its own run."""
    job = next(iter(jobs.values()))
    links = shlex.quote(str(folder / ARRAY_LINKS))
    return "\n".join([
        "#!/usr/bin/env bash",
        f"# {len(jobs)} runs as one job array: {job.title}",
        "# Written by samestep. Each task runs the job script of its own run.",
        *directives(array_options(jobs, folder, at_once), job.options.sbatch),
        f'exec bash {links}/"$SLURM_ARRAY_TASK_ID"/job.sbatch',
        "",
    ])  # fmt: skip


def array_options(
    jobs: Mapping[int, JobScript], folder: Path, at_once: int | None
) -> dict[str, str | None]:
    """Return the options of an array for sbatch: those of its jobs, which differ in their runs."""
    job = next(iter(jobs.values()))
    links = str(folder / ARRAY_LINKS)
    tasks = ",".join(map(str, jobs)) + (f"%{at_once}" if at_once else "")
    changes = {"array": tasks, "comment": f"{MARK}{links}/%a"}
    if not job.options.output:
        changes["output"] = f"{links.replace('%', '%%')}/%a/slurm-%j.out"
    return sbatch_options(job) | changes


def directives(options: Mapping[str, str | None], more: Sequence[str]) -> list[str]:
    """Return the lines of a script that give sbatch these options, and more as they stand."""
    words = []
    for name, value in options.items():
        option = f"--{name}" if value is None else f"--{name}={value}"
        if value and not _PLAIN.fullmatch(value):  # a space would end it, # begin a comment
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            option = f'--{name}="{escaped}"'
        words.append(option)
    return [f"#SBATCH {option}" for option in (*words, *more)]


def _tasks_per_node(options: JobOptions) -> int:
    return 1 if options.launcher == "torchrun" else options.ranks_per_node


def _cpus_per_task(options: JobOptions) -> int | None:
    # One torchrun has the cores of all its ranks.
    return options.cpus_per_task if options.launcher == "srun" else _cpus_per_node(options)


def _cpus_per_node(options: JobOptions) -> int:
    return (options.cpus_per_task or 1) * options.ranks_per_node


def _srun(job: JobScript, *flags: str) -> list[str]:
    options = job.options
    words = ["srun", *flags]
    if options.has_range:
        words.append('--nodes="$SLURM_JOB_NUM_NODES"')
        words.append(f"--ntasks-per-node={_tasks_per_node(options)}")
    if cpus := _cpus_per_task(options):  # srun does not inherit it from sbatch
        words.append(f"--cpus-per-task={cpus}")
    if options.container_image:  # an option of Pyxis, which extends srun
        mounts = ",".join(f"{folder}:{folder}" for folder in job.mounts)
        words.append(f"--container-image={shlex.quote(options.container_image)}")
        words += [f"--container-mounts={shlex.quote(mounts)}"] if mounts else []
        words.append(f"--container-workdir={shlex.quote(job.folder)}")
    return words


def _apptainer(job: JobScript, *flags: str) -> list[str]:
    if not job.options.container:
        return []
    binds = [f"--bind={shlex.quote(folder)}" for folder in job.mounts]
    return ["apptainer", "exec", *flags, *binds, shlex.quote(job.options.container)]


def _command(groups: list[list[str]], width: int = 96) -> str:
    """Join words to lines of at most `width` characters, unless a word is longer."""
    lines: list[str] = []
    for first, *words in filter(None, groups):
        lines.append(first)
        for word in words:
            if len(lines[-1]) + 1 + len(word) <= width:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    return " \\\n  ".join(lines)
