"""One match to be predicted: read from its file, shown ball by ball, and drawn."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from samestep.recipes.cricket.corpus import Corpus, from_documents


def read_match(path: Path) -> Corpus:
    """Return the one match in a JSON file; ValueError says why it cannot be predicted."""
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
    balls, innings, teams = corpus.balls, corpus.innings, corpus.lists["teams"]
    axes = figure.subplots(1, len(innings["start"]), sharey=True, squeeze=False)[0]
    cross: dict[str, Any] = {"color": "tab:red", "markersize": 7, "markeredgewidth": 2}
    for number, one in enumerate(axes):
        own = slice(int(innings["start"][number]), int(corpus.ends()[number]))
        # Where each ball is, in overs: the second of six balls is at a sixth.
        over = balls["over"][own].astype(float)
        first = np.searchsorted(over, over, "left")
        many = np.searchsorted(over, over, "right") - first
        overs = over + (np.arange(len(over)) - first) / many
        fell = balls["wickets"][own] > 0
        one.plot(overs, actual[own], color="0.45", linewidth=1.6, label="actual")
        one.plot(overs, predicted[own], color="tab:blue", linewidth=1.8, label="predicted")
        one.plot(overs[fell], actual[own][fell], "x", label="wicket", **cross)
        runs = int(balls["runs"][own].sum()) + int(innings["before"][number])
        score = f"{teams[innings['batting'][number]]} {runs}/{int(balls['wickets'][own].sum())}"
        target = int(innings["target"][number])
        one.set_title(f"{score}, target {target}" if target else score, fontsize="medium")
        one.set(xlabel="over", xlim=(0, 20), xticks=range(0, 21, 5))
        one.grid(alpha=0.3)
    axes[0].set(ylabel=f"runs to come, {ahead}", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    sides = f"{teams[innings['batting'][0]]} v {teams[innings['bowling'][0]]}"
    venue = corpus.lists["venues"][corpus.matches["venue"][0]]
    day = np.datetime64(int(corpus.matches["date"][0]), "D")
    title = ", ".join(filter(None, (sides, venue, str(day))))
    figure.suptitle(f"{title}\nmean absolute error {np.abs(predicted - actual).mean():.1f} runs")
