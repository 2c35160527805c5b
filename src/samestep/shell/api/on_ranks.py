"""`samestep.train`, `verify` and `check`: the functions that start ranks.

The verbs are made of these signatures and docstrings, so PyTorch is imported in the functions.
"""

import os
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from samestep.base.errors import UserError
from samestep.base.flags import InShell, NumRanks
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.process import RankLog, rank_of
from samestep.shell.api.arguments import (
    AnyPath,
    AnyRecipe,
    GivenSettings,
    Names,
    Numbers,
    check_positive,
    numbers,
    one_line_errors,
    path_of,
    with_settings,
)

if TYPE_CHECKING:
    from samestep.core.recipe import Recipe
    from samestep.core.session.request import Request
    from samestep.launch.ranks.start import Ended
    from samestep.prove.verification.harness import Verification
    from samestep.scripts.checking.check_report import CheckReport
    from samestep.shell.api.trained_run import TrainedRun

DEFAULT_RANKS = 2  # ranks on which a script is checked by default


@with_settings(GivenSettings)
@one_line_errors
def train(
    what: "AnyPath | Recipe",
    *,
    config: AnyPath | None = None,
    nproc: NumRanks = 1,
    elastic: Annotated[bool | str, InShell("[MIN:MAX]", str | None)] = False,
    elastic_replace: bool = True,
    elastic_limit: int = 10,
    resume: Annotated[bool | str, InShell("[URL]", str | None)] = False,
    allow_change: Names = (),
    recipe_of_run: bool = False,
    recipe: AnyRecipe = None,
    quiet: bool = False,
    **settings: Any,
) -> "TrainedRun":
    """Train a recipe, or continue a run; return the run.

        run = samestep.train("spiral", epochs=3)
        run = samestep.train("my_recipe.py", nproc=2, lr=0.01, run_dir="runs/mine")
        run = samestep.train(run, resume=True, epochs=8)

    With one rank it trains in this process and leaves its random numbers and threads as they were.
    Ctrl-C, or a notebook's interrupt, stops after the current step, saves and returns the run:
    `result["status"]` is "stopped", and `resume=True` continues from there. In a script started by
    a launcher (torchrun, srun, mpirun) each process is a rank, as with `samestep train`.

    Args:
        what: A recipe: its name ("spiral"), its file ("my_recipe.py"), or a `samestep.Recipe`,
            which may be made in a notebook; or the directory of a run, whose settings are taken.
        config: TOML or YAML file of settings and options; those given directly win over it.
        nproc: Ranks to start on this machine; auto: one per GPU, else one per core.
        elastic: With `nproc`, continue without ranks that die; 2:4 as long as 2 to 4 are left.
        elastic_replace: With `elastic`, start a new rank for one that died.
        elastic_limit: With `elastic`, most deaths per hour.
        resume: Continue the run from its newest intact checkpoint; with the address of a `mirror`,
            fetch the run from there first. Without `resume` a new run starts.
        allow_change: With `resume`, settings that may change: lr,weight_decay; `recipe` allows an
            edited recipe. The run is then a different training.
        recipe_of_run: With `resume`, use the run's own copy of the recipe.
        recipe: The recipe of that run, if the run names no file.
        quiet: Show nothing.
        settings: Any setting of `samestep train`, and any option of the recipe.
            `help(samestep.Settings)` explains them; the recipe's defaults win over those there.

    Raises:
        UserError: a mistake that the user can correct, or a failed rank.
    """
    from samestep.launch.ranks import process_group  # noqa: PLC0415 - they import torch
    from samestep.launch.ranks.keeper import elastic_of  # noqa: PLC0415
    from samestep.launch.ranks.world import in_process_group  # noqa: PLC0415
    from samestep.shell.api.call import call_of, check_may_start  # noqa: PLC0415
    from samestep.shell.api.training import train_call  # noqa: PLC0415
    from samestep.show.progress import Nothing, Screen  # noqa: PLC0415

    log = RankLog(rank_of())
    try:
        check_may_start("train")
        names = allow_change.split(",") if isinstance(allow_change, str) else allow_change
        call = call_of(
            what,
            recipe,
            keywords=settings,
            config=config,
            resume=resume,
            allow_change=tuple(names),
            recipe_of_run=recipe_of_run,
        )
        recipe_argument = "" if call.recipe is None else "recipe=…, "
        again = f'samestep.train("{{}}", {recipe_argument}resume=True)'
        if not elastic and (elastic_limit != 10 or not elastic_replace):
            raise UserError("elastic_limit and elastic_replace need elastic=True.")
        keeping = partial(elastic_of, elastic, replaces=elastic_replace, limit=elastic_limit)
        screen = Nothing() if quiet else Screen(go_on=again)
        return train_call(call, nproc, screen, log, keeping if elastic else None)
    except Exception as error:
        if detect_launch(os.environ).world_size > 1:  # one rank reports the failure, and all end
            process_group.end_failed(error, log, connected=in_process_group())
        raise
    finally:
        log.give_back()


