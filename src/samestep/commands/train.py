"""`samestep train`: a recipe, a recipe file or a run, on whatever this is started on."""

import dataclasses
import itertools
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from samestep.commands.help import examples
from samestep.config import Draft, Request, draft, finish
from samestep.errors import UserError
from samestep.failure import PARENT, STARTED_AT, die_with_parent, let_rank_0_speak, rank_of, report
from samestep.rank_log import RankLog
from samestep.recipe import recipe_names
from samestep.screen import Screen
from samestep.session import NATIVE, Engine, run_session
from samestep.settings import Settings
from samestep.training.stopping import catch_signals
from samestep.world import abandon, find_world, join, leave

_EXAMPLES = """\
examples:
  samestep train spiral --epochs 10 --lr 0.01
  samestep train runs/ID --resume --nproc 2
"""


@dataclass(frozen=True)
class Command:
    """What this command itself takes, beside the settings."""

    config: Path | None = None
    """TOML file of settings and options; flags win over it."""
    nproc: int = 1
    """Ranks to start on this machine."""
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on from the newest whole checkpoint of the run."""


def main(arguments: list[str]) -> int:
    """Run the verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return _general_help(arguments)
    log = RankLog(rank_of())
    try:
        known = arguments[0] in recipe_names()
        with examples(_EXAMPLES.replace("spiral", arguments[0]) if known else _EXAMPLES):
            return _train(arguments, log)
    except BrokenPipeError:
        raise  # the reader of the output has left, as `head` does
    except SystemExit:
        let_rank_0_speak(log.rank)
        raise
    except Exception as error:
        code = report(error, log)
        abandon(code)
        return code


def _train(arguments: list[str], log: RankLog) -> int:
    target, *flags = arguments
    if target.startswith("-"):
        raise UserError(
            f"Name what to train before {target}: a recipe ({', '.join(recipe_names())}), a "
            "recipe file, or the directory of a run."
        )
    command, request = parse(target, flags)
    if command.nproc < 1:
        raise UserError(f"--nproc is {command.nproc}; it must be 1 or more.")
    started_at = float(os.environ.get(STARTED_AT, time.time()))
    if command.nproc > 1 and not os.environ.get(PARENT):
        from samestep.ranks import start_ranks  # noqa: PLC0415 - imports the elastic agent

        _refuse_inside_launcher(command.nproc)
        return start_ranks(command.nproc, ["train", *arguments], started_at)
    die_with_parent()
    return _run_rank(request, log, started_at)


def parse(target: str, flags: list[str]) -> tuple[Command, Request]:
    """Return the command and the request that these flags make of a target.

    Raises:
        UserError: anything in them is wrong.
        SystemExit: 2 for a flag that is unknown or ill-typed, 0 after --help.
    """
    start = draft(target, config_of(flags))
    kinds: list[tuple[str, Any]] = [("command", Command), ("settings", Settings)]
    defaults: dict[str, Any] = {"command": Command(), "settings": start.settings()}
    if start.recipe.options:
        kinds.append(("recipe", start.recipe.options))
        defaults["recipe"] = start.options()
    form = dataclasses.make_dataclass("Train", kinds, frozen=True)
    form.__doc__ = f"Train {start.recipe.name}: the same step on one process and on many."
    parsed = tyro.cli(
        form,
        prog=f"samestep train {target}",
        args=flags,
        default=form(**defaults),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    request = finish(
        start,
        parsed.settings,
        getattr(parsed, "recipe", None),
        given=names_given(flags),
        resume=parsed.command.resume,
    )
    _check_resume(start, request)
    return parsed.command, request


def config_of(flags: list[str]) -> Path | None:
    """Return the TOML file among the flags: it decides what the other flags' defaults are."""
    config = None  # the last one counts, as for every flag
    for flag, following in itertools.pairwise([*flags, ""]):
        if flag == "--config" and following:
            config = Path(following)
        if flag.startswith("--config="):
            config = Path(flag.removeprefix("--config="))
    return config


def names_given(flags: list[str]) -> set[str]:
    """Return the names of the settings and options that are among the flags."""
    names = {f.removeprefix("--").split("=")[0].replace("-", "_") for f in flags if f[:2] == "--"}
    return names | {name.removeprefix("no_") for name in names}


def _check_resume(start: Draft, request: Request) -> None:
    if request.resume and start.run is None and request.settings.run_dir is None:
        raise UserError(
            "--resume needs a run: samestep train runs/ID --resume, or --run-dir DIR to begin "
            "there and go on there whenever the command is repeated."
        )


def _refuse_inside_launcher(nproc: int) -> None:
    from samestep.launch import detect_launch  # noqa: PLC0415

    launch = detect_launch(os.environ)
    if launch.world_size > 1:
        raise UserError(
            f"--nproc {nproc} starts ranks itself, but {launch.launcher} has already started "
            f"{launch.world_size}. Leave --nproc out."
        )


def _general_help(arguments: list[str]) -> int:
    sys.stdout.write(
        "usage: samestep train TARGET [flags]\n\n"
        f"TARGET is a recipe ({', '.join(recipe_names())}), a recipe file (my_recipe.py), or the "
        "directory of a run.\n`samestep train TARGET --help` shows all its flags.\n\n" + _EXAMPLES
    )
    return 0 if arguments else 2


def _run_rank(request: Request, log: RankLog, started_at: float) -> int:
    """Train as one rank of the world that the environment describes."""
    engine = _engine(request.settings)
    world, launch = find_world(request.settings.device, request.settings.backend)
    join(world, launch)
    screen = Screen()
    with catch_signals() as received, screen:
        outcome = run_session(
            request, world, received=received, show=screen.show, begin=log.move_to,
            started_at=started_at, engine=engine,
        )  # fmt: skip
    # Before the ranks part: a launcher may end all with the first that leaves with a signal's code.
    if world.is_main:
        screen.result(outcome.path, json.loads((outcome.path / "result.json").read_text()))
        sys.stdout.flush()
    leave(world)
    return 128 + outcome.signum if outcome.signum else 0


def _engine(settings: Settings) -> Engine:
    if settings.engine == "native":
        return NATIVE
    from samestep.lightning.engine import LIGHTNING, check_settings  # noqa: PLC0415 - an extra

    check_settings(settings)
    return LIGHTNING
