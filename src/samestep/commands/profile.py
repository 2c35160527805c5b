"""`samestep profile`: where the time of a training goes, and the one thing to change."""

import ast
import contextlib
import importlib.util
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from samestep.commands.help import examples
from samestep.errors import UserError
from samestep.ranks.failure import (
    PARENT,
    STARTED_AT,
    die_with_parent,
    is_lost_peer,
    leave_for_parent,
    print_error,
    run_as_rank,
)
from samestep.ranks.launch import Launch, detect_launch
from samestep.ranks.log import RankLog
from samestep.run.directory import is_run, new_run_path

if TYPE_CHECKING:
    from samestep.profiling.of_script import ScriptFailed
    from samestep.profiling.profile_result import Profile

# The profiler's own library writes to standard error when it starts and stops; set before torch is
# imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

OUT = "SAMESTEP_PROFILE_DIR"
"""Set, to the directory of a script's profile, in the ranks that this verb starts."""

_EXAMPLES = """\
examples:
  samestep profile spiral
  samestep profile my_recipe.py --workers 0,1,2,4 --batch-sizes 32,64,128
  samestep profile train.py --nproc 2 -- --epochs 1
"""

_HELP = """\
usage: samestep profile TARGET [flags]
       samestep profile SCRIPT.py [flags] [-- ARGUMENTS OF THE SCRIPT]
       samestep profile -m MODULE [flags] [-- ARGUMENTS OF THE MODULE]

Measures some steps of a training without a profiler, traces a few more with
torch.profiler, and says what bounds it, with numbers per step, what would bound
it next, and what to change.

TARGET is a recipe ({recipes}), a recipe file, or the
directory of a run; all flags of `samestep train TARGET` are taken too.
SCRIPT.py is any other Python program that trains with a torch.optim optimizer;
nothing in it has to change. `samestep profile TARGET --help` shows all flags.

"""


