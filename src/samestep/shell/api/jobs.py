"""`samestep.submit`: hand a training or a script to Slurm; the job as Python sees it."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run, new_run_path
from samestep.base.run.files import shown_path
from samestep.cluster.slurm.checks import check_ranks
from samestep.cluster.slurm.options import (
    UncheckedOptions,
    apply_flags,
    option_value,
    options_before,
)
from samestep.cluster.slurm.queue import ask_to_stop, call, find_job, read_progress
from samestep.cluster.slurm.rank_ends import latest_start
from samestep.cluster.slurm.submission import (
    Workload,
    find_workload,
    make_script,
    with_home_expanded,
)
from samestep.cluster.slurm.submission import submit as hand_in
from samestep.core.recipe import Recipe
from samestep.core.recipes import RECIPES
from samestep.launch.ranks.process import TASK
from samestep.shell.api.arguments import AnyPath, one_line_errors
from samestep.shell.api.call import call_of, check_may_start, request_of, send
from samestep.shell.api.trained_run import TrainedRun

_CALL = ".call"
"""In the run directory of a job from Python: the call, which each start of the job reads."""
_TOLD_LINES = 15


@dataclass(frozen=True)
class SubmittedJob:
    """A job of Slurm and the directory of what it runs."""

    number: int
    path: Path
    recipe: Recipe | None = dataclasses.field(default=None, compare=False, repr=False)
    """The `Recipe` that `samestep.submit` was given."""

    def status(self) -> dict[str, Any]:
        """Return the job's state in the queue, and its training's progress.

        `state` is Slurm's word; "UNKNOWN" some minutes after the end, when Slurm has forgotten it.
        """
        job, progress = find_job(self.number), read_progress(self.path)
        queue = {name: getattr(job, name, None) for name in ("reason", "nodes", "restarts")}
        state = "UNKNOWN" if job is None else job.state
        training = dataclasses.asdict(progress) if progress else None
        return {"job": self.number, "state": state, **queue, "training": training}

    def wait(self, timeout_s: float | None = None, *, every_s: float = 5.0) -> bool:
        """Wait until the job has ended; return whether it has within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (job := find_job(self.number)) is not None and not job.ended:
            left = every_s if deadline is None else min(every_s, deadline - time.monotonic())
            if left <= 0:
                return False
            time.sleep(left)
        return True

    def result(self, timeout_s: float | None = None) -> TrainedRun | Path:
        """Wait for the end; return the run, or of a script the directory with its output.

        Raises:
            UserError: the job failed, with what its ranks said; or has not ended in `timeout_s`.
        """
        if not self.wait(timeout_s):
            raise UserError(f"Job {self.number} has not ended after {timeout_s:g} s: wait longer.")
        job, progress = find_job(self.number), read_progress(self.path)
        done = progress is not None and progress.status == "completed"
        if not done and (job is None or job.state != "COMPLETED"):
            log = (job and job.log) or self.path / f"slurm-{self.number}.out"
            words = "\n".join(["", *latest_start(log)[-_TOLD_LINES:]]) or " no rank started."
            state = "ended" if job is None else job.state
            raise UserError(f"Job {self.number} {state} in {shown_path(self.path)}:{words}")
        return TrainedRun(self.path, self.recipe) if is_run(self.path) else self.path

    def cancel(self) -> None:
        """Stop the job: a running one saves first, and its ranks end together."""
        job = find_job(self.number)
        if job is None or job.ended:
            return
        if job.state == "RUNNING":
            ask_to_stop(job, self.path)
        else:
            call("scancel", str(self.number))


@one_line_errors
def submit(
    what: AnyPath | Recipe, *, arguments: Sequence[str] = (), **options_and_settings: Any
) -> SubmittedJob:
    """Submit a recipe, a run to continue, or any Python script as a job of Slurm; return the job.

        job = samestep.submit("spiral", nodes=2, time="00:30:00", epochs=50)
        job.status()["state"], job.result().result["best"]

    Args:
        what: a recipe's name, its file, or a `samestep.Recipe`, which may be made in a notebook;
            the directory of a run; or a script.
        arguments: the arguments of a script.
        options_and_settings: any flag of `samestep slurm submit` (nodes, gpus_per_node, time …),
            over what samestep.toml says; any setting of the training and option of the recipe.

    Raises:
        UserError: a mistake in an argument, or Slurm's refusal.
    """
    check_may_start("submit")
    of_job = {field.name for field in fields(UncheckedOptions)}
    job_options = {name: v for name, v in options_and_settings.items() if name in of_job}
    settings = {name: v for name, v in options_and_settings.items() if name not in of_job}
    path = None if isinstance(what, Recipe) or what in RECIPES else Path(what)
    defaults, files = options_before(path)
    options = apply_flags(defaults, _job_options(defaults, job_options), files)
    if isinstance(what, Recipe):
        if arguments:
            raise UserError("arguments= is for a script; a recipe takes settings.")
        name = what.name or "recipe"
        run = Path(settings.get("run_dir") or new_run_path(name)).absolute()
        sent = call_of(what, keywords=settings | {"run_dir": str(run)}, resume=True)
        check_ranks(options, request_of(sent, "submit").settings)
        run.mkdir(parents=True, exist_ok=True)
        send(sent, run / _CALL)
        task = (f"{TASK}={run / _CALL}",)
        options = dataclasses.replace(options, env=(*options.env, *task))
        workload = Workload(name=name, kind="recipe", run=run, command=("-m", "samestep", "train"))
        recipe = sent.recipe
    else:
        words = [*map(str, arguments), *flag_words(settings)]
        workload = find_workload(os.fspath(what), words, [*RECIPES])
        recipe = None
        if workload.kind == "recipe":
            if arguments:
                raise UserError("arguments= is for a script; a recipe takes settings.")
            checked = call_of(what, keywords=settings, resume=is_run(Path(what)))
            check_ranks(options, request_of(checked, "submit").settings)
        elif settings:
            raise UserError(
                f"submit(): {next(iter(settings))} is not an option of a job. Pass the script's "
                "own arguments as arguments=[…]."
            )
    job = make_script(workload, with_home_expanded(options), Path.cwd())
    try:
        number, _ = hand_in(job)
    except UserError:
        if not is_run(workload.run):
            with contextlib.suppress(OSError):
                (workload.run / _CALL).unlink()
                workload.run.rmdir()
        raise
    return SubmittedJob(number, workload.run, recipe)


def _job_options(defaults: UncheckedOptions, overrides: Mapping[str, Any]) -> UncheckedOptions:
    values = dict(vars(defaults))
    for name, value in overrides.items():
        repeats = isinstance(value, str) and isinstance(getattr(defaults, name), tuple)
        words = (value,) if repeats else value
        values[name] = option_value(name, words, f"submit({name}={value!r})")
    return UncheckedOptions(**values)


def flag_words(settings: Mapping[str, Any]) -> list[str]:
    """Return arguments of a call as flags: lr=0.1 as --lr 0.1, None as none at all."""
    words: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
