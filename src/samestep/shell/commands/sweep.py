"""`samestep sweep`: one recipe with many settings, each training a run of its own."""

import signal
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.base import flags
from samestep.base.errors import UserError
from samestep.base.file_kinds import trainer_of
from samestep.base.run.directory import is_run
from samestep.base.run.files import shown_path
from samestep.base.settings import Settings
from samestep.base.words import count
from samestep.cluster.slurm import submission
from samestep.cluster.slurm.checks import advice, check_ranks
from samestep.cluster.slurm.options import UncheckedOptions, apply_flags, options_before
from samestep.cluster.slurm.queue import my_jobs
from samestep.cluster.sweeping import sweep_plan
from samestep.cluster.sweeping.side_by_side import EndedTraining, hold_sweep, num_at_once, run_here
from samestep.core.recipes import RECIPES
from samestep.shell.api.arguments import check_positive
from samestep.shell.api.sweeps import check_trainings, sweep
from samestep.shell.cli import HELP
from samestep.shell.commands.forms import Form, Switch, kind_of, parse, show_notes
from samestep.shell.commands.target import (
    canonical_flags,
    cut_at_dashes,
    parse_target,
    target_first,
)

if TYPE_CHECKING:
    from samestep.core.session.request import Request

_ALL_CHECKED = 200
"""Of more points, each value is checked, but not each combination."""


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Train {} once for each combination of values.

    Any setting or option may have several values, separated by commas. Each training has its own
    directory in the sweep's folder, --run-dir. Repeat the command to continue an interrupted sweep.
    Arguments of a script that builds a Trainer follow after `--`.
    """

    nproc: int = 1
    """Ranks of each training."""
    slurm: Switch = False
    """Submit the trainings as one job array; flags of `samestep slurm submit` follow after `--`."""
    yes: Switch = False
    """Do not ask before more than 1,000 trainings."""


FORM = Form(
    verb="sweep",
    kind=kind_of(sweep, SweepFlags, left_out=("what", "folder", "quiet")),
    examples=(
        "sweep spiral --lr 1e-3,3e-3,1e-2 --epochs 3",
        'sweep spiral --lr 1e-3,1e-2 --hidden-dims "64 32","128 64" --at-once 2',
        "sweep spiral --lr 1e-3,3e-3,1e-2 --slurm --at-once 2 -- --gpus-per-node 8 --time 60",
    ),
    settings=True,
)


def main(arguments: list[str]) -> int:
    """Begin a sweep, or continue it; return the exit code."""
    of_sweep, after = cut_at_dashes(arguments)
    if not of_sweep or HELP & {*of_sweep}:
        parse_target(FORM, arguments)
    target, *words = canonical_flags(target_first(of_sweep, FORM.kind))
    if target.startswith("-"):
        raise UserError(f"Name what to sweep before {target}: a recipe or a recipe file.")
    if target not in RECIPES and is_run(Path(target)):
        raise UserError(
            f"{target} is a run, and a sweep starts new ones. Name its recipe, and reuse its "
            f"settings with --config {target}/settings.toml."
        )
    mine, of_trainings = _split(words)
    shared, axes = sweep_plan.read_axes(of_trainings)
    command = parse(FORM, mine, target)
    check_positive(at_once=command.at_once, sample=command.sample, nproc=command.nproc)
    of_job, script_args = cut_at_dashes(after) if command.slurm else ([], after)
    if command.slurm and command.nproc > 1:
        raise UserError("--nproc is for one machine; a job takes --ntasks-per-node after `--`.")
    if command.optuna and command.slurm:
        raise UserError("--optuna needs earlier results, but --slurm submits all at once.")
    _ask(sweep_plan.num_points(axes, command.sample), sure=command.yes)
    plan = _plan(target, shared, axes, command, script_args)
    chooser = sweep_plan.OptunaChoice(plan) if command.optuna else None
    settings = _check(plan, command.nproc)
    if command.slurm:
        return _submit_all(plan, of_job, command.at_once, settings)
    device, oversubscribe = settings.device, settings.oversubscribe
    at_once, gpus = num_at_once(command.at_once, command.nproc, device, oversubscribe=oversubscribe)
    plan.begin()
    folder = shown_path(plan.folder)
    done = sum(plan.status(name) == "completed" for name in plan.points)
    before = f", {done:,} of them completed before" if done else ""
    number = count(plan.num_trainings, "training")
    sys.stdout.write(f"sweep    {folder}: {number}, {at_once} at a time{before}\n")
    sys.stdout.flush()

    def start(name: str) -> tuple[list[str], dict[str, str]]:
        return _train(plan, plan.points[name], plan.run_dir(name)), {}

    code = run_here(plan, start, at_once, _print_end, gpus=gpus, chooser=chooser)
    _say_end(code, folder)
    return code


def _say_end(code: int, folder: str) -> None:
    if code == 128 + signal.SIGKILL:
        sys.stdout.write("Killed; run the same command to resume from the last checkpoints.\n")
    elif code > 128:
        sys.stdout.write("Stopped; all trainings are saved. Run the same command to resume.\n")
    else:
        sys.stdout.write(f"Rank them with: samestep runs {folder} --sort metric\n")


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the verb's own flags from those of the trainings, to which --nproc belongs, too."""
    own = {f"--{field.name.replace('_', '-')}" for field in fields(FORM.kind)}
    mine: list[str] = []
    of_trainings: list[str] = []
    part = of_trainings
    for word in words:
        if word.startswith("--"):
            flag = word.partition("=")[0].replace("_", "-")
            part = mine if flag in own else of_trainings
        part.append(word)
    return mine, of_trainings