@dataclass(frozen=True)
class _Extent:
    nproc: int = 1
    """Ranks to start on this machine."""
    epoch: int | None = None
    """Trace this epoch as a whole, counted from 1; by default a few steps."""
    seconds: float = 3.0
    """How long to measure, at least."""

    def check(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: a flag is out of its range.
        """
        for flag, value in (("--nproc", self.nproc), ("--epoch", self.epoch)):
            if value is not None and value < 1:
                raise UserError(f"{flag} is {value}; it must be 1 or more.")
        if not 0 < self.seconds < float("inf"):
            raise UserError(f"--seconds is {self.seconds}; it must be greater than 0.")


@dataclass(frozen=True)
class Command(_Extent):
    """What this command itself takes, beside the settings."""

    config: Path | None = None
    """TOML file of settings and options; flags win over it."""
    workers: str | None = None
    """Try these numbers of loader workers, and say which to use: 0,1,2,4."""
    batch_sizes: str | None = None
    """Try these batch sizes per rank, and say which is fastest: 32,64,128. Another batch size is
    another training."""
    apply: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write what --workers and --batch-sizes found into the file that --config names, or into a
    new RECIPE.toml."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object in place of the tables."""


@dataclass(frozen=True)
class ScriptCommand(_Extent):
    """Profile a script. What follows `--` is the script's own."""

    out: Path | None = None
    """Directory for the traces; by default a new one in runs/."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object; what the script prints goes to standard error."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        from samestep.recipe import recipe_names  # noqa: PLC0415 - imports torch

        sys.stdout.write(_HELP.format(recipes=", ".join(recipe_names())) + _EXAMPLES)
        return 0 if arguments else 2
    with examples(_EXAMPLES):
        return run_as_rank(lambda log: _profile(arguments, log))


def _profile(arguments: list[str], log: RankLog) -> int:
    target, *flags = arguments
    if target == "-m":
        if not flags or flags[0].startswith("-"):
            raise UserError("Name the module after -m, as for python -m.")
        return _script(Path(flags[0]), flags[1:], arguments, log, module=True)
    if target.startswith("-"):
        raise UserError(f"Name what to profile before {target}: a recipe, a recipe file, a script.")
    if target.endswith(".py") and not is_recipe_file(Path(target)):
        return _script(Path(target), flags, arguments, log)
    if "--" in flags:
        raise UserError(
            f"{target} is a recipe: what follows `--` would be a script's own. Leave `--` out."
        )
    return _recipe(target, flags, arguments, log)


def is_recipe_file(path: Path) -> bool:
    """Whether a Python file ends up with a `recipe`, which tells a recipe from a script.

    Raises:
        UserError: there is no such file, or it is not Python.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"There is no file {path} that can be read: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UserError(f"{path}:{line}: {getattr(error, 'msg', error)}.") from error
    named: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            named |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            named.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            named |= {alias.asname or alias.name for alias in node.names}
    return "recipe" in named


def _recipe(target: str, flags: list[str], arguments: list[str], log: RankLog) -> int:
    from samestep.commands.target import parse  # noqa: PLC0415 - imports torch
    from samestep.profiling.apply_settings import check_place  # noqa: PLC0415 - as does the package

    about = "Profile {}: where the time of its steps goes."
    command, request = parse(target, flags, verb="profile", about=about, kind=Command)
    command.check()
    workers = numbers("workers", command.workers, least=0)
    batch_sizes = numbers("batch-sizes", command.batch_sizes, least=1)
    if command.apply and not (workers or batch_sizes):
        raise UserError("--apply writes what --workers or --batch-sizes finds: give one of them.")
    place = check_place(command.config, request.recipe.name) if command.apply else None
    run_dir = request.settings.run_dir
    if run_dir is not None and is_run(Path(run_dir)):
        raise UserError(
            f"{run_dir} already holds a run or a profile. Choose another --run-dir, or leave it "
            "out: a new directory is made in runs/.",
            on_all_ranks=True,
        )
    if command.nproc > 1 and not os.environ.get(PARENT):
        return _start(command.nproc, ["profile", *arguments])
    die_with_parent()
    from samestep.profiling.of_recipe import Wishes, profile_recipe  # noqa: PLC0415
    from samestep.ranks.world import find_world, join, leave  # noqa: PLC0415

    world = find_world(request.settings.device, request.settings.backend)
    join(world)
    wishes = Wishes(
        workers=workers,
        batch_sizes=batch_sizes,
        epoch=command.epoch,
        seconds=command.seconds,
        begin=log.move_to,
    )
    found = profile_recipe(request, world, wishes)
    world.on_main(lambda: _save_and_show(found, as_json=command.json))
    code = 0
    if world.is_main and place is not None:
        code = _apply(place, found, request.source)
    leave(world)
    return code


def _apply(path: Path, found: "Profile", source: str) -> int:
    from samestep.profiling.apply_settings import apply_settings  # noqa: PLC0415

    values = {one.setting: one.best for one in found.sweeps if one.sure}
    unsure = [one.setting for one in found.sweeps if not one.sure]
    if values:
        apply_settings(path, values, source)
        told = ", ".join(f"{key} = {value}" for key, value in values.items())
        sys.stderr.write(f"{path}: {told}\n")
    if unsure:
        sys.stderr.write(f"{path}: {', '.join(unsure)} not written, for it is not sure.\n")
    return 1 if unsure else 0


def _script(
    script: Path, flags: list[str], arguments: list[str], log: RankLog, *, module: bool = False
) -> int:
    place = flags.index("--") if "--" in flags else len(flags)
    own, theirs = flags[:place], flags[place + 1 :]
    for flag in ("--workers", "--batch-sizes", "--apply", "--config"):
        if any(given.split("=")[0] == flag for given in own):
            raise UserError(
                f"{flag} changes a recipe's settings, and {script} is a script, which has its own: "
                f"pass its arguments after `--`, and profile it once with each."
            )
    command = tyro.cli(ScriptCommand, prog=f"samestep profile {script}", args=own)
    command.check()
    if module:
        _check_module(str(script))
    name = str(script) if module else script.stem
    out = Path(os.environ.get(OUT) or command.out or new_run_path(f"profile-{name}"))
    if command.nproc > 1 and not os.environ.get(PARENT):
        os.environ[OUT] = str(out)
        return _start(command.nproc, ["profile", *arguments])
    die_with_parent()
    launch = detect_launch(os.environ)
    if launch.world_size > 1 and not os.environ.get(OUT) and command.out is None:
        raise UserError(
            f"{launch.launcher} has started {launch.world_size} ranks: name one directory for all "
            "of them with --out DIR, or let `samestep profile --nproc` start them."
        )
    return _as_rank(script, theirs, command, launch, out, log, module=module)


def _check_module(name: str) -> None:
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    finally:
        del sys.path[0]
    if found is None:
        raise UserError(
            f"There is no module {name}, seen from {Path.cwd()}. Name it as for python -m, with "
            "dots and without .py.",
            on_all_ranks=True,
        )


def _as_rank(
    script: Path,
    arguments: list[str],
    command: ScriptCommand,
    launch: Launch,
    out: Path,
    log: RankLog,
    *,
    module: bool,
) -> int:
    """Profile a script as one rank; rank 0 shows what all have found."""
    from samestep.profiling.of_script import ScriptFailed, profile_script  # noqa: PLC0415
    from samestep.profiling.script_ranks import ScriptRanks  # noqa: PLC0415
    from samestep.profiling.tracing import unwritable  # noqa: PLC0415

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    log.move_to(out)
    try:
        found = profile_script(
            script,
            arguments,
            ScriptRanks(launch),
            out,
            epoch=command.epoch,
            seconds=command.seconds,
            quiet=command.json,
            module=module,
        )
    except (ScriptFailed, UserError) as error:
        with contextlib.suppress(OSError):
            out.rmdir()  # only where nothing is in it
        if isinstance(error, UserError):
            raise
        return _failed(error, script, command)
    if found is not None:
        _save_and_show(found, as_json=command.json)
    return 0


def _failed(failure: "ScriptFailed", script: Path, command: ScriptCommand) -> int:
    """Tell of a script that failed, below its own error; return its exit code."""
    if failure.__cause__ is not None and is_lost_peer(failure.__cause__):
        raise failure.__cause__ from None  # by the failure of a rank that tells of it
    if os.environ.get(PARENT):  # which tells of it once for all ranks
        leave_for_parent(f"{failure.told(script)}\n{failure.text}".rstrip(), failure.code)
        return failure.code
    sys.stderr.write(failure.text)
    if failure.found is not None:
        _save_and_show(failure.found, as_json=command.json)
    print_error(failure.told(script))
    return failure.code


def _save_and_show(found: "Profile", *, as_json: bool) -> None:
    from samestep.profiling.profile_result import save_profile  # noqa: PLC0415
    from samestep.profiling.profile_tables import show  # noqa: PLC0415

    save_profile(found)
    if as_json:
        sys.stdout.write(json.dumps(found.as_table(), indent=2) + "\n")
    else:
        show(found, Console(highlight=False))
    sys.stdout.flush()


def _start(nproc: int, arguments: list[str]) -> int:
    from samestep.commands.target import refuse_inside_launcher  # noqa: PLC0415 - imports torch
    from samestep.ranks.start import start_ranks  # noqa: PLC0415 - imports the elastic agent

    refuse_inside_launcher(f"--nproc {nproc}", "Leave --nproc out.")
    return start_ranks(nproc, arguments, float(os.environ.get(STARTED_AT, time.time())))


def numbers(flag: str, text: str | None, *, least: int) -> tuple[int, ...]:
    """Return the numbers of a list like `0,1,2,4`.

    Raises:
        UserError: it is no such list.
    """
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise UserError(
            f"--{flag} {text}: give whole numbers from {least} on, with commas between: 1,2,4."
        )
    return tuple(sorted({int(word) for word in words}))
