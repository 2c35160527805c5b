"""The curves as a picture: by samples and by seconds, beside each other."""

from pathlib import Path

from samestep.comparison.side_by_side import Comparison
from samestep.comparison.text_report import metric_name
from samestep.errors import UserError
from samestep.run.files import write_atomically


def plot(found: Comparison, path: Path) -> None:
    """Draw every recorded value of the metric, all runs in one picture.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            "--plot draws with matplotlib, which is not installed: pip install 'samestep[plot]'."
        ) from error
    mpl.use("agg")  # no window is opened
    from matplotlib import pyplot as plt  # noqa: PLC0415 - asks for the backend when imported

    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: the name must end in .png, .svg or .pdf.")
    if not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no directory {path.parent}.")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
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
    try:
        write_atomically(path, lambda file: figure.savefig(file, format=path.suffix[1:], dpi=120))
    finally:
        plt.close(figure)
