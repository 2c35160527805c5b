"""`samestep doctor`: check this machine, or every node of an allocation, for training."""

import os
import sys
from dataclasses import dataclass

from samestep.base.errors import UserError
from samestep.cluster.doctor.findings import worst
from samestep.cluster.doctor.rank_facts import DoctorOptions, still_waiting
from samestep.launch.ranks.process import RankLog, print_error, run_as_rank
from samestep.shell.api.arguments import check_positive
from samestep.shell.commands.forms import Form, Switch, parse, rich_console


@dataclass(frozen=True, kw_only=True)
class DoctorFlags(DoctorOptions):
    """Check this machine; started on several ranks, check every node and their network."""

    json: Switch = False
    """Print one JSON object instead of the table."""


FORM = Form(
    verb="doctor",
    kind=DoctorFlags,
    examples=(
        "doctor",
        "srun --nodes=2 --ntasks-per-node=4 samestep doctor --run-dir /shared/runs",
    ),
)


def main(arguments: list[str]) -> int:
    """Return 0 if nothing is red, 1 if something is, 2 for a mistake in the command."""
    code = run_as_rank(lambda log: _doctor(arguments, log))
    if still_waiting():  # PyTorch may abort while one of its threads is still connecting
        sys.stdout.flush()
        os._exit(code)
    return code


def _doctor(arguments: list[str], log: RankLog) -> int:
    command: DoctorFlags = parse(FORM, arguments)
    if command.recipe is not None and command.recipe.suffix != ".py":
        raise UserError(
            f"{command.recipe} is not a recipe file: its name must end in .py. Omit built-in "
            "recipes: doctor always compares samestep's own source."
        )
    check_positive(timeout_s=command.timeout_s, budget_s=command.budget_s)
    if command.num_workers is not None and command.num_workers < 0:
        raise UserError(f"--num-workers is {command.num_workers}; it must be 0 or more.")
    from samestep.cluster.doctor.between_ranks import CutOffError  # noqa: PLC0415 - imports torch
    from samestep.cluster.doctor.diagnosis import diagnose, print_report  # noqa: PLC0415

    try:
        diagnosis = diagnose(command)
    except CutOffError as error:
        if str(error):
            print_error(str(error), log.terminal)
        return 1
    if diagnosis is None:
        return 0
    if command.json:
        print(diagnosis.as_json())  # noqa: T201
    else:
        print_report(diagnosis, rich_console())
    return 1 if worst(diagnosis.findings) == "red" else 0
