"""`samestep.runs` and `samestep.compare`: runs as data. Neither needs torch."""

from typing import Annotated, Any, get_args

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.shell.api.arguments import AnyPath, SeveralRuns, one_line_errors, path_of
from samestep.show.reporting.run_table import Sort, as_json, read_runs, sorted_runs


@one_line_errors
def runs(
    folder: Annotated[AnyPath, InShell("FOLDER")] = "runs",
    *,
    sort: Sort = "date",
    recipe: str | None = None,
) -> list[dict[str, Any]]:
    """Return the runs in a folder, as `samestep runs --json` has them: a dict each.

    Args:
        folder: Folder that holds the runs; damaged ones are listed as damaged.
        sort: Order of the list. metric: best first; duration: longest first; date: newest first.
        recipe: List only the runs of this recipe.

    Raises:
        UserError: there is no such folder, or it is a run itself.
    """
    if sort not in get_args(Sort):
        raise UserError(f"sort={sort!r}: it must be one of {', '.join(get_args(Sort))}.")
    there = read_runs(path_of(folder, "folder"))
    listed = [run for run in there if recipe in (None, run.recipe)]
    return [as_json(run) for run in sorted_runs(listed, sort)]


@one_line_errors
def compare(
    *runs: SeveralRuns,
    metric: str | None = None,
    target: float | None = None,
    any_recipe: bool = False,
) -> dict[str, Any]:
    """Return runs side by side, as `samestep compare --json` has them.

    `same_training` says for each run but the first whether its losses equal those of the first;
    `settings` has what differs, `by_samples` and `by_seconds` the curves.

    Args:
        runs: Directories of two or more runs. Running and damaged runs are read as far as possible.
        metric: Metric to compare: one of the validation set (loss, accuracy …), or train_loss; by
            default accuracy, else loss.
        target: Show when the metric first reached this value.
        any_recipe: Also compare runs of different recipes.

    Raises:
        UserError: one is not a run, or they have nothing in common.
    """
    from samestep.show.reporting.comparison import compare_runs  # noqa: PLC0415 - not for `runs`
    from samestep.show.reporting.comparison_text import as_table  # noqa: PLC0415

    paths = [path_of(run, "a run") for run in runs]
    return as_table(compare_runs(paths, metric, target, any_recipe=any_recipe))
