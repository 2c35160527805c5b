"""`samestep slurm submit`: submit a recipe, a run or any script as a job."""

import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from samestep.base.errors import UserError, did_you_mean
from samestep.base.flags import InShell
from samestep.base.run.code_copy import CODE, kept_code
from samestep.base.run.directory import is_run
from samestep.base.run.files import shown_path, write_text
from samestep.cluster.slurm import submission
from samestep.cluster.slurm.checks import advice, check_ranks
from samestep.cluster.slurm.options import (
    OPTIONS,
    JobOptions,
    UncheckedOptions,
    apply_flags,
    options_before,
)
from samestep.cluster.slurm.script import JobScript, array_text, script_text
from samestep.core.recipes import RECIPES
from samestep.shell.cli import example_text, show_general_help
from samestep.shell.commands.forms import Form, Switch, parse, show_notes
from samestep.shell.commands.target import cut_at_dashes, target_first, with_value

_GROUPS = {
    "job_name": "job",
    "nodes": "resources",
    "output": "job",
    "requeue": "restarts",
    "after": "job",
    "module": "environment",
    "launcher": "start of the ranks",
    "snapshot": "code",
    "sbatch": "job",
    "array": "submitting",
}
"""A group of `--help` begins with this option."""
_ALL_CHECKED = 200
"""Of an array with more tasks, the flags of the first are checked."""
_MARK = b"# Written by `samestep slurm submit`"
"""In the head of each script that is written here."""
_USAGE = """\
usage: samestep slurm submit TARGET [flags] [-- arguments of the training or the script]

Submit TARGET as a job. It is a recipe, a recipe file, the directory of a run to
continue, or any Python script. `samestep slurm submit TARGET --help` shows all
flags.

Put values that stay the same into the table [slurm] of samestep.toml: in this
folder or one above it, or in ~/.config/samestep.
"""


@dataclass(frozen=True, kw_only=True)
class SubmitFlags(UncheckedOptions):
    """Submit it as a job. Arguments of the training or of the script follow `--`."""

    array: Annotated[str | None, InShell("TASKS")] = None
    """Submit a job array, each task with its own run directory: 0-9, or 0-9%2 for two at a time. %a
    in the arguments stands for the task's number: --array 0-4 -- --seed %a."""
    as_recipe: Switch = False
    """Train what a script gives to its Trainer, as `samestep train` does, instead of
    running the script. Its own arguments follow a second `--`."""
    dry_run: Switch = False
    """Print the job's script instead of submitting it."""
    script: Annotated[Path | None, InShell("FILE", short=("-o",))] = None
    """Write the job's script to a file instead of submitting it; edit it and use sbatch."""


FORM = Form(
    verb="slurm submit",
    kind=SubmitFlags,
    examples=(
        "slurm submit spiral --nodes 2 --gpus-per-node 8 --time 02:00:00 -- --epochs 50",
        "slurm submit spiral --nodes 1-4 --gpus-per-node 8 --time 60 -- --virtual-ranks 32",
    ),
)


def main(arguments: list[str]) -> int:
    """Submit a job, or write or print its script."""
    show_general_help(arguments, f"{_USAGE}\n{example_text(*FORM.examples)}")
    target, *flags = target_first(arguments, SubmitFlags)
    if target.startswith("-"):
        raise UserError(f"Name what to submit before {target}: a recipe, a run or a script.")
    flags, words = cut_at_dashes(flags)
    flags = with_value(flags, "--elastic", "[0-9].*", "auto")
    _check_flags(target, flags)
    # A recipe's name wins over a folder of this name.
    defaults, files = options_before(None if target in RECIPES else Path(target))
    default = SubmitFlags(**vars(defaults))
    command: SubmitFlags = parse(FORM, flags, target, default, _GROUPS)
    options = apply_flags(defaults, command, files)
    if command.array is not None:
        return _submit_array(target, words, options, command)
    workload = submission.find_workload(target, words, list(RECIPES), as_recipe=command.as_recipe)
    _check_training(workload, options, target, dry_run=command.dry_run)
    options = submission.with_home_expanded(options)
    job = submission.make_script(workload, options, Path.cwd())
    show_notes([*advice(options, workload.kind), *_note_on_trainer(workload)])
    if command.dry_run or command.script is not None:
        return _keep(job, command)
    number, script = submission.submit(job)
    asks = options.size + (f", --time {options.time}" if options.time else "")
    if files == [Path(target, OPTIONS)] and vars(options) == vars(defaults):
        asks += ", as its job before"
    code = f"code    {job.code.text}\n" if job.code else ""
    if not code and kept_code(workload.run):  # the user's files may be others by now
        code = f"code    the run's own copy: {shown_path(workload.run / CODE)}\n"
    sys.stdout.write(
        f"job     {number}\n"
        f"run     {shown_path(workload.run)}\n"
        f"script  {shown_path(script)}\n{code}"
        f"asks    {asks}\n\n"
        f"Watch it with: samestep slurm status {number}\n"
    )
    return 0


