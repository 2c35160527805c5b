"""The curves of a run as a figure of matplotlib: loss and metrics per epoch, the best marked."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from samestep.errors import UserError

_TRAIN, _VALIDATION = "#1f5fa8", "#c0392b"
_NOT_DRAWN = {*("epoch", "step", "samples", "seconds", "train_seconds", "samples_per_s")}
"""Numbers of a row that are no loss and no metric."""


def curves_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is drawn of a run's epochs: the loss first, then its metrics by name."""
    measured = {key: None for row in rows for key in row if key.startswith("validation_")}
    names = dict.fromkeys(key.removeprefix("validation_") for key in measured)
    trained = {key for row in rows for key, value in row.items() if isinstance(value, float)}
    names |= dict.fromkeys(sorted(trained - _NOT_DRAWN - set(measured)))
    return ["loss", *(name for name in names if name not in ("loss", *_NOT_DRAWN))]


def run_figure(
    title: str, rows: Sequence[Mapping[str, Any]], best: tuple[str, int, float] | None
) -> Any:
    """Return a figure with a panel for the loss and for each metric.

    Args:
        title: above all panels.
        rows: those of `TrainedRun.epochs`.
        best: the monitored metric, the epoch that was best by it, and its value there.

    Raises:
        UserError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "run.plot() draws with matplotlib, which is not installed: "
            "pip install 'samestep[plot]'."
        ) from error

    class RunFigure(Figure):
        """A figure that a notebook shows, also where nothing has imported pyplot."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    names = curves_of(rows)
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = RunFigure(figsize=(4.4 * columns, 0.5 + 3.1 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for panel, name in zip(panels, names, strict=False):
        _draw(panel, name, rows, best)
    for panel in panels[len(names) :]:
        panel.remove()
    panels[0].legend(fontsize="small")
    figure.suptitle(title, parse_math=False)
    return figure


def _draw(
    panel: Any, name: str, rows: Sequence[Mapping[str, Any]], best: tuple[str, int, float] | None
) -> None:
    """Draw one curve on the training data and one on the validation data."""
    for key, label, colour in (
        (name, "training", _TRAIN),
        (f"validation_{name}", "validation", _VALIDATION),
    ):
        points = [(row["epoch"], value) for row in rows if _is_number(value := row.get(key))]
        if points:
            panel.plot(*zip(*points, strict=True), marker=".", color=colour, label=label)
    if best is not None:
        metric, epoch, value = best
        panel.axvline(epoch, color="gray", linestyle=":", linewidth=1)
        if metric == name and math.isfinite(value):
            label = f"best: {value:.4g}, epoch {epoch}"
            panel.plot([epoch], [value], "*", color="#e0a100", markersize=13, label=label)
            panel.legend(fontsize="small")
    panel.set_title(name, parse_math=False)
    panel.set_xlabel("epoch")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.grid(alpha=0.3)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
