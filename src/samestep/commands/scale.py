"""`samestep scale`: what more ranks are worth here, measured."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from samestep.commands.help import examples
from samestep.commands.target import (
    check_named,
    general_help,
    names_given,
    parse,
    refuse_inside_launcher,
)
from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.ranks.failure import PARENT, STARTED_AT, die_with_parent, run_as_rank
from samestep.ranks.world import find_world, join, leave
from samestep.scale import scaling_tables as shown
from samestep.scale.analysis import analyse
from samestep.scale.study import MeasurementTask, Mode, parse_ranks, plan_study, run_study
from samestep.settings import Settings, flag_name
from samestep.training.stopping import catch_signals

_EXAMPLES = """\
examples:
  samestep scale spiral --nproc 1,2,4
  samestep scale my_recipe.py --nproc 1,2 --mode strong --json
"""
# In the environment of ranks that are started: what to measure, as JSON.
_TASK = "SAMESTEP_SCALE_TASK"
_LOOK_S = 0.5
# What a measurement decides by itself.
_DECIDED = ("epochs", "max_steps", "patience", "monitor")


@dataclass(frozen=True)
class Command:
    """What this command itself takes, beside the settings."""

    config: Path | None = None
    """TOML file of settings and options; flags win over it."""
    nproc: str = "1,2,4"
    """Numbers of ranks to start on this machine, one after the other."""
    mode: Literal["weak", "strong", "both"] = "both"
    """Keep the batch of a rank (weak), or the global batch (strong)."""
    seconds: float = 1.5
    """Of training in each measurement, after warming up."""
    rounds: int = 3
    """How often everything is measured, in turn."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object."""


@dataclass(frozen=True, kw_only=True)
class _Settings(Settings):
    """The settings, where `--mode` is this command's: nothing is monitored here."""

    mode: Annotated[
        Literal["auto", "min", "max"], tyro.conf.arg(name="monitor-mode"), tyro.conf.Suppress
    ] = field(default="auto")


def main(arguments: list[str]) -> int:
    """Run the verb: on a rank, measure; else start ranks and tell what they found."""
    measures = os.environ.get(PARENT) and os.environ.get(_TASK)
    return run_as_rank(lambda _log: _rank(arguments) if measures else _parent(arguments))


def _parent(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(general_help("scale", "Measure how training scales.", _EXAMPLES))
        return 0 if arguments else 2
    # What a recipe prints when it is read would stand before the JSON object.
    wants_help = bool({"-h", "--help"} & set(arguments))
    with examples(_EXAMPLES), redirect_stdout(sys.stdout if wants_help else sys.stderr):
        command, request = _parse(arguments)
    _check(command, request, arguments)
    folder = request.settings.run_dir
    if folder is not None:
        return _scale(command, request, arguments, _empty(Path(folder)))
    with tempfile.TemporaryDirectory(prefix="samestep-scale-") as temporary:
        return _scale(command, request, arguments, Path(temporary))


def _scale(command: Command, request: Request, arguments: list[str], folder: Path) -> int:
    from samestep.ranks.start import own_signals, start_ranks  # noqa: PLC0415 - imports the elastic agent

    modes: Sequence[Mode] = ("weak", "strong") if command.mode == "both" else (command.mode,)
    study = plan_study(request.settings, parse_ranks(command.nproc), modes)

    busy = _busy_cores()

    def launch(ranks: int, task: MeasurementTask) -> None:
        os.environ[_TASK] = msgspec.json.encode(task).decode()
        with own_signals():
            code = start_ranks(ranks, ["scale", *arguments], time.time())
        if code:
            raise SystemExit(code)  # what went wrong has been told

    study, found = run_study(
        study, folder, rounds=command.rounds, seconds=command.seconds, launch=launch, tell=_tell
    )
    told = analyse(request.recipe.name, study, found, modes, command.seconds, busy)
    text = shown.as_json(told) if command.json else "\n".join(shown.lines(told))
    sys.stdout.write(text + "\n")
    return 0


def _busy_cores() -> float:
    """Return how many cores other work keeps busy; this process only waits meanwhile."""
    import psutil  # noqa: PLC0415 - ranks do not ask

    return float(psutil.cpu_percent(_LOOK_S)) / 100 * (psutil.cpu_count() or 1)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _rank(arguments: list[str]) -> int:
    """Measure, as one rank of the world that the environment describes."""
    from samestep.scale.measure import measure  # noqa: PLC0415 - the parent trains nothing

    os.dup2(2, 1)  # standard output is the report's
    die_with_parent()
    _, request = _parse(arguments)
    task = msgspec.json.decode(os.environ[_TASK], type=MeasurementTask)
    world = find_world(request.settings.device, request.settings.backend)
    join(world)
    started_at = float(os.environ.get(STARTED_AT, time.time()))
    signum = 0
    with catch_signals() as received:
        for sizes in task.setups:
            signum = measure(request, world, received, sizes, task.seconds, started_at)
            if signum:
                break
    leave(world)
    return 128 + signum if signum else 0


def _parse(arguments: list[str]) -> tuple[Command, Request]:
    target, *flags = arguments
    check_named(target, "train")
    about = "Measure how training {} scales with the number of ranks."
    return parse(target, flags, verb="scale", about=about, kind=Command, settings=_own)


def _own(settings: Settings) -> _Settings:
    return _Settings(**{f.name: getattr(settings, f.name) for f in fields(Settings)})


def _check(command: Command, request: Request, arguments: list[str]) -> None:
    given = names_given(arguments[1:])
    for name in _DECIDED:
        if name in given:
            raise UserError(
                f"--{flag_name(name)} has no effect on a measurement: --seconds says how long each "
                "takes, and nothing is evaluated. Leave it out."
            )
    parse_ranks(command.nproc)
    if request.settings.engine != "native":
        raise UserError("samestep scale measures samestep's own loop: leave --engine out.")
    if not 0 < command.seconds < float("inf"):
        raise UserError(f"--seconds is {command.seconds}; it must be greater than 0.")
    if command.rounds < 1:
        raise UserError(f"--rounds is {command.rounds}; it must be 1 or more.")
    refuse_inside_launcher("samestep scale", "Start it as one process.")


def _empty(folder: Path) -> Path:
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise UserError(f"--run-dir {folder} is not empty; name a new directory.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--run-dir {folder} cannot be used: {error.strerror}.") from error
    return folder
