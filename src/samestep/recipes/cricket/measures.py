"""Errors of predicted runs over any number of batches and ranks: from sums, or from all of them.

They have what samestep asks of a torchmetrics object: states with reductions, put together over the
ranks once.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["mae", "rmse", "r2", "median_error"]


class RunsError:
    """One error over all balls, or over those of a phase or an innings.

    Args:
        kind: which error.
        column: 0 for phases, 1 for innings, as the columns of `group` are; None for all balls.
        value: the phase or the innings.
    """

    def __init__(self, kind: Kind, column: int | None = None, value: int = 0) -> None:
        self.kind, self._column, self._value = kind, column, value
        self.higher_is_better = kind == "r2"
        self.device = torch.device("cpu")
        self.sync_on_compute = False
        self._reductions: dict[str, Callable[[Tensor], Tensor]] = {"sums": _sum}
        if kind == "median_error":
            self._reductions = {"errors": _all}
        self.reset()

    def reset(self) -> None:
        """Forget all predictions."""
        self._update_count = 0
        # Balls, |error|, error², runs, runs²; on the CPU, where sums have 64 bits on any machine.
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.errors: list[Tensor] = []

    def to(self, _device: Any) -> "RunsError":
        """Stay on the CPU."""
        return self

    def update(self, outputs: Tensor, graphs: Any) -> None:
        """Take in the predictions for a batch of graphs."""
        self._update_count += 1
        y, group = graphs["query"].y, graphs["query"].group
        if self._column is not None:
            chosen = group[:, self._column] == self._value
            outputs, y = outputs[chosen], y[chosen]
        actual = y.detach().cpu().double()
        error = outputs.detach().cpu().double() - actual
        if self.kind == "median_error":
            self.errors.append(error.abs().float())
            return
        columns = (torch.ones_like(error), error.abs(), error**2, actual, actual**2)
        self.sums = self.sums + torch.stack(columns).sum(dim=1)

    def compute(self) -> float:
        """Return the error; NaN where there were no balls."""
        if self.kind == "median_error":
            errors = torch.cat(self.errors) if self.errors else torch.zeros(0)
            return float(errors.quantile(0.5)) if len(errors) else float("nan")
        balls, absolute, squared, runs, squared_runs = self.sums.tolist()
        if not balls:
            return float("nan")
        if self.kind == "mae":
            return float(absolute / balls)
        if self.kind == "rmse":
            return float((squared / balls) ** 0.5)
        spread = squared_runs - runs * runs / balls
        return float(1 - squared / spread) if spread > 0 else float("nan")


def _sum(stacked: Tensor) -> Tensor:
    return stacked.sum(dim=0)


def _all(stacked: Tensor) -> Tensor:
    return stacked


def runs_errors() -> dict[str, RunsError]:
    """Return the reported errors: over all balls, by phase and by innings."""
    kinds: tuple[Kind, ...] = ("mae", "rmse", "r2", "median_error")
    found: dict[str, RunsError] = {kind: RunsError(kind) for kind in kinds}
    for value, name in enumerate(("powerplay", "middle", "death")):
        found[f"mae_{name}"] = RunsError("mae", 0, value)
    for value in (0, 1):
        found[f"mae_innings_{value + 1}"] = RunsError("mae", 1, value)
    return found
