"""One match to be predicted: read from its file, shown ball by ball, and drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from samestep.recipes.cricket.corpus import Array, Corpus, from_documents


def read_match(path: Path) -> Corpus:
    """Return the one match in a JSON file.

    Raises:
        ValueError: it is none, or one that cannot be predicted; the message says why.
    """
    corpus = from_documents([(path.name, path.read_bytes())])
    for reason in (*corpus.lists["bad"], *corpus.lists["passed"]):
        raise ValueError(reason.removeprefix(f"{path.name}: "))
    return corpus


def show_balls(outputs: Tensor, graphs: Any) -> list[dict[str, float | int | str]]:
    """Return a row per ball: its place, and the runs to come from it on."""
    query = graphs["query"]
    rows = zip(outputs.tolist(), query.y.tolist(), query.group.tolist(), strict=True)
    return [
        {
            "ball": f"{over}.{ball}",
            "innings": number + 1,
            "predicted": round(runs, 1),
            "actual": int(actual),
        }
        for runs, actual, (_, number, over, ball) in rows
    ]


def draw_match(
    corpus: Corpus, rows: Sequence[Mapping[str, Any]], horizon: int | None, figure: Any
) -> None:
    """Draw the runs to come from each ball on, predicted and actual, one innings per panel.

    Args:
        corpus: the match.
        rows: what `show_balls` returned of its balls, in their order.
        horizon: overs ahead; None to the end of the innings.
        figure: of matplotlib.
    """
    predicted, actual = (np.array([row[n] for row in rows], float) for n in ("predicted", "actual"))
    ahead = "to the end of the innings" if horizon is None else f"horizon {horizon} overs"
    many = len(corpus.innings["start"])
    axes = figure.subplots(1, many, sharey=True, squeeze=False)[0]
    for number, one in enumerate(axes):
        start, end = int(corpus.innings["start"][number]), int(corpus.ends()[number])
        overs, fell = _overs(corpus, start, end), corpus.balls["wickets"][start:end] > 0
        runs_to_come = actual[start:end]
        one.plot(overs, runs_to_come, color="0.45", linewidth=1.6, label="actual")
        one.plot(overs, predicted[start:end], color="tab:blue", linewidth=1.8, label="predicted")
        one.plot(
            *(overs[fell], runs_to_come[fell]),
            *("x",),
            color="tab:red",
            markersize=7,
            markeredgewidth=2,
            label="wicket",
        )
        one.set_title(_summary(corpus, number, start, end), fontsize="medium")
        one.set(xlabel="over", xlim=(0, 20), xticks=range(0, 21, 5))
        one.grid(alpha=0.3)
    axes[0].set(ylabel=f"runs to come, {ahead}", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(
        f"{_title(corpus)}\nmean absolute error {np.abs(predicted - actual).mean():.1f} runs"
    )


def _overs(corpus: Corpus, start: int, end: int) -> Array:
    """Return where each ball of an innings is, in overs: one of six balls begins at a sixth."""
    over = corpus.balls["over"][start:end].astype(float)
    first = np.searchsorted(over, over, "left")
    many = np.searchsorted(over, over, "right") - first
    places: Array = over + (np.arange(len(over)) - first) / many
    return places


def _summary(corpus: Corpus, number: int, start: int, end: int) -> str:
    balls, innings = corpus.balls, corpus.innings
    runs = int(balls["runs"][start:end].sum()) + int(innings["before"][number])
    team = corpus.lists["teams"][innings["batting"][number]]
    target = int(innings["target"][number])
    aim = f", target {target}" if target else ""
    return f"{team} {runs}/{int(balls['wickets'][start:end].sum())}{aim}"


def _title(corpus: Corpus) -> str:
    teams = [corpus.lists["teams"][corpus.innings[side][0]] for side in ("batting", "bowling")]
    day = np.datetime64(int(corpus.matches["date"][0]), "D")
    venue = corpus.lists["venues"][corpus.matches["venue"][0]]
    return ", ".join(filter(None, (f"{teams[0]} v {teams[1]}", venue, str(day))))
