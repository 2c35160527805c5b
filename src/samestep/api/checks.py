"""`samestep.verify` and `samestep.compare`: is it the same training, as data."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.api.as_before import as_before
from samestep.api.asked import asked_of, request_of, with_settings
from samestep.api.checkpoints import AnyRecipe
from samestep.api.one_line import one_line
from samestep.api.paths import AnyPath, path_of
from samestep.api.place import check_place
from samestep.api.sent import SENT, Sent, send
from samestep.comparison import as_json
from samestep.comparison.side_by_side import compare_runs
from samestep.errors import UserError
from samestep.ranks.nproc import refuse_inside_launcher
from samestep.ranks.start import Ended, run_ranks
from samestep.recipe import Recipe
from samestep.verification.result_output import as_table
from samestep.verification.verifying import MOST_RANKS, Wanted, verify_request


@with_settings
@one_line
def verify(
    what: str | os.PathLike[str] | Recipe,
    *,
    world_sizes: Sequence[int] | int | None = None,
    quick: bool = False,
    accept: Sequence[str] = (),
    tolerance: float | None = None,
    recipe: AnyRecipe = None,
    config: AnyPath | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Return whether a recipe trains the same on one process and on many, as `verify --json` says.

    `same` is the answer; each of `checks` has a name, a status, what differs, and its likely cause.
    It starts ranks of its own, and takes about half a minute.

    Args:
        what: a recipe: its name, its file, or a `samestep.Recipe`; or the directory of a run.
        world_sizes: numbers of ranks to compare, by default 1, 2 and 3; 1 is always among them.
        quick: whether to leave out what takes longest.
        accept: what may differ by intent: "batchnorm", "dropout".
        tolerance: compare losses alone, up to this relative difference.
        recipe: the recipe of that run, where the run names no file of it.
        config: a TOML file of settings and options.
        settings: settings, and options of the recipe.

    Raises:
        UserError: it cannot be done, or the recipe cannot be trained in one process.
        KeyboardInterrupt: it was interrupted; the ranks have ended.
    """
    check_place("verify")
    refuse_inside_launcher("samestep.verify()", "Call it in a process that is alone.")
    given = dict(settings)
    if "nproc" in given:
        raise UserError("verify() takes no nproc: name numbers of ranks, world_sizes=(1, 2).")
    asked = asked_of(what, recipe, keywords=given, config=None if config is None else Path(config))
    wanted = Wanted(
        sizes=None if world_sizes is None else _sizes(world_sizes),
        quick=quick,
        accept=(accept,) if isinstance(accept, str) else tuple(accept),
        tolerance=tolerance,
    )
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance > 0):
        raise UserError(f"tolerance={tolerance!r}: it must be greater than 0.")
    with as_before(), tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        request, call = request_of(asked, "verify"), Path(folder, "call")

        def launch(number: int, path: Path, device: str) -> Ended:
            send(Sent(asked=replace(asked, keywords={**given, "device": device})), call)
            return run_ranks(number, ["verify", SENT, str(call)], str(path))

        return as_table(verify_request(request, wanted, launch, given=given.keys()))


def _sizes(given: Sequence[int] | int) -> tuple[int, ...]:
    asked = [given] if isinstance(given, int) else list(given)
    whole = all(isinstance(size, int) and 1 <= size <= MOST_RANKS for size in asked)
    if not asked or not whole:
        raise UserError(
            f"world_sizes={given!r}: give whole numbers from 1 to {MOST_RANKS}, as (1, 2, 4)."
        )
    return tuple(sorted({*asked}))


@one_line
def compare(
    *runs: AnyPath, metric: str | None = None, target: float | None = None, any_recipe: bool = False
) -> dict[str, Any]:
    """Return runs side by side, as `samestep compare --json` has them.

    `same_training` says of each run but the first whether its losses are those of the first;
    `settings` has what differs, `by_samples` and `by_seconds` the curves.

    Args:
        runs: two runs or more, or their directories; a running or damaged one is read as far as it
            goes.
        metric: of the validation set ("loss", "accuracy" …), or "train_loss".
        target: tell when the metric was first at this value, or beyond.
        any_recipe: whether runs of different recipes may be compared.

    Raises:
        UserError: one is no run, or they have nothing in common.
    """
    paths = [path_of(run, "a run") for run in runs]
    return as_json.as_table(compare_runs(paths, metric, target, any_recipe=any_recipe))
