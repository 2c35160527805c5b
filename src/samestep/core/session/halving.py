"""Successive halving: of a sweep's trainings only the best of those that came as far continue.

ASHA of Li et al. 2018, "A System for Massively Parallel Hyperparameter Tuning", in the form that
stops a training instead of pausing it: no training waits, so the first to come to a rung continues.
"""

import math
from collections.abc import Callable
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.run.directory import SWEEP
from samestep.base.run.files import cannot_write, write_text
from samestep.launch.ranks.world import World

_RUNGS = ".rungs"
"""In the sweep's folder: the monitored metric of each training at each rung."""


def check_halving(run: Path) -> None:
    """Raise UserError if a run that halves is not a training of a sweep."""
    if not (run.parent / SWEEP).is_file():
        raise UserError(
            f"--halving compares the trainings of a sweep, and {run} is not part of one. Use "
            "`samestep sweep`, or leave --halving out.",
            flags=["halving"],
        )


def halving_of(run: Path, factor: int, mode: str, world: World) -> Callable[[int, float], bool]:
    """Return the function that says after an evaluation whether to stop.

    All ranks call it with the number of the evaluation, of those after epochs, and the monitored
    metric. With the factor N, 1, N, N², … are rungs; there only the best 1/N so far continue.
    """
    sign = 1.0 if mode == "min" else -1.0

    def is_hopeless(number: int, metric: float) -> bool:
        if not _is_rung(number, factor):
            return False
        value = math.inf if math.isnan(metric) else sign * metric
        return world.on_main(lambda: not _goes_on(run, number, value, factor))

    return is_hopeless


def _is_rung(number: int, factor: int) -> bool:
    while number > 1 and number % factor == 0:
        number //= factor
    return number == 1


def _goes_on(run: Path, number: int, value: float, factor: int) -> bool:
    rung = run.parent / _RUNGS / str(number)
    try:
        rung.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(rung, error) from error
    write_text(rung / run.name, repr(value))
    values = [float(path.read_text()) for path in rung.iterdir() if not path.name.startswith(".")]
    return sum(other < value for other in values) < max(1, len(values) // factor)
