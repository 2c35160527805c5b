"""What a network has to beat: a constant, the current run rate, a table, boosted trees.

Each is fitted to the training and the validation part, since none has anything to choose by the
latter, and is measured on the test.
"""

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from samestep.recipes.cricket.corpus import Array, Corpus
from samestep.recipes.cricket.situation import OVERS, Situation, last_over, runs_to_come, situation

Predictor = Callable[[Array], Array]
"""Rows of balls → runs to come."""


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


def baselines(
    corpus: Corpus, fitted: Array, tested: Array, horizon: int | None, *, trees: bool = True
) -> Mapping[str, dict[str, float] | str]:
    """Return the errors of each baseline on some balls, or why one was left out.

    Args:
        corpus: the matches.
        fitted: rows of the balls to fit to.
        tested: rows of the balls to measure on.
        horizon: overs ahead; None to the end of the innings.
        trees: whether to fit boosted trees, which take half a minute and need scikit-learn: to the
            absolute error in 300 rounds, and to the squared one as scikit-learn has it by default.
    """
    known, actual = situation(corpus), runs_to_come(corpus, horizon).astype(np.float64)
    made = {
        "constant": _constant(actual, fitted),
        "run_rate": _run_rate(known, actual, fitted, horizon),
        "table": _table(corpus, known, actual, fitted),
    }
    left_out: dict[str, dict[str, float] | str] = {}
    if trees and importlib.util.find_spec("sklearn") is None:
        left_out["trees"] = "left out without scikit-learn; pip install 'samestep[cricket]'"
    elif trees:
        numbers = plain_numbers(corpus, known, horizon)
        for name, settings in _TREES.items():
            made[name] = _trees(numbers, actual, fitted, settings)
    return {n: errors(predict(tested), actual[tested]) for n, predict in made.items()} | left_out


def _constant(actual: Array, fitted: Array) -> Predictor:
    mean = actual[fitted].mean()
    return lambda rows: np.full(len(rows), float(mean))


def _overs_ahead(known: Situation, horizon: int | None) -> Array:
    """Return the overs to the horizon, the unfinished one as the part that is left."""
    end = np.minimum(last_over(known.over, horizon), OVERS)
    left: Array = np.maximum(end - known.over - np.minimum(known.legal_in_over / 6, 1), 0)
    return left


def _run_rate(known: Situation, actual: Array, fitted: Array, horizon: int | None) -> Predictor:
    """Go on at the rate so far; before the first legal ball, at the mean rate of the others."""
    ahead = _overs_ahead(known, horizon)
    usual = actual[fitted].sum() / max(ahead[fitted].sum(), 1.0)
    rate = np.where(known.legal > 0, 6 * known.score / np.maximum(known.legal, 1), usual)
    return lambda rows: (rate * ahead)[rows]


def _table(corpus: Corpus, known: Situation, actual: Array, fitted: Array) -> Predictor:
    """Return the mean of the balls with the same innings, balls bowled and wickets lost."""
    number = corpus.innings["number"].astype(np.int64)[known.innings]
    cells = (number * 1024 + np.minimum(known.legal, 1023)) * 16 + np.minimum(known.wickets, 15)
    sums = np.bincount(cells[fitted], actual[fitted], minlength=int(cells.max()) + 1)
    counts = np.bincount(cells[fitted], minlength=len(sums))
    means = np.where(counts > 0, sums / np.maximum(counts, 1), actual[fitted].mean())
    return lambda rows: means[cells[rows]]


def plain_numbers(corpus: Corpus, known: Situation, horizon: int | None) -> Array:
    """Return nine numbers (balls, 9) for trees."""
    number = corpus.innings["number"][known.innings]
    runs_12, runs_30 = known.recent_runs[:, 1], known.recent_runs[:, 2]
    to_go = np.minimum(last_over(known.over, horizon), OVERS) - known.over
    columns = (number, known.legal, known.score, known.wickets, known.target)
    return np.stack([*columns, runs_12, runs_30, known.over, to_go], axis=1).astype(np.float32)


_TREES: Mapping[str, dict[str, Any]] = {
    "trees_mae": {"loss": "absolute_error", "max_iter": 300, "early_stopping": False},
    "trees_mse": {},
}


def _trees(numbers: Array, actual: Array, fitted: Array, settings: dict[str, Any]) -> Predictor:
    """Fit gradient-boosted trees on histograms, seeded."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # noqa: PLC0415 - an extra
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with it

    model = HistGradientBoostingRegressor(random_state=0, **settings)
    # On few balls threads wait for each other, many times longer on busy cores.
    limits = partial(threadpool_limits, 1 if len(fitted) < _FEW_BALLS else None, user_api="openmp")
    with limits():
        model.fit(numbers[fitted], actual[fitted])

    def predict(rows: Array) -> Array:
        with limits():
            predicted: Array = model.predict(numbers[rows])
        return predicted

    return predict
