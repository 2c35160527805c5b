"""What a model has to beat: the recipe's baselines, measured once, when a run ends."""

from collections.abc import Mapping
from threading import Thread
from typing import Any

import torch

from samestep.errors import UserError, defined_at
from samestep.ranks.world import World
from samestep.recipe import Recipe
from samestep.session.request import Request
from samestep.training.stopping import Agreement

_MEET_EVERY_S = 0.5

Baselines = Mapping[str, Mapping[str, float] | str]
"""Name → its metrics, or why it was not measured."""


def measure_baselines(
    request: Request, world: World, agreement: Agreement
) -> tuple[Baselines, str, int]:
    """Measure the baselines of a recipe on rank 0; every rank calls it.

    The ranks meet twice a second meanwhile: no collective waits long, and a stop signal ends it.

    Returns:
        On rank 0 what was measured, and why that failed, if it did; on all ranks the signal that
        ended the wait, or 0.
    """
    found: dict[str, Any] = {"rows": {}, "problem": ""}

    def work() -> None:
        try:
            found["rows"] = _checked(
                request.recipe, request.recipe.measure_baselines(request.options)
            )
        except UserError as error:
            found["problem"] = str(error)

    thread = Thread(target=work, daemon=True)  # a signal does not wait for it
    if world.is_main:
        thread.start()
    while True:
        if world.is_main:
            thread.join(_MEET_EVERY_S)
        busy = int(thread.is_alive())
        busy, signum = world.reduce(torch.tensor([busy, agreement.signum]), "max").tolist()
        if signum or not busy:
            return found["rows"], found["problem"], signum


def _checked(recipe: Recipe, found: Any) -> Baselines:
    """Return baselines as plain numbers.

    Raises:
        UserError: they are no dict of dicts of numbers.
    """
    rows: dict[str, Mapping[str, float] | str] = {}
    try:
        for name, told in found.items():
            rows[str(name)] = (
                told if isinstance(told, str) else {str(n): float(v) for n, v in told.items()}
            )
    except Exception as error:  # whatever a dict of the recipe's own does
        raise UserError(
            f"The recipe's baselines(){defined_at(recipe.baselines)} returned {found!r:.80}; it "
            "must return {name: {metric: number}}, or a sentence in place of the metrics."
        ) from error
    return rows


def as_result(rows: Baselines) -> dict[str, Mapping[str, float]]:
    """Return what was measured, without what was not."""
    return {name: told for name, told in rows.items() if not isinstance(told, str)}
