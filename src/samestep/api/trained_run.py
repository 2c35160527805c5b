"""A run as Python sees it: its records and its result, from its directory alone."""

import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samestep.api.paths import AnyPath, path_of
from samestep.api.run_card import facts_of, run_card
from samestep.api.run_figure import run_figure
from samestep.errors import UserError
from samestep.recipe import Recipe
from samestep.run.directory import is_run, is_written, no_run
from samestep.run.files import read_object, shown_path
from samestep.run.index import read_index
from samestep.run.records import NOT_METRICS, Record, read_records
from samestep.settings import settings_of_run


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A run, by its directory: `samestep.TrainedRun("runs/ID")`.

    What it tells is read from the files when it is asked for, so a run that goes on tells more.

    Raises:
        UserError: there is no run in this directory.
    """

    path: Path
    recipe: Recipe | None = field(default=None, compare=False, repr=False)
    """What `samestep.train` was given, where that was a `Recipe`: `load`, `evaluate`, `predict` and
    `train` then need no other."""

    def __post_init__(self) -> None:
        # Absolute: the caller may change the working directory.
        object.__setattr__(self, "path", path_of(self.path, "path").absolute())
        if not is_run(self.path):
            raise no_run(self.path)

    def __repr__(self) -> str:
        return f"TrainedRun({shown_path(self.path)!r})"

    def __fspath__(self) -> str:
        """Return the path, so that a run can be named wherever a path can."""
        return os.fspath(self.path)

    @property
    def result(self) -> dict[str, Any]:
        """How the run ended, as result.json has it: status, best, test, weights_sha256 and more.

        Raises:
            UserError: it has not ended yet, or was killed.
        """
        try:
            found: dict[str, Any] = json.loads((self.path / "result.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            if not self.path.is_dir():
                raise UserError(f"There is no directory {self.path} any more.") from error
            raise UserError(
                f"{self.path} has no result.json that can be read: the run is going on, or was "
                "killed. Go on with it: samestep.train(run, resume=True)."
            ) from error
        return found

    @property
    def history(self) -> list[Record]:
        """Every record, oldest first, as one uninterrupted run would have written them.

        `event` says which kind one is: start, step, epoch, evaluation, checkpoint, stop …
        """
        return list(read_records(self.path))

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """A row per epoch, flat, ready for `pandas.DataFrame`: losses, metrics, times.

        What was measured on the validation set begins with `validation_`.
        """
        rows: dict[int, dict[str, Any]] = {}
        for record in self.history:
            if record["event"] == "epoch":
                flat = {name: v for name, v in record.items() if not isinstance(v, dict | list)}
                rows[record["epoch"]] = {**flat, **record.get("metrics", {})}
                rows[record["epoch"]].pop("event")
            elif record["event"] == "evaluation" and record["split"] == "validation":
                row = next((r for r in rows.values() if r["step"] == record["step"]), {})
                measured = {name: v for name, v in record.items() if name not in NOT_METRICS}
                row |= {f"validation_{name}": v for name, v in measured.items()}
        return list(rows.values())

    def report(self, output: AnyPath | None = None) -> Path:
        """Make one page of the run, which needs nothing else, and return its file.

        Args:
            output: the file; by default report.html in the run's directory.

        Raises:
            UserError: it cannot be written.
        """
        from samestep.reporting.make import write_report  # noqa: PLC0415 - where it is asked for

        named = None if output is None else path_of(output, "output")
        return write_report([Path(shown_path(self.path))], named).absolute()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that it was trained with, and its recipe's options under `options`."""
        text = (self.path / "settings.toml").read_text(encoding="utf-8")
        return settings_of_run(tomllib.loads(text))

    def plot(self) -> Any:
        """Return a `matplotlib.figure.Figure` of loss and metrics per epoch, the best one marked.

        A notebook shows it; `run.plot().savefig("curves.png")` keeps it.

        Raises:
            UserError: no epoch has ended yet, or matplotlib is not installed.
        """
        rows = self.epochs
        if not rows:
            raise UserError(f"{self.path} has no epoch that has ended: there are no curves yet.")
        index, mark = read_index(self.path / "checkpoints"), None
        if index.best is not None and index.best.metric is not None:
            mark = (index.monitor, index.best.epoch, index.best.metric)
        return run_figure(self.path.resolve().name, rows, mark)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of facts, the loss, and the boundary."""
        result, recipe = read_object(self.path / "result.json"), ""
        state = str(result.get("status", "no end recorded"))
        facts: dict[str, str] = {}
        losses: list[float | None] = []
        try:
            recipe = str(self.settings.get("recipe", ""))
            losses = [row.get("loss") for row in self.epochs]
        except (UserError, ValueError, KeyError, TypeError) as error:
            facts["problem"] = str(error)
        if is_written(self.path):
            state = "going on"
        told = {"recipe": recipe, **facts_of(result), **facts}
        return run_card(self.path, state, told, losses)