def _note_on_trainer(workload: submission.Workload) -> list[str]:
    if not submission.runs_trainer(workload):
        return []
    name = f"{workload.name}.py"
    tip = f"With --as-recipe samestep trains its model and data, as `samestep train {name}` does."
    return [f"Each rank runs {name} with its own Trainer. {tip}"]


def _check_training(
    workload: submission.Workload, options: JobOptions, target: str, *, dry_run: bool = False
) -> None:
    """Check a training's flags now, not after hours in the queue.

    A dry run of a run, which may be a stranger's, runs no code of it.
    """
    if workload.kind == "recipe":
        from samestep.core.session.declared import known_of_run  # noqa: PLC0415
        from samestep.shell.commands.train import parse  # noqa: PLC0415 - it imports torch

        is_theirs = dry_run and target not in RECIPES and is_run(Path(target))
        if is_theirs and (of_run := known_of_run(Path(target))):
            check_ranks(options, of_run[0])
            return

        # Relative paths in the flags hold for the job too: it runs in this folder.
        _, request = parse(list(workload.command[3:]))
        check_ranks(options, request.settings)


def _submit_array(target: str, words: list[str], options: JobOptions, command: SubmitFlags) -> int:
    tasks, at_once = submission.read_array(command.array or "")
    if command.script is not None:
        raise UserError("--array writes a script per task: -o cannot write them to one file.")
    if any("%a" in word for flag, word in pairwise(["", *words]) if "--run-dir" in flag + word):
        raise UserError("--run-dir is the folder of all tasks (task-N): it cannot have %a.")
    options, folder = submission.with_home_expanded(options), None
    jobs: dict[int, JobScript] = {}
    for task in tasks:
        workload = submission.find_workload(
            target,
            [word.replace("%a", str(task)) for word in words],
            [*RECIPES],
            as_recipe=command.as_recipe,
        )
        if is_run(workload.run):
            raise UserError(f"--array starts new runs, and {shown_path(workload.run)} exists.")
        folder = folder or workload.run
        workload = workload.in_run(folder / f"task-{task}")
        if workload.kind == "recipe" and len(tasks) > 1 and not any("%a" in word for word in words):
            raise UserError(
                f"--array {command.array}: no argument has %a, so all tasks would be the same.",
                remedy="Write %a where the task's number goes: -- --seed %a.",
            )
        if len(jobs) < _ALL_CHECKED:
            _check_training(workload, options, target)
        jobs[task] = submission.make_script(workload, options, Path.cwd())
    assert folder is not None
    show_notes([*advice(options, workload.kind), *_note_on_trainer(workload)])
    if command.dry_run:
        text = array_text(jobs, folder, at_once)
        first = jobs[tasks[0]]
        sys.stdout.write(f"{text}\n# {first.run}/job.sbatch:\n{script_text(first)}")
        return 0
    number = submission.submit_array(jobs, folder, at_once)
    sys.stdout.write(
        f"jobs    {number}_[{command.array}]\n"
        f"runs    {shown_path(folder)}/task-*\n\n"
        "Watch them with: samestep slurm status\n"
    )
    return 0


def _check_flags(target: str, flags: list[str]) -> None:
    names = {
        "help",
        "no-preflight",
        "no-requeue",
        "no-snapshot",
        *(field.name.replace("_", "-") for field in fields(SubmitFlags)),
    }
    for word in flags:
        name = word.removeprefix("--").partition("=")[0].replace("_", "-")
        if word.startswith("--") and name not in names:
            raise UserError(
                f"--{name} is not a flag of a job. {did_you_mean(name, names)}If it belongs to the "
                f"training or the script, put it after `--`: samestep slurm submit {target} … -- "
                f"--{name} …"
            )


def _keep(job: JobScript, command: SubmitFlags) -> int:
    text = script_text(job)
    file = command.script
    if file is not None and file.exists() and not (file.is_file() and _MARK in file.read_bytes()):
        raise UserError(f"--script {file} exists and is not samestep's. Name another file.")
    if command.script is None:
        sys.stdout.write(text)
        if not Path(job.run).is_dir():
            sys.stderr.write(
                f"Slurm opens its log in {job.run}, where the code is copied, too; `-o FILE` "
                "writes the script and prepares that directory.\n"
            )
        return 0
    submission.fill_run(job)
    write_text(command.script, text)
    if command.dry_run:
        sys.stdout.write(text)
    code = f"The code is copied: {job.code.text}\n" if job.code else ""
    sys.stderr.write(f"{code}Submit it with: sbatch {command.script}\n")
    return 0
