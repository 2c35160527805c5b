"""A run as Python sees it: its records and result from its directory, its curves, its card."""

import base64
import io
import json
import math
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from samestep.base.errors import UserError
from samestep.base.run.directory import is_run, is_written, no_run
from samestep.base.run.files import read_object, shown_path
from samestep.base.run.index import Index, read_index
from samestep.base.run.pictures import FOLDER, read_pictures, read_png
from samestep.base.run.records import Record, metric_values, read_records
from samestep.base.words import count, duration, measured
from samestep.core.recipe import Recipe
from samestep.shell.api.arguments import AnyPath, path_of

_NOT_DRAWN = {
    *("epoch", "step", "samples", "seconds", "train_seconds", "samples_per_s", "terms_per_s"),
    *("flops_per_s", "mfu", "peak_memory_bytes"),
}
"""Numbers in a row that are neither a loss nor a metric."""
_MOST_PICTURE = 150_000  # bytes; as base64 they become 200 kB
_WIDTH, _HEIGHT = 220, 44


@dataclass(frozen=True, repr=False)
class TrainedRun:
    """A run, by its directory: `samestep.TrainedRun("runs/ID")`.

    Its files are read on each access, so a run that is still training shows more each time.

    Raises:
        UserError: there is no run in this directory.
    """

    path: Path
    recipe: Recipe | None = field(default=None, compare=False, repr=False)
    """The `Recipe` that `samestep.train` was given; `load`, `evaluate`, `predict` and `train` then
    need no `recipe=`."""

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
            result: dict[str, Any] = json.loads((self.path / "result.json").read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            if not self.path.is_dir():
                raise UserError(f"The directory {self.path} no longer exists.") from error
            raise UserError(
                f"{self.path} has no result.json that can be read: it is still training, or was "
                "killed. Resume it: samestep.train(run, resume=True)."
            ) from error
        return result

    @property
    def history(self) -> list[Record]:
        """Every record, oldest first, as one uninterrupted run would have written them.

        `event` says which kind one is: start, step, epoch, evaluation, checkpoint, stop …
        """
        return list(read_records(self.path))

    @property
    def per_epoch(self) -> list[dict[str, Any]]:
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
                row |= {f"validation_{name}": v for name, v in metric_values(record).items()}
        return list(rows.values())

    def report(self, output: AnyPath | None = None) -> Path:
        """Make one self-contained page of the run, and return its file.

        Args:
            output: the file; by default report.html in the run's directory.

        Raises:
            UserError: it cannot be written.
        """
        from samestep.show.reporting.page import write_report  # noqa: PLC0415 - rarely needed

        named = None if output is None else path_of(output, "output")
        return write_report([Path(shown_path(self.path))], named).absolute()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the training, and the recipe's options under `options`."""
        return tomllib.loads((self.path / "settings.toml").read_text(encoding="utf-8"))

    def plot(self) -> Any:
        """Return a `matplotlib.figure.Figure` of loss and metrics per epoch, the best one marked.

        A notebook shows it; `run.plot().savefig("curves.png")` keeps it.

        Raises:
            UserError: no epoch has ended yet, or matplotlib is not installed.
        """
        if not (rows := self.per_epoch):
            raise UserError(f"{self.path} has no completed epoch yet, so there are no curves.")
        try:
            from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise UserError(
                "run.plot() draws with matplotlib, which is not installed: "
                "pip install 'samestep[plot]'."
            ) from error

        class RunFigure(Figure):
            """A figure that a notebook shows without pyplot."""

            def _repr_png_(self) -> bytes:
                file = io.BytesIO()
                self.savefig(file, format="png", dpi=100)
                return file.getvalue()

        names = _curves(rows)
        columns = min(3, len(names))
        lines = -(-len(names) // columns)
        figure = RunFigure(figsize=(4.4 * columns, 0.5 + 3.1 * lines), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
        index = read_index(self.path / "checkpoints")
        for panel, name in zip(panels, names, strict=False):
            _draw_curves(panel, name, rows, index)
        for panel in panels[len(names) :]:
            panel.remove()
        panels[0].legend(fontsize="small")
        figure.suptitle(self.path.resolve().name, parse_math=False)
        return figure

    def _repr_html_(self) -> str:
        """Return a notebook's view: a table of facts, the loss, and the boundary."""
        result = read_object(self.path / "result.json")
        state = str(result.get("status", "no end recorded"))
        rows = {"state": "going on" if is_written(self.path) else state}
        losses: list[float | None] = []
        try:
            rows["recipe"] = str(self.settings.get("recipe", ""))
            losses = [row.get("loss") for row in self.per_epoch]
            problem = {}
        except (UserError, ValueError, KeyError, TypeError) as error:
            problem = {"problem": str(error)}
        rows |= {**_facts(result), **problem}
        cells = {name: escape(text) for name, text in rows.items()}
        if line := _sparkline(losses):
            cells["loss"] = line
        cells["path"] = escape(str(self.path))
        table = "".join(
            f"<tr><th style='text-align:left;font-weight:600'>{name}</th>"
            f"<td style='text-align:left'>{cell}</td></tr>"
            for name, cell in cells.items()
        )
        return (
            "<div style='display:flex;gap:1.5em;align-items:center'>"
            f"<table style='margin:0'>{table}</table>{_picture(self.path)}</div>"
        )


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    facts: dict[str, str] = {}
    best, test = result.get("best") or {}, metric_values(result.get("test") or {})
    if isinstance(best.get("value"), int | float):
        facts["best"] = f"{best.get('metric')} {measured(best['value'])}, epoch {best.get('epoch')}"
    numbers = {name: value for name, value in test.items() if isinstance(value, int | float)}
    if shown := [f"{name} {measured(value)}" for name, value in numbers.items()]:
        facts["test"] = ", ".join(shown)
    if isinstance(seconds := result.get("training_seconds"), int | float):
        facts["trained"] = f"{count(result.get('steps', 0), 'step')}, {duration(seconds)}"
    if ranks := result.get("world_size"):
        facts["ranks"] = f"{ranks} on {result.get('device', '?')}"
    return facts


def _sparkline(losses: Sequence[float | None]) -> str:
    """Return two losses or more as an SVG line."""
    values = [(k, v) for k, v in enumerate(losses) if v is not None and math.isfinite(v)]
    if len(values) < 2:
        return ""
    step = max(1, len(values) // _WIDTH)
    values = [*values[:-1:step], values[-1]]
    low, high = min(v for _, v in values), max(v for _, v in values)
    span, last = (high - low) or 1.0, values[-1][0]
    points = " ".join(
        f"{2 + k / last * (_WIDTH - 4):.1f},{2 + (high - v) / span * (_HEIGHT - 4):.1f}"
        for k, v in values
    )
    return (
        f"<svg width='{_WIDTH}' height='{_HEIGHT}' role='img' aria-label='training loss from "
        f"{values[0][1]:.4g} to {values[-1][1]:.4g}'><polyline points='{points}' fill='none' "
        "stroke='currentColor' stroke-width='1.5'/></svg>"
    )


def _picture(path: Path) -> str:
    """Return the decision boundary, else the first figure, as HTML; empty if it is too large."""
    figures = [e for e in read_pictures(path) if e.get("kind") == "figure" and "name" in e]
    figures.sort(key=lambda entry: entry["name"] != "boundary")
    for entry in figures[:1]:
        content = read_png(path, f"{FOLDER}/{entry['name']}.png")
        if content is not None and len(content) <= _MOST_PICTURE:
            about = escape(str(entry.get("text") or entry.get("title") or ""), quote=True)
            data = base64.b64encode(content).decode()
            return f"<img style='height:14em' alt='{about}' src='data:image/png;base64,{data}'>"
    return ""


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the curves: the loss first, then the metrics."""
    measured = {key: None for row in rows for key in row if key.startswith("validation_")}
    names = dict.fromkeys(key.removeprefix("validation_") for key in measured)
    trained = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    names |= dict.fromkeys(sorted(trained - _NOT_DRAWN - set(measured)))
    return ["loss", *(name for name in names if name not in ("loss", *_NOT_DRAWN))]


def _draw_curves(panel: Any, name: str, rows: Sequence[Mapping[str, Any]], index: Index) -> None:
    """Draw the curves of one name on the training and the validation data, and the best epoch."""
    for key, label, colour in (
        (name, "training", "#1f5fa8"),
        (f"validation_{name}", "validation", "#c0392b"),
    ):
        values = ((row["epoch"], row.get(key)) for row in rows)
        if points := [(e, v) for e, v in values if isinstance(v, int | float) and math.isfinite(v)]:
            panel.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
    best = index.best
    if best is not None and best.metric is not None:
        panel.axvline(best.epoch, color="gray", linestyle=":", linewidth=1)
        if index.monitor == name and math.isfinite(best.metric):
            label = f"best: {best.metric:.4g}, epoch {best.epoch}"
            panel.plot(
                [best.epoch], [best.metric], "*", color="#e0a100", markersize=13, label=label
            )
            panel.legend(fontsize="small")
    panel.set_title(name, parse_math=False)
    panel.set_xlabel("epoch")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)
