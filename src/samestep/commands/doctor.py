"""`samestep doctor`: what this machine, or every node of an allocation, lacks for training."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from tyro.conf import FlagCreatePairsOff, Positional, arg

from samestep.commands.help import examples
from samestep.doctor.between_ranks import CutOffError, Request
from samestep.doctor.bounded import still_waiting
from samestep.doctor.check import worst
from samestep.doctor.diagnosis import diagnose
from samestep.doctor.report import as_json, show
from samestep.errors import UserError
from samestep.ranks.failure import print_error
from samestep.ranks.log import RankLog
from samestep.ranks.process import run_as_rank
from samestep.ranks.world import Backend, Device

_EXAMPLES = """\
examples:
  samestep doctor
  srun --nodes=2 --ntasks-per-node=4 samestep doctor --run-dir /shared/runs
"""


@dataclass(frozen=True, kw_only=True)
class _Doctor:
    """Check this machine; started on several ranks, check every node and what lies between."""

    target: Annotated[Positional[Path | None], arg(metavar="[RECIPE.py]")] = None
    """A recipe file, which must be the same for every rank."""
    run_dir: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Where runs will be written; the directory of a run gives its checkpoints' size and more."""
    num_workers: int | None = None
    """Loader workers per rank in training; by default the run's, or 0."""
    json: Annotated[bool, FlagCreatePairsOff] = False
    """Print one JSON object in place of the table."""
    timeout_s: float = 30.0
    """Seconds to wait for the other ranks."""
    budget_s: float = 20.0
    """Seconds that the all-reduce's measurements may take."""
    device: Device = "auto"
    """Where training will be; auto takes the best device here."""
    backend: Backend = "auto"
    """What connects the ranks; auto chooses by platform and device."""


def main(arguments: list[str]) -> int:
    """Run the verb: 0 if nothing is red, 1 if something is, 2 for a mistake in the command."""
    code = run_as_rank(lambda log: _doctor(_parse(arguments), log))
    if still_waiting():  # PyTorch may abort where a thread of its is still connecting
        sys.stdout.flush()
        os._exit(code)
    return code


def _parse(arguments: list[str]) -> _Doctor:
    with examples(_EXAMPLES):
        command = tyro.cli(_Doctor, prog="samestep doctor", args=arguments)
    if command.target is not None and command.target.suffix != ".py":
        raise UserError(
            f"{command.target} is no recipe file, whose name ends in .py. The recipes of samestep "
            "itself need none: that its source is the same everywhere is always looked at."
        )
    for name, value in (("timeout-s", command.timeout_s), ("budget-s", command.budget_s)):
        if not 0 < value < float("inf"):
            raise UserError(f"--{name} is {value}; it must be greater than 0.")
    if command.num_workers is not None and command.num_workers < 0:
        raise UserError(f"--num-workers is {command.num_workers}; it must be 0 or more.")
    return command


def _doctor(command: _Doctor, log: RankLog) -> int:
    try:
        found = diagnose(
            Request(
                recipe=command.target,
                run_dir=command.run_dir,
                num_workers=command.num_workers,
                timeout_s=command.timeout_s,
                budget_s=command.budget_s,
                device=command.device,
                backend=command.backend,
            )
        )
    except CutOffError as error:
        if str(error):
            print_error(str(error), log.terminal)
        return 1
    if found is None:
        return 0
    if command.json:
        print(as_json(found))  # noqa: T201
    else:
        show(found, Console(highlight=False))
    return 1 if worst(found.findings) == "red" else 0