@with_settings(GivenSettings)
@one_line_errors
def verify(
    what: "AnyPath | Recipe",
    *,
    config: AnyPath | None = None,
    nproc: Numbers = None,
    quick: bool = False,
    accept: Names = (),
    tolerance: float | None = None,
    recipe: AnyRecipe = None,
    arguments: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Return whether a recipe trains the same on one process and on many, as `verify --json` says.

    `same` is the answer; each of `checks` has a name, a status, what differs, and its likely cause.
    It starts its own ranks and takes about half a minute.

    Args:
        what: A recipe: its name, its file, or a `samestep.Recipe`; the directory of a run; or a
            script with a loop of its own, which opens a run.
        config: TOML or YAML file of settings and options; those given directly win over it.
        nproc: Numbers of ranks to compare, by default 1,2,3; 1 is always one of them.
        quick: Skip the slowest checks: a third number of ranks (unless `nproc` names it), the
            recipe's own precision, accumulation, resuming, Lightning, a checkpoint on one device.
        accept: What may differ by design: batchnorm, dropout, or batchnorm,dropout. A recipe can
            also accept them.
        tolerance: Compare only the losses, and allow this relative difference: for training that is
            random by design.
        recipe: The recipe of that run, if the run names no file.
        arguments: Those of the script, if it has a loop of its own.
        settings: Settings, and options of the recipe.

    Raises:
        UserError: it cannot be done, or the recipe cannot be trained in one process.
        KeyboardInterrupt: it was interrupted; the ranks have ended.
    """
    from samestep.base.file_kinds import loop_of  # noqa: PLC0415 - not for help
    from samestep.launch.ranks.nproc import refuse_inside_launcher  # noqa: PLC0415
    from samestep.prove.verification.result_table import as_table  # noqa: PLC0415 - they import torch
    from samestep.shell.api.call import (  # noqa: PLC0415
        CALL_FILE,
        as_in_fresh_process,
        call_of,
        check_may_start,
        request_of,
        send,
    )

    check_may_start("verify")
    refuse_inside_launcher("samestep.verify()", "Call it from a single process.")
    nproc = settings.pop("world_sizes", nproc)  # its old name, for one more release
    call = call_of(what, recipe, keywords=settings, config=config)
    script = None if call.target is None else loop_of(call.target)
    unfitting = [*settings] if config is None else [*settings, "config"]
    if script is not None and unfitting:
        raise UserError(f"{', '.join(unfitting)}: {script} is not a recipe. Use arguments=(…).")
    if script is None and arguments:
        raise UserError("arguments= is for a script that opens a run; this is a recipe.")
    asked: dict[str, Any] = {"quick": quick, "accept": accept, "tolerance": tolerance}
    with as_in_fresh_process(), tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        if script is not None:
            words = [*map(str, arguments)]
            return as_table(
                run_verify(script, lambda _: [str(script)], nproc, arguments=words, **asked)
            )
        request, file = request_of(call, "verify"), Path(folder, "call")

        def words_of(device: str) -> list[str]:
            send(replace(call, keywords={**settings, "device": device}), file)
            return [CALL_FILE, str(file)]

        return as_table(run_verify(request, words_of, nproc, explicit=settings.keys(), **asked))


def run_verify(
    what: "Request | Path",
    words_of: Callable[[str], list[str]],
    nproc: Any,
    *,
    quick: bool,
    accept: str | Sequence[str] | None,
    tolerance: float | None,
    explicit: Collection[str] = (),
    arguments: Sequence[str] = (),
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> "Verification":
    """Verify a recipe, by its request, or a script with a loop of its own, as has been asked.

    `words_of` returns the words after `verify` of a rank on a device.
    """
    from samestep.launch.ranks.keeper import Elastic  # noqa: PLC0415 - they import torch
    from samestep.launch.ranks.start import run_ranks  # noqa: PLC0415
    from samestep.prove.verification.harness import MOST_RANKS, VerifyOptions  # noqa: PLC0415
    from samestep.prove.verification.verify_loop import verify_loop  # noqa: PLC0415
    from samestep.prove.verification.verify_recipe import verify_recipe  # noqa: PLC0415

    check_positive(tolerance=tolerance)
    named = accept.split(",") if isinstance(accept, str) else accept or ()
    options = VerifyOptions(
        sizes=None if nproc is None else numbers("nproc", nproc, most=MOST_RANKS),
        quick=quick,
        accept=tuple(filter(None, map(str.strip, named))),
        tolerance=tolerance,
    )

    def launch(number: int, path: Path, device: str, elastic: Elastic | None = None) -> "Ended":
        return run_ranks(number, ["verify", *words_of(device)], str(path), elastic)

    def launch_elastic(number: int, path: Path, device: str) -> "Ended":
        return launch(number, path, device, Elastic(most=number, replaces=False))

    if isinstance(what, Path):
        return verify_loop(what, arguments, options, launch, progress=progress)
    return verify_recipe(
        what, options, launch, explicit=explicit, launch_elastic=launch_elastic, progress=progress
    )


@one_line_errors
def check(
    script: AnyPath,
    args: Sequence[str] = (),
    *,
    nproc: int | None = None,
    module: bool = False,
    steps: int = 10,
    resume: Annotated[str | None, InShell("WORDS|auto")] = None,
    resume_nproc: Numbers = (),
    seconds: float = 40.0,
    stall_s: float | None = None,
) -> "CheckReport":
    """Run a script on a few new ranks of the CPU, and return what is wrong with it.

    Nothing in the script has to change; it runs in a copy of its folder. The report has
    `findings`, each with its code, severity, file, line, title, evidence, why and remedy;
    `not_seen`, what could not be judged; `steps`, `seconds` and `notes`; and `exit_code`, which is
    0 if there is nothing but advice. `str(report)` is what `samestep check` prints.

    Args:
        script: A Python file; with `module`, the name of a module, as for `python -m`.
        args: The script's own arguments.
        nproc: Ranks to start; by default 2.
        module: Whether a module is named instead of a file.
        steps: Batches to run in each of the first two epochs, before the last batch of the epoch.
        resume: Check the resume instead: train once whole, once killed and resumed twice, and
            compare. The words are added to the script's arguments to resume it; {checkpoint} stands
            for the newest checkpoint; auto if the script finds it by itself.
        resume_nproc: With `resume`, also resume on these numbers of ranks.
        seconds: End the script this many seconds after its first step; what comes later is not
            checked.
        stall_s: Report a hang if no rank makes progress for this many seconds; by default 20 times
            the median step, at least 30.

    Raises:
        UserError: the script fails by itself, takes no step, or cannot be run here.
    """
    from samestep.base.file_kinds import is_recipe_file, loop_of  # noqa: PLC0415 - not for help
    from samestep.launch.ranks.nproc import refuse_inside_launcher  # noqa: PLC0415
    from samestep.shell.api.call import check_may_start  # noqa: PLC0415 - it imports torch

    check_may_start("check")
    refuse_inside_launcher("samestep.check()", "Call it from a single process.")
    path = path_of(script, "script")
    if not module and is_recipe_file(path):
        raise UserError(f"{path} is a recipe: samestep.verify({str(path)!r}) checks those.")
    if not module and resume is None and loop_of(path):
        raise UserError(
            f"{path} is a loop with samestep.open_run: samestep.verify({str(path)!r}) checks those."
        )
    return run_check(
        path,
        [str(word) for word in args],
        nproc=nproc,
        module=module,
        steps=steps,
        resume=resume,
        resume_nproc=resume_nproc,
        seconds=seconds,
        stall_s=stall_s,
    )


def run_check(
    script: Path,
    words: Sequence[str],
    *,
    nproc: int | None,
    module: bool,
    steps: int,
    resume: str | None,
    resume_nproc: Any,
    seconds: float,
    stall_s: float | None,
    tell: Callable[[str], object] = lambda _text: None,
) -> "CheckReport":
    """Check a script or its resume, as `check` has been asked; `tell` gets what it costs."""
    from samestep.launch.ranks.nproc import check_ranks  # noqa: PLC0415 - not for help
    from samestep.scripts.checking.check_resume import check_resume  # noqa: PLC0415
    from samestep.scripts.checking.check_script import check_script, job_of  # noqa: PLC0415

    check_positive(steps=steps, seconds=seconds, stall_s=stall_s)
    if resume is None and resume_nproc:
        raise UserError("--resume-nproc needs --resume.")
    number = DEFAULT_RANKS if nproc is None else nproc
    check_ranks(number)
    sizes = numbers("resume_nproc", resume_nproc or None)
    for size in sizes:
        check_ranks(size, flag="--resume-nproc")
    job = job_of(script, words, nproc=number, module=module, steps=steps)
    if resume is None:
        return check_script(job, seconds=seconds, stall_s=stall_s, asked=nproc is not None)
    return check_resume(
        job, resume=resume, resume_nproc=sizes, seconds=seconds, stall_s=stall_s, tell=tell
    )
