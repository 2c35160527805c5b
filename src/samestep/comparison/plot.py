"""The curves as a picture: by samples and by seconds, beside each other."""

from pathlib import Path

from samestep.comparison.side_by_side import Comparison
from samestep.comparison.text_report import metric_name
from samestep.screen.picture import picture


def plot(found: Comparison, path: Path) -> None:
    """Draw every recorded value of the metric, all runs in one picture.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    with picture(path) as figure:
        axes = figure.subplots(1, 2, sharey=True)
        for name, run, curve in zip(found.names, found.runs, found.curves, strict=True):
            values = [point.value for point in curve]
            label = f"{name}  {run.path.name}"
            axes[0].plot([p.samples for p in curve], values, marker=".", label=label)
            axes[1].plot([p.seconds for p in curve], values, marker=".", label=label)
        axes[0].set(xlabel="samples trained", ylabel=metric_name(found))
        axes[1].set(xlabel="seconds of training")
        for one in axes:
            one.grid(alpha=0.3)
            if found.target is not None:
                one.axhline(found.target, linestyle="--", linewidth=1, color="gray")
        axes[0].legend(fontsize="small")
