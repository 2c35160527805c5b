"""`samestep.runs` and `samestep.compare`: runs as data. Neither needs torch."""

from typing import Any, get_args

from samestep.base.errors import UserError
from samestep.base.run.summary import Sort, read_runs, sorted_runs
from samestep.shell.api.arguments import AnyPath, one_line_errors, path_of
from samestep.show.reporting.comparison import compare_runs
from samestep.show.reporting.comparison_text import as_table
from samestep.show.reporting.run_table import as_json


@one_line_errors
def runs(
    folder: AnyPath = "runs", *, sort: Sort = "date", recipe: str | None = None
) -> list[dict[str, Any]]:
    """Return the runs in a folder, as `samestep runs --json` has them: a dict each.

    Args:
        folder: the folder of run directories; damaged ones are listed as damaged.
        sort: "date", "name", "recipe", "state", "metric" (the best first) or "duration".
        recipe: return only the runs of this recipe.

    Raises:
        UserError: there is no such folder, or it is a run itself.
    """
    if sort not in get_args(Sort):
        raise UserError(f"sort={sort!r}: it must be one of {', '.join(get_args(Sort))}.")
    found = [run for run in read_runs(path_of(folder, "folder")) if recipe in (None, run.recipe)]
    return [as_json(run) for run in sorted_runs(found, sort)]


@one_line_errors
def compare(
    *runs: AnyPath, metric: str | None = None, target: float | None = None, any_recipe: bool = False
) -> dict[str, Any]:
    """Return runs side by side, as `samestep compare --json` has them.

    `same_training` says for each run but the first whether its losses equal those of the first;
    `settings` has what differs, `by_samples` and `by_seconds` the curves.

    Args:
        runs: two runs or more, or their directories. A running or damaged one is read as far as
            possible.
        metric: a metric of the validation set ("loss", "accuracy" …), or "train_loss".
        target: report when the metric first reached this value.
        any_recipe: whether runs of different recipes may be compared.

    Raises:
        UserError: one is not a run, or they have nothing in common.
    """
    paths = [path_of(run, "a run") for run in runs]
    return as_table(compare_runs(paths, metric, target, any_recipe=any_recipe))
