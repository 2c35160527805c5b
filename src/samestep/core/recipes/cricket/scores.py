"""Errors of predicted runs, and those of the simpler models that a network has to beat.

`RunsError` has what samestep asks of a torchmetrics object: states with reductions, put together
over the ranks once.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from samestep.core.recipes.cricket.corpus import Array, Corpus
from samestep.core.recipes.cricket.situation import (
    OVERS,
    Situation,
    last_over,
    runs_to_come,
    situation,
)

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
        spread = squared_runs - runs * runs / balls if balls else 0.0
        if not balls or (self.kind == "r2" and spread <= 0):
            return float("nan")
        values = {"mae": absolute / balls, "rmse": (squared / balls) ** 0.5}
        return float(values[self.kind] if self.kind in values else 1 - squared / spread)


def _sum(stacked: Tensor) -> Tensor:
    return stacked.sum(dim=0)


def _all(stacked: Tensor) -> Tensor:
    return stacked


def runs_errors() -> dict[str, RunsError]:
    """Return the reported errors: over all balls, by phase and by innings."""
    kinds: tuple[Kind, ...] = ("mae", "rmse", "r2", "median_error")
    errors: dict[str, RunsError] = {kind: RunsError(kind) for kind in kinds}
    for value, phase in enumerate(("powerplay", "middle", "death")):
        errors[f"mae_{phase}"] = RunsError("mae", 0, value)
    for value in (0, 1):
        errors[f"mae_innings_{value + 1}"] = RunsError("mae", 1, value)
    return errors


def errors(predicted: Array, actual: Array) -> dict[str, float]:
    """Return the errors of predictions, each over all balls at once."""
    error = predicted - actual
    spread = float(((actual - actual.mean()) ** 2).sum())
    return {
        "mae": float(np.abs(error).mean()),
        "rmse": float(np.sqrt((error**2).mean())),
        "r2": 1 - float((error**2).sum()) / spread if spread else float("nan"),
        "median_error": float(np.median(np.abs(error))),
    }


_FEW_BALLS = 50_000
_TREES: Mapping[str, dict[str, Any]] = {
    "trees_mae": {"loss": "absolute_error", "max_iter": 300, "early_stopping": False},
    "trees_mse": {},
}


def baselines(
    corpus: Corpus, fitted: Array, tested: Array, horizon: int | None, *, trees: bool = True
) -> Mapping[str, dict[str, float] | str]:
    """Return the errors of each baseline on some balls, or why one was left out.

    Args:
        corpus: the matches.
        fitted: rows of the balls to fit to; of training and validation, as none chooses by the
            latter.
        tested: rows of the balls to measure on.
        horizon: overs ahead; None to the end of the innings.
        trees: whether to fit boosted trees, which take half a minute and need scikit-learn: to the
            absolute error in 300 rounds, and to the squared one as scikit-learn has it by default.
    """
    known, actual = situation(corpus), runs_to_come(corpus, horizon).astype(np.float64)
    predicted = {
        "constant": np.full(len(tested), float(actual[fitted].mean())),
        "run_rate": _by_run_rate(known, actual, fitted, horizon)[tested],
        "table": _by_table(corpus, known, actual, fitted)[tested],
    }
    left_out: dict[str, dict[str, float] | str] = {}
    if trees and importlib.util.find_spec("sklearn") is None:
        left_out["trees"] = "left out without scikit-learn; pip install 'samestep[cricket]'"
    elif trees:
        numbers = _numbers(corpus, known, horizon)
        for name, options in _TREES.items():
            predicted[name] = _by_trees(numbers[fitted], actual[fitted], numbers[tested], options)
    return {name: errors(some, actual[tested]) for name, some in predicted.items()} | left_out


def _by_run_rate(known: Situation, actual: Array, fitted: Array, horizon: int | None) -> Array:
    """Continue at the rate so far; before the first legal ball, at the mean rate of the others."""
    end = np.minimum(last_over(known.over, horizon), OVERS)
    # In overs, the unfinished one as the part that is left.
    ahead = np.maximum(end - known.over - np.minimum(known.legal_in_over / 6, 1), 0)
    usual = actual[fitted].sum() / max(ahead[fitted].sum(), 1.0)
    rate = np.where(known.legal > 0, 6 * known.score / np.maximum(known.legal, 1), usual)
    return np.asarray(rate * ahead)


def _by_table(corpus: Corpus, known: Situation, actual: Array, fitted: Array) -> Array:
    """Return the mean of the balls with the same innings, balls bowled and wickets lost."""
    number = corpus.innings["number"].astype(np.int64)[known.innings]
    cells = (number * 1024 + np.minimum(known.legal, 1023)) * 16 + np.minimum(known.wickets, 15)
    sums = np.bincount(cells[fitted], actual[fitted], minlength=int(cells.max()) + 1)
    counts = np.bincount(cells[fitted], minlength=len(sums))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), actual[fitted].mean())
    return np.asarray(means[cells])


def _numbers(corpus: Corpus, known: Situation, horizon: int | None) -> Array:
    """Return nine numbers (balls, 9) for trees."""
    number = corpus.innings["number"][known.innings]
    to_go = np.minimum(last_over(known.over, horizon), OVERS) - known.over
    columns = (number, known.legal, known.score, known.wickets, known.target)
    more = (*known.recent_runs.T[1:], known.over, to_go)
    return np.stack([*columns, *more], axis=1).astype(np.float32)


def _by_trees(numbers: Array, actual: Array, tested: Array, options: dict[str, Any]) -> Array:
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415 - an extra
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with it

    model = HistGradientBoostingRegressor(random_state=0, **options)
    # On few balls threads wait for each other, many times longer on busy cores.
    with threadpool_limits(1 if len(actual) < _FEW_BALLS else None, user_api="openmp"):
        return np.asarray(model.fit(numbers, actual).predict(tested))