def _plan(
    target: str,
    shared: list[str],
    axes: dict[str, tuple[str, ...]],
    command: Any,
    script_args: list[str],
) -> sweep_plan.SweepPlan:
    for flag in ("resume", "allow-change", "recipe-of-run", "report", "mirror"):
        if f"--{flag}" in shared or flag in axes:
            raise UserError(f"--{flag} is for one run: a sweep has several, and resumes by itself.")
    if "run-dir" in axes:
        raise UserError("--run-dir is the sweep's one folder; it cannot have several values.")
    run_dir, words = submission.without_run_dir(shared)
    seed = 42
    if "seed" in axes or "--seed" in words:
        seeds = axes["seed"] if "seed" in axes else words[words.index("--seed") + 1 :]
        seed = int(seeds[0]) if seeds and seeds[0].isdigit() else seed
    if command.nproc > 1:
        words += ["--nproc", str(command.nproc)]
    return sweep_plan.make_plan(
        Path(run_dir) if run_dir else None,
        seed=seed,
        recipe=target if target in RECIPES else str(Path(target).absolute()),
        flags=tuple(words),
        axes=axes,
        sample=command.sample,
        optuna=command.optuna,
        script_args=tuple(script_args),
    )


def _train(sweep: sweep_plan.SweepPlan, point: sweep_plan.Point, run: Path) -> list[str]:
    return ["train", sweep.recipe, *sweep.words(point, "--run-dir", str(run), "--resume")]


def _ask(number: int, *, sure: bool) -> None:
    if number <= sweep_plan.MOST or sure:
        return
    if sys.stdin.isatty():
        sys.stdout.write(f"Start {number:,} trainings? [y/N] ")
        sys.stdout.flush()
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise UserError(
        f"The values make {number:,} trainings, more than {sweep_plan.MOST:,}; none was started. "
        "Train some of them with --sample 50, or add --yes."
    )


def _check(sweep: sweep_plan.SweepPlan, num_ranks: int) -> Settings:
    """Check every flag and value before the first training; return the settings of one."""
    from samestep.shell.commands.train import parse  # noqa: PLC0415 - it imports torch

    points = [*sweep.points.values()]
    if len(points) > _ALL_CHECKED:
        points = [*sweep.corners()]

    def request_of(point: sweep_plan.Point) -> "Request":
        return parse(_train(sweep, point, sweep.folder / "checked")[1:], "sweep")[1]

    checked = check_trainings(points, request_of, num_ranks)
    if len(sweep.points) > len(points):
        by_value = dict(zip(map(repr, points), checked, strict=True))
        check_trainings(sweep.points.values(), sweep.combined(by_value), num_ranks)
    return checked[0].settings


def _submit_all(
    sweep: sweep_plan.SweepPlan, words: list[str], at_once: int | None, settings: Settings
) -> int:
    """Submit a job array of the trainings that have neither completed nor a job already."""
    defaults, files = options_before(None)
    (typed,) = flags.parse(words, "samestep slurm submit", UncheckedOptions, below=vars(defaults))
    asked = UncheckedOptions(**{**vars(defaults), **typed})
    options = submission.with_home_expanded(apply_flags(defaults, asked, files))
    check_ranks(options, settings)
    show_notes(advice(options, "recipe"))
    file = Path(sweep.recipe)
    of_trainer = sweep.recipe not in RECIPES and bool(trainer_of(file, file.parent))
    sweep.begin()
    with hold_sweep(sweep):
        going = {job.run.resolve() for job in my_jobs() if job.run and not job.ended}
        jobs = {}
        for task, (name, point) in enumerate(sweep.points.items()):
            run = sweep.run_dir(name).absolute()
            if sweep.status(name) != "completed" and run.resolve() not in going:
                training = sweep.words(point, "--run-dir", str(run))
                work = submission.find_workload(
                    sweep.recipe, training, [*RECIPES], as_recipe=of_trainer
                )
                jobs[task] = submission.make_script(
                    replace(work, name=sweep.folder.name), options, Path.cwd()
                )
        if not jobs:
            sys.stdout.write("Every training has completed or has a job.\n")
            return 0
        number = submission.submit_array(jobs, sweep.folder.absolute(), at_once)
    for task, job in jobs.items():
        sys.stdout.write(f"job {number}_{task}  {Path(job.run).name}\n")
    sys.stdout.write(
        "Watch them with: samestep slurm status\n"
        f"Rank them with: samestep runs {shown_path(sweep.folder)} --sort metric\n"
    )
    return 0


def _print_end(ended: EndedTraining) -> None:
    head, *more = ended.text.split("\n")
    stream = sys.stderr if ended.status == "failed" else sys.stdout
    stream.write(f"{ended.status:<9}  {ended.name}  {head}\n")
    stream.writelines(f"    {line}\n" for line in more)
    stream.flush()
