"""`samestep scale`: measure the speed-up from more ranks on this machine."""

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import psutil

from samestep.base.errors import AlreadyTold, UserError
from samestep.launch.ranks.nproc import check_ranks, refuse_inside_launcher
from samestep.launch.ranks.process import STARTED_AT, TASK, run_as_rank
from samestep.shell.api.arguments import check_positive, numbers
from samestep.shell.commands.forms import Form, Numbers, Switch
from samestep.shell.commands.target import parse_target

if TYPE_CHECKING:
    from samestep.prove.profiling.scaling_study import Mode

_MOST_RANKS = 64
_LOOK_S = 0.5


@dataclass(frozen=True)
class ScaleFlags:
    """Measure how training {} scales with the number of ranks."""

    config: Path | None = None
    """TOML or YAML file of settings and options; flags win over it."""
    nproc: Numbers = "1,2,4"
    """Numbers of ranks to start on this machine, one after the other."""
    mode: Literal["weak", "strong", "both"] = "both"
    """Keep the batch size per rank (weak), or the global batch size (strong)."""
    seconds: float = 1.5
    """Seconds of training per measurement, after the warm-up."""
    rounds: int = 3
    """How many times to repeat the whole series of measurements."""
    json: Switch = False
    """Print one JSON object."""


FORM = Form(
    verb="scale",
    kind=ScaleFlags,
    examples=("scale spiral --nproc 1,2,4", "scale my_recipe.py --nproc 1,2 --mode strong --json"),
    settings=True,
    # A measurement ends after --seconds, and evaluates nothing.
    no_effect=("epochs", "max_steps", "patience", "monitor", "stop_monitor"),
)


def main(arguments: list[str]) -> int:
    """On a rank, measure; else start ranks and report their measurements."""
    run = _rank if TASK in os.environ else _scale
    return run_as_rank(lambda _log: run(arguments))


def _scale(arguments: list[str]) -> int:
    command, request = parse_target(FORM, arguments)
    from samestep.launch.ranks.start import start_ranks  # noqa: PLC0415
    from samestep.prove.profiling.scaling_study import MeasurementTask, plan_study, run_study  # noqa: PLC0415 - the help needs no torch
    from samestep.prove.profiling.speed_up import analyse, report_lines  # noqa: PLC0415

    sizes = parse_ranks(command.nproc)
    if request.settings.engine != "native":
        raise UserError("samestep scale measures samestep's own loop: leave --engine out.")
    check_positive(seconds=command.seconds, rounds=command.rounds)
    refuse_inside_launcher("samestep scale", "Start it as one process.")
    check_ranks(max(sizes), oversubscribe=request.settings.oversubscribe)
    modes: Sequence[Mode] = ("weak", "strong") if command.mode == "both" else (command.mode,)

    def launch(ranks: int, task: MeasurementTask) -> None:
        os.environ[STARTED_AT] = str(time.time())
        if code := start_ranks(ranks, ["scale", *arguments], msgspec.json.encode(task).decode()):
            raise AlreadyTold(code)

    with tempfile.TemporaryDirectory(prefix="samestep-scale-") as temporary:
        folder = Path(request.settings.run_dir or temporary)
        try:
            if folder.is_dir() and any(folder.iterdir()):
                raise UserError(f"--run-dir {folder} is not empty; name a new directory.")
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--run-dir {folder} cannot be used: {error.strerror}.") from error
        study = plan_study(request.settings, sizes, modes)
        # Cores busy with other work: this process only waits.
        busy = psutil.cpu_percent(_LOOK_S) / 100 * (psutil.cpu_count() or 1)
        study, measurements = run_study(
            study,
            folder,
            rounds=command.rounds,
            seconds=command.seconds,
            launch=launch,
            progress=lambda line: print(line, file=sys.stderr, flush=True),  # noqa: T201
        )
    report = analyse(request.recipe.name, study, measurements, modes, command.seconds, busy)
    text = report.as_json() if command.json else "\n".join(report_lines(report))
    sys.stdout.write(text + "\n")
    return 0


def _rank(arguments: list[str]) -> int:
    """Measure, as one rank of the world that the environment describes."""
    from samestep.core.training.stopping import catch_signals  # noqa: PLC0415
    from samestep.launch.ranks.world import find_world, join, leave  # noqa: PLC0415
    from samestep.prove.profiling.scaling_study import MeasurementTask, measure  # noqa: PLC0415

    os.dup2(2, 1)  # standard output is the report's
    _, request = parse_target(FORM, arguments)
    task = msgspec.json.decode(os.environ[TASK], type=MeasurementTask)
    settings = request.settings
    world = find_world(settings.device, settings.backend, oversubscribe=settings.oversubscribe)
    join(world, settings.timeout_s)
    started_at = float(os.environ.get(STARTED_AT, time.time()))
    with catch_signals() as received:
        setups = (
            measure(request, world, received, sizes, task.seconds, started_at)
            for sizes in task.setups
        )
        signum = next(filter(None, setups), 0)
    leave(world)
    return 128 + signum if signum else 0


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in a list like `1,2,4`, ascending; two at least."""
    sizes = numbers("nproc", text, most=_MOST_RANKS)
    if len(sizes) == 1:
        example = f"1,{text}" if sizes[0] > 1 else "1,2"
        raise UserError(f"--nproc {text} is one size. List two or more: --nproc {example}.")
    return sizes
