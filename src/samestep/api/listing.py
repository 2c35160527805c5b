"""`samestep.runs`: the runs in a folder, as data."""

from typing import Any, get_args

from samestep.api.one_line import one_line
from samestep.api.paths import AnyPath, path_of
from samestep.errors import UserError
from samestep.run.summary import Sort, read_runs, sorted_runs
from samestep.screen.run_table import as_json


@one_line
def runs(
    folder: AnyPath = "runs", *, sort: Sort = "date", recipe: str | None = None
) -> list[dict[str, Any]]:
    """Return the runs in a folder, as `samestep runs --json` has them: a dict each.

    Args:
        folder: it holds run directories; damaged ones are told as such.
        sort: "date", "name", "recipe", "state", "metric" (the best first) or "duration".
        recipe: return the runs of this recipe alone.

    Raises:
        UserError: there is no such folder, or it is a run itself.
    """
    if sort not in get_args(Sort):
        raise UserError(f"sort={sort!r}: it must be one of {', '.join(get_args(Sort))}.")
    found = [run for run in read_runs(path_of(folder, "folder")) if recipe in (None, run.recipe)]
    return [as_json(run) for run in sorted_runs(found, sort)]
