"""`samestep.check`: what is wrong with a distributed script, as data."""

from collections.abc import Sequence

from samestep.base.errors import UserError
from samestep.base.file_kinds import is_recipe_file, loop_of
from samestep.launch.ranks.nproc import check_ranks, refuse_inside_launcher
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.check_resume import check_resume
from samestep.scripts.checking.check_script import check_script
from samestep.shell.api.arguments import AnyPath, one_line_errors, path_of
from samestep.shell.api.call import check_may_start


@one_line_errors
def check(
    script: AnyPath,
    args: Sequence[str] = (),
    *,
    nproc: int | None = None,
    module: bool = False,
    steps: int = 10,
    seconds: float = 40.0,
    stall_s: float | None = None,
    resume: str | None = None,
    resume_nproc: Sequence[int] = (),
) -> CheckReport:
    """Run a script on a few new ranks of the CPU, and return what is wrong with it.

    Nothing in the script has to change; it runs in a copy of its folder. The report has
    `findings`, each with its code, severity, file, line, title, evidence, why and remedy;
    `not_seen`, what could not be judged; `steps`, `seconds` and `notes`; and `exit_code`, which is
    0 if there is nothing but advice. `str(report)` is what `samestep check` prints.

    Args:
        script: a Python file; with `module`, the name of a module, as for `python -m`.
        args: the script's own arguments.
        nproc: how many ranks, by default 2.
        module: whether a module is named instead of a file.
        steps: batches of each of the first two epochs; then comes the last of the epoch.
        seconds: end the script this long after its first step.
        stall_s: report a hang if no rank moves for this long; 20 median steps by default.
        resume: check the resume instead: the words that are added to `args` to resume the script,
            or "auto" if it finds its checkpoint by itself.
        resume_nproc: with `resume`, other numbers of ranks to resume on.

    Raises:
        UserError: the script fails by itself, takes no step, or cannot be run here.
    """
    check_may_start("check")
    refuse_inside_launcher("samestep.check()", "Call it from a single process.")
    check_ranks(2 if nproc is None else nproc)
    for name, value in (("steps", steps), ("seconds", seconds), ("stall_s", stall_s)):
        if value is not None and value <= 0:
            raise UserError(f"{name}={value}: it must be greater than 0.")
    path = path_of(script, "script")
    if not module and is_recipe_file(path):
        raise UserError(f"{path} is a recipe: samestep.verify({str(path)!r}) checks those.")
    if not module and loop_of(path):
        raise UserError(
            f"{path} is a loop with samestep.open_run: samestep.verify({str(path)!r}) checks those."
        )
    if resume is not None:
        for one in resume_nproc:
            check_ranks(one, flag="resume_nproc")
        return check_resume(
            path,
            [str(one) for one in args],
            resume=resume,
            resume_nproc=resume_nproc,
            nproc=2 if nproc is None else nproc,
            module=module,
            seconds=seconds,
            stall_s=stall_s,
        )
    return check_script(
        path,
        [str(one) for one in args],
        nproc=2 if nproc is None else nproc,
        module=module,
        steps=steps,
        seconds=seconds,
        stall_s=stall_s,
        asked=nproc is not None,
    )
