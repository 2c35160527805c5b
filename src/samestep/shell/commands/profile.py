"""`samestep profile`: where the time of a training goes, and what to change first."""

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.base.errors import UserError
from samestep.base.file_kinds import is_recipe_file
from samestep.base.flags import NumRanks
from samestep.base.run.directory import is_run, new_run_path
from samestep.base.startup import PARENT
from samestep.core.recipes import RECIPES
from samestep.launch.ranks import process, watched
from samestep.launch.ranks.launch import detect_launch
from samestep.launch.ranks.nproc import check_workers, cores, start_nproc
from samestep.scripts.measuring.measured import Extent
from samestep.shell.api.arguments import check_positive, numbers
from samestep.shell.cli import example_text, show_general_help
from samestep.shell.commands.forms import Form, MaybeNumbers, Switch, parse, rich_console
from samestep.shell.commands.target import ScriptTarget, parse_target, script_target, target_first

if TYPE_CHECKING:
    from samestep.scripts.measuring.profile_report import Profile
    from samestep.scripts.running import ScriptFailed

# Silences the profiler's library, which otherwise logs to standard error; before torch's import.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

_EXAMPLES = (
    "profile spiral",
    "profile my_recipe.py --workers 0,1,2,4 --batch-sizes 32,64,128",
    "profile train.py --nproc 2 -- --epochs 1",
)

_STOPPED = 143  # the exit code after SIGTERM, as a shell has it

_HELP = """\
usage: samestep profile TARGET [flags]
       samestep profile SCRIPT.py [flags] [-- ARGUMENTS OF THE SCRIPT]
       samestep profile -m MODULE [flags] [-- ARGUMENTS OF THE MODULE]

Measure some steps of a training without a profiler, and trace a few more with
torch.profiler. It shows, with numbers per step, what limits the speed, what
would limit it next, and what to change.

TARGET is a recipe ({recipes}), a recipe
file, or the directory of a run; it takes all flags of `samestep train TARGET`,
too. SCRIPT.py is any other Python program that trains, preferably with an
optimizer of torch.optim. It runs unchanged.
`samestep profile TARGET --help` shows all flags.
"""


@dataclass(frozen=True, kw_only=True)
class _Profile(Extent):
    """Flags of `profile` for a recipe and for a script."""

    nproc: NumRanks = 1
    """Ranks to start on this machine; auto: one per GPU, else one per core."""
    json: Switch = False
    """Print one JSON object instead of the tables. What a script prints goes to standard error."""

    def __post_init__(self) -> None:
        check_positive(epoch=self.epoch, seconds=self.seconds, steps=self.steps)
        if self.steps == 1:
            raise UserError("--steps is 1; it must be 2 or more.")


@dataclass(frozen=True, kw_only=True)
class ProfileFlags(_Profile):
    """Profile {}: where the time of its steps goes."""

    config: Path | None = None
    """TOML or YAML file of settings and options; flags win over it."""
    workers: MaybeNumbers = None
    """Try these numbers of loader workers, such as 0,1,2,4, and recommend one."""
    batch_sizes: MaybeNumbers = None
    """Try these batch sizes, such as 32,64,128, and show the fastest. Each is another training."""
    apply: Switch = False
    """Write the results of --workers and --batch-sizes to the file of --config, or RECIPE.toml."""


@dataclass(frozen=True, kw_only=True)
class ScriptCommand(_Profile):
    """Profile a script. Arguments after `--` are passed to the script."""

    out: Path | None = None
    """Directory for the traces; by default a new one in runs/."""
    oversubscribe: Switch = False
    """Allow more than 4 ranks per core."""


FORM = Form(verb="profile", kind=ProfileFlags, examples=_EXAMPLES, settings=True)


def main(arguments: list[str]) -> int:
    """Profile, as the one that starts ranks or as a rank."""
    general = _HELP.format(recipes=", ".join(RECIPES))
    show_general_help(arguments, f"{general}\n{example_text(*_EXAMPLES)}")
    return process.run_as_rank(lambda log: _profile(arguments, log))


def _profile(arguments: list[str], log: process.RankLog) -> int:
    arguments = target_first(arguments, ProfileFlags)
    target = script_target("profile", arguments, "a recipe, a recipe file, a script")
    is_script = target.module or target.name.endswith(".py")
    if is_script and (target.module or not is_recipe_file(Path(target.name))):
        return _script(target, arguments, log)
    if "--" in arguments:
        raise UserError(f"{target.name} is a recipe: only a script has arguments. Omit `--`.")
    return _recipe(arguments, log)


