"""`samestep.verify`: is it the same training on one process and on many, as data."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.file_kinds import loop_of
from samestep.core.recipe import Recipe
from samestep.launch.ranks.keeper import Elastic
from samestep.launch.ranks.nproc import refuse_inside_launcher
from samestep.launch.ranks.start import Ended, run_ranks
from samestep.prove.verification.result_table import as_table
from samestep.prove.verification.verify_loop import verify_loop
from samestep.prove.verification.verify_recipe import MOST_RANKS, VerifyOptions, verify_recipe
from samestep.shell.api.arguments import AnyPath, one_line_errors
from samestep.shell.api.call import (
    AnyRecipe,
    as_in_fresh_process,
    call_of,
    check_may_start,
    request_of,
    with_settings,
)
from samestep.shell.api.sending import CALL_FILE, send


@with_settings
@one_line_errors
def verify(
    what: AnyPath | Recipe,
    *,
    nproc: Sequence[int] | int | None = None,
    quick: bool = False,
    accept: Sequence[str] = (),
    tolerance: float | None = None,
    recipe: AnyRecipe = None,
    config: AnyPath | None = None,
    arguments: Sequence[str] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Return whether a recipe trains the same on one process and on many, as `verify --json` says.

    `same` is the answer; each of `checks` has a name, a status, what differs, and its likely cause.
    It starts its own ranks and takes about half a minute.

    Args:
        what: a recipe: its name, its file, or a `samestep.Recipe`; the directory of a run; or a
            script with a loop of its own, which opens a run.
        nproc: numbers of ranks to compare, by default 1, 2 and 3; 1 is always among them.
        quick: whether to leave out the checks that take longest.
        accept: what differs by intent: "batchnorm", "dropout".
        tolerance: compare only the losses, up to this relative difference.
        recipe: the recipe of that run, if the run names no file.
        config: a TOML file of settings and options.
        arguments: those of the script, if it has a loop of its own.
        settings: settings, and options of the recipe.

    Raises:
        UserError: it cannot be done, or the recipe cannot be trained in one process.
        KeyboardInterrupt: it was interrupted; the ranks have ended.
    """
    check_may_start("verify")
    refuse_inside_launcher("samestep.verify()", "Call it from a single process.")
    nproc = settings.pop("world_sizes", nproc)  # its old name, for one more release
    call = call_of(what, recipe, keywords=settings, config=config)
    script = None if call.target is None else loop_of(call.target)
    if given := [*settings, *["config"] * (config is not None)] if script is not None else []:
        raise UserError(
            f"{', '.join(given)}: {script} is not a recipe. Give it its own arguments=(…)."
        )
    if script is None and arguments:
        raise UserError("arguments= are those of a script that opens a run; this is a recipe.")
    sizes = (nproc,) if isinstance(nproc, int) else nproc
    sizes = sizes if sizes is None else tuple(sizes)  # which may be read only once
    if sizes is not None and not (
        sizes and all(isinstance(n, int) and 1 <= n <= MOST_RANKS for n in sizes)
    ):
        raise UserError(
            f"nproc={nproc!r}: give whole numbers from 1 to {MOST_RANKS}, as (1, 2, 4)."
        )
    options = VerifyOptions(
        sizes=None if sizes is None else tuple(sorted({*sizes})),
        quick=quick,
        accept=(accept,) if isinstance(accept, str) else tuple(accept),
        tolerance=tolerance,
    )
    if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance > 0):
        raise UserError(f"tolerance={tolerance!r}: it must be greater than 0.")
    with as_in_fresh_process(), tempfile.TemporaryDirectory(prefix="samestep-") as folder:
        if script is not None:
            words = ["verify", str(script)]
            loop = lambda number, path, _device: run_ranks(number, words, str(path))  # noqa: E731
            return as_table(verify_loop(script, [*map(str, arguments)], options, loop))
        request, file = request_of(call, "verify"), Path(folder, "call")

        def launch(number: int, path: Path, device: str, elastic: Elastic | None = None) -> Ended:
            send(replace(call, keywords={**settings, "device": device}), file)
            return run_ranks(number, ["verify", CALL_FILE, str(file)], str(path), elastic)

        def keep(number: int, path: Path, device: str) -> Ended:
            return launch(number, path, device, Elastic(most=number, replaces=False))

        found = verify_recipe(request, options, launch, given=settings.keys(), keep=keep)
        return as_table(found)