def _recipe(arguments: list[str], log: process.RankLog) -> int:
    command, request = parse_target(FORM, arguments)
    workers = numbers("workers", command.workers, least=0)
    batch_sizes = numbers("batch_sizes", command.batch_sizes)
    if command.apply and not (workers or batch_sizes):
        raise UserError("--apply writes results of --workers or --batch-sizes: add one of them.")
    from samestep.prove.profiling.tried_values import apply_settings, file_to_apply  # noqa: PLC0415

    place = file_to_apply(command.config, request.recipe.name) if command.apply else None
    run_dir = request.settings.run_dir
    if run_dir is not None and is_run(Path(run_dir)):
        raise UserError(
            f"{run_dir} already holds a run or a profile. Choose another --run-dir, or leave it "
            "out to make a new directory in runs/.",
            on_all_ranks=True,
        )
    settings = request.settings
    if workers and not settings.oversubscribe:
        num_ranks = command.nproc if command.nproc != "auto" else 1
        check_workers(max(workers), num_ranks, cores())
    code = start_nproc(
        command.nproc,
        ["profile", *arguments],
        device=settings.device,
        oversubscribe=settings.oversubscribe,
    )
    if code is not None:
        return code
    from samestep.launch.ranks.world import find_world, join, leave  # noqa: PLC0415
    from samestep.prove.profiling.recipe_profile import profile_recipe  # noqa: PLC0415

    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    watched.start_watcher(world, settings.stall_s)
    join(world, settings.timeout_s)
    tried = {"num_workers": workers, "batch_size": batch_sizes}
    profile = profile_recipe(request, world, command, tried, log.move_to)
    world.on_main(lambda: _save_and_show(profile, as_json=command.json))
    if profile.measured.stopped:
        code = _STOPPED
    if world.is_main and place is not None and code is None:
        if values := {sweep.setting: sweep.best for sweep in profile.sweeps if sweep.sure}:
            apply_settings(place, values, request.source)
            shown = ", ".join(f"{key} = {n}" for key, n in values.items())
            sys.stderr.write(f"{place}: {shown}\n")
        if unsure := ", ".join(sweep.setting for sweep in profile.sweeps if not sweep.sure):
            sys.stderr.write(f"{place}: {unsure} not written: the measurements differ too much.\n")
            code = 1
    leave(world)
    return code or 0


def _script(target: ScriptTarget, arguments: list[str], log: process.RankLog) -> int:
    script = Path(target.name)
    for flag in ("--workers", "--batch-sizes", "--apply", "--config"):
        if any(word.split("=")[0] == flag for word in target.flags):
            raise UserError(
                f"{flag} changes a recipe's settings, and {script} is a script. Pass its own "
                "arguments after `--`, and profile it once per value."
            )
    command = parse(replace(FORM, kind=ScriptCommand), target.flags, str(script))
    if target.module:
        target.check_importable()
    place = os.environ.get(process.TASK)  # of the parent, for all ranks
    name = target.name if target.module else script.stem
    out = Path(place or command.out or new_run_path(f"profile-{name}"))
    code = start_nproc(
        command.nproc, ["profile", *arguments], task=str(out), oversubscribe=command.oversubscribe
    )
    if code is not None:
        return _without_logs(out, code)
    launch = detect_launch(os.environ)
    if launch.world_size > 1 and not place and command.out is None:
        raise UserError(
            f"{launch.launcher} has started {launch.world_size} ranks: choose one directory for "
            "all of them with --out DIR, or let `samestep profile --nproc` start them."
        )
    from samestep.scripts.measuring.tracing import unwritable  # noqa: PLC0415
    from samestep.scripts.running import ScriptFailed, ScriptRanks  # noqa: PLC0415
    from samestep.scripts.script_profile import profile_script  # noqa: PLC0415

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    log.move_to(out)
    watched.watch_script(launch)
    try:
        profile = profile_script(
            script,
            target.words,
            ScriptRanks(launch),
            out,
            command,
            quiet=command.json,
            module=target.module,
        )
    except (ScriptFailed, UserError) as error:
        with contextlib.suppress(OSError):
            out.rmdir()  # if it is empty
        if isinstance(error, UserError):
            raise
        return _failed(error, script, as_json=command.json)
    if profile is not None:
        _save_and_show(profile, as_json=command.json)
    return _STOPPED if profile is not None and profile.measured.stopped else 0


def _without_logs(out: Path, code: int) -> int:
    """Remove the empty logs of failed ranks, and their folder if it held no more."""
    with contextlib.suppress(OSError):
        for log in out.glob("rank-*.log") if code else ():
            if not log.stat().st_size:  # a message may name one that says something
                log.unlink()
        if code:
            out.rmdir()
    return code


def _failed(failure: "ScriptFailed", script: Path, *, as_json: bool) -> int:
    """Report a script that failed, below its own error; return its exit code."""
    if failure.__cause__ is not None and process.is_lost_peer(failure.__cause__):
        raise failure.__cause__ from None  # another rank reports the cause
    if os.environ.get(PARENT):  # which reports it once for all ranks
        process.leave_for_parent(
            f"{failure.summary(script)}\n{failure.text}".rstrip(), failure.code
        )
        return failure.code
    sys.stderr.write(failure.text)
    if failure.profile is not None:
        _save_and_show(failure.profile, as_json=as_json)
    process.print_error(failure.summary(script))
    return failure.code


def _save_and_show(profile: "Profile", *, as_json: bool) -> None:
    from samestep.scripts.measuring.profile_report import show  # noqa: PLC0415

    profile.save()
    if as_json:
        sys.stdout.write(profile.as_json())
    else:
        show(profile, rich_console())
    sys.stdout.flush()
