"""Cricket ball by ball: the runs of the next overs, by a graph network of what came before."""

import datetime as dt
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from samestep.base.errors import UserError, did_you_mean
from samestep.base.settings import check_flags, may_change
from samestep.core.recipe import Recipe, Splits
from samestep.core.recipes.cricket.cache import Matches, open_corpus
from samestep.core.recipes.cricket.corpus import (
    Array,
    Corpus,
    at_random,
    balls_of,
    boundaries,
    by_date,
    digests,
    from_documents,
    merge,
    thinned,
    without_known,
)
from samestep.core.recipes.cricket.form import KeptForm, keep_form
from samestep.core.recipes.cricket.graph_network import BallGraphNetwork, Convolution
from samestep.core.recipes.cricket.graphs import (
    BALL_EDGES,
    PLAYER_EDGES,
    BallGraphs,
    GraphSource,
    collate,
    hetero_data,
)
from samestep.core.recipes.cricket.scores import baselines, runs_errors
from samestep.core.recipes.cricket.synthetic import documents
from samestep.core.recipes.cricket.tables import Vocabularies, make_tables, vocabularies


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
    for number, plot in enumerate(axes):
        own = slice(int(innings["start"][number]), int(corpus.ends()[number]))
        # Where each ball is, in overs: the second of six balls is at a sixth.
        over = balls["over"][own].astype(float)
        first = np.searchsorted(over, over, "left")
        many = np.searchsorted(over, over, "right") - first
        overs = over + (np.arange(len(over)) - first) / many
        fell = balls["wickets"][own] > 0
        plot.plot(overs, actual[own], color="0.45", linewidth=1.6, label="actual")
        plot.plot(overs, predicted[own], color="tab:blue", linewidth=1.8, label="predicted")
        plot.plot(overs[fell], actual[own][fell], "x", label="wicket", **cross)
        runs = int(balls["runs"][own].sum()) + int(innings["before"][number])
        score = f"{teams[innings['batting'][number]]} {runs}/{int(balls['wickets'][own].sum())}"
        target = int(innings["target"][number])
        plot.set_title(f"{score}, target {target}" if target else score, fontsize="medium")
        plot.set(xlabel="over", xlim=(0, 20), xticks=range(0, 21, 5))
        plot.grid(alpha=0.3)
    axes[0].set(ylabel=f"runs to come, {ahead}", ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    sides = f"{teams[innings['batting'][0]]} v {teams[innings['bowling'][0]]}"
    venue = corpus.lists["venues"][corpus.matches["venue"][0]]
    day = np.datetime64(int(corpus.matches["date"][0]), "D")
    title = ", ".join(filter(None, (sides, venue, str(day))))
    figure.suptitle(f"{title}\nmean absolute error {np.abs(predicted - actual).mean():.1f} runs")


@dataclass(frozen=True)
class CricketOptions:
    """The options of this recipe."""

    data_dir: str = may_change("data/cricket")
    """Folder of Cricsheet's JSON files of twenty-over matches, their zip or a tar."""
    cache_dir: str | None = may_change(None)
    """Where read matches are kept; by default ~/.cache/samestep/cricket."""
    skip_bad: int = may_change(0)
    """How many files may be unreadable; they are named and left out."""
    synthetic: bool = False
    """Make up matches instead of reading files."""
    synthetic_matches: int = 100
    """Number of matches to make up with --synthetic."""
    horizon: Literal["5", "innings"] = "5"
    """Predict the runs of the next 5 overs (see the handbook), or of the rest of the innings."""
    split_by: Literal["date", "random"] = "date"
    """Test on the last tenth of the dates, or on a tenth of the matches drawn at random."""
    split_seed: int = 42
    """Seed of the random split, and of --balls-per-match."""
    balls_per_match: int | None = None
    """Train on this many balls of each match, drawn once; by default on all."""
    convolution: Convolution = "sage"
    """Layer that sends messages along edges: GraphSAGE, GATv2 or a graph transformer."""
    width: int = 32
    """Channels of each node."""
    rounds: int = 1
    """Rounds of messages between balls and players, before the query reads them."""
    history: int = 40
    """The most balls before the query that a graph holds."""
    without: tuple[str, ...] = ()
    """Types of edges to leave out, such as precedes or same_bowler."""
    dropout: float = 0.1
    """Dropout in the layers that read the query."""
    unknown: float = 1.0
    """Fraction of the players, teams and venues that training treats as unknown; 1: no identities,
    since with them the network learns its matches by heart."""
    fewest_balls: int = 60
    """Players who faced and bowled fewer than this in training are unknown."""
    players: tuple[str, ...] = ()
    """Identifiers of the players with an embedding; by default those of the training part."""
    venues: tuple[str, ...] = ()
    """Venues with an embedding."""
    teams: tuple[str, ...] = ()
    """Teams with an embedding."""
    trees: bool = may_change(True)
    """Also fit boosted trees, as a baseline for the test; half a minute on all matches."""
    validation_from: str = ""
    """First date (YYYY-MM-DD) of the validation, with --split-by date."""
    test_from: str = ""
    """First date of the test."""
    used: tuple[str, ...] = ()
    """Digests of the matches of training and validation: never tested, wherever they are read."""
    form_names: tuple[str, ...] = ()
    """Sides and venues with a rating, such as "batting India"."""
    form: tuple[float, ...] = ()
    """Their ratings after all matches of the run: runs, wickets and balls of each."""
    form_usual: tuple[float, ...] = ()
    """Runs and wickets per ball in training, by over and wickets lost."""
    form_until: str = ""
    """Last date of these matches; ratings of later ones continue from there."""

    def __post_init__(self) -> None:
        positive = ("synthetic_matches", "balls_per_match", "width", "rounds")
        check_flags(self, positive, lambda value: value >= 1, "be 1 or more")
        check_flags(self, ("skip_bad", "history"), lambda value: value >= 0, "be 0 or more")
        check_flags(self, ("dropout",), lambda value: 0 <= value < 1, "be from 0 to below 1")
        check_flags(self, ("unknown",), lambda value: 0 <= value <= 1, "be from 0 to 1")
        check_flags(self, ("width",), lambda value: value % 4 == 0, "be a multiple of 4")
        if self.synthetic and self.data_dir != CricketOptions.data_dir:
            raise UserError(
                f"--synthetic makes matches up, and --data-dir {self.data_dir} names some: leave "
                "one of them out."
            )
        names = sorted({name for _, name, _ in (*BALL_EDGES, *PLAYER_EDGES)})
        for name in self.without:
            if name not in names:
                raise UserError(
                    f"--without {name}: there are no such edges. {did_you_mean(name, names)}They "
                    f"are: {', '.join(names)}."
                )
        given = {"validation-from": self.validation_from, "test-from": self.test_from}
        for name, day in given.items():
            with suppress(ValueError):
                if not day or dt.date.fromisoformat(day).isoformat() == day:
                    continue
            raise UserError(f"--{name} is {day!r}; it must be a date, such as 2024-07-01.")
        if self.test_from and self.validation_from >= self.test_from:
            raise UserError(
                f"The validation begins on {self.validation_from} and the test on "
                f"{self.test_from}: name both, the validation first: --validation-from DATE "
                "--test-from DATE"
            )


@lru_cache(maxsize=1)
def _read(data_dir: str, cache_dir: str | None, skip_bad: int, made_up: int) -> Matches:
    if made_up:
        return Matches(merge([from_documents(documents(made_up, seed=0))]))
    folder = Path(cache_dir) if cache_dir else None
    return open_corpus(Path(data_dir), folder=folder, skip_bad=skip_bad)


def _matches_of(options: CricketOptions) -> Matches:
    made_up = options.synthetic_matches if options.synthetic else 0
    return _read(options.data_dir, options.cache_dir, options.skip_bad, made_up)


def _split_matches(corpus: Corpus, options: CricketOptions) -> dict[str, Array]:
    if options.split_by == "random":
        parts = at_random(corpus, options.split_seed)
    else:
        parts = by_date(corpus, (options.validation_from, options.test_from))
    return without_known(corpus, parts, options.used) if options.used else parts


def complete(options: CricketOptions) -> CricketOptions:
    """Fill in the dates of the split, and whom the training part has: once, for the whole run."""
    hetero_data()
    if options.form_until:
        return options
    corpus = _matches_of(options).corpus
    if options.split_by == "date" and not (options.validation_from and options.test_from):
        validation, test = boundaries(corpus)
        options = replace(
            options,
            validation_from=options.validation_from or validation,
            test_from=options.test_from or test,
        )
    parts = _split_matches(corpus, options)
    train = parts["train"]
    for name, some in parts.items():
        if not len(some):
            raise UserError(
                f"None of the {len(corpus.matches['date'])} matches is left for the {name} data. "
                "Name more with --data-dir, or try another --split-seed."
            )
    names = vocabularies(corpus, train, fewest_balls=options.fewest_balls)
    done = keep_form(corpus, train)
    seen = digests(corpus)[np.concatenate([train, parts["validation"]])]
    return replace(
        options,
        **{name: getattr(options, name) or value for name, value in vars(names).items()},
        form_names=done.names,
        form=done.ratings,
        form_usual=done.usual,
        form_until=done.until,
        used=tuple(sorted(set(seen.tolist()))),
    )


def _horizon(options: CricketOptions) -> int | None:
    return None if options.horizon == "innings" else int(options.horizon)


def _graphs(corpus: Corpus, options: CricketOptions) -> GraphSource:
    names = Vocabularies(options.players, options.venues, options.teams)
    earlier = KeptForm(options.form_names, options.form, options.form_usual, options.form_until)
    tables = make_tables(corpus, names, _horizon(options), earlier)
    return GraphSource(tables, options.history, frozenset(options.without))


def data(options: CricketOptions) -> Splits:
    """Read the matches, from the cache if they are there; a sample is one ball."""
    kept = _matches_of(options)
    source = _graphs(kept.corpus, options)
    rows = {n: balls_of(kept.corpus, m) for n, m in _split_matches(kept.corpus, options).items()}
    if options.balls_per_match is not None:
        rows["train"] = thinned(
            kept.corpus, rows["train"], options.balls_per_match, options.split_seed
        )
    splits: dict[str, Any] = {name: BallGraphs(source, some) for name, some in rows.items()}
    return Splits(**splits, notes=kept.notes)


def model(options: CricketOptions) -> nn.Module:
    """Return the network for these vocabularies."""
    hetero_data()
    sizes = {"player": options.players, "venue": options.venues, "team": options.teams}
    return BallGraphNetwork(
        vocabularies={name: len(known) + 1 for name, known in sizes.items()},
        without=options.without,
        convolution=options.convolution,
        width=options.width,
        rounds=options.rounds,
        dropout=options.dropout,
        unknown=options.unknown,
    )


def loss(outputs: Tensor, graphs: Any) -> Tensor:
    """Return the mean Huber loss in runs: squared below 1 run, linear above."""
    return nn.functional.huber_loss(outputs, graphs["query"].y, delta=1.0)


def read(options: CricketOptions, path: Path) -> BallGraphs:
    """Return the balls of one match; ValueError says why there are none."""
    corpus = read_match(path)
    return BallGraphs(_graphs(corpus, options), np.arange(corpus.num_balls))


def picture(options: CricketOptions, path: Path, rows: Sequence[Any], figure: Any) -> None:
    """Draw the runs to come in a match, predicted and actual."""
    draw_match(read_match(path), rows, _horizon(options), figure)


def to_beat(options: CricketOptions) -> Mapping[str, dict[str, float] | str]:
    """Return the errors of simpler models on the test, fitted on training and validation."""
    corpus = _matches_of(options).corpus
    parts = _split_matches(corpus, options)
    fitted = balls_of(corpus, np.concatenate([parts["train"], parts["validation"]]))
    tested = balls_of(corpus, parts["test"])
    return baselines(corpus, fitted, tested, _horizon(options), trees=options.trees)


recipe = Recipe(
    model=model,
    data=data,
    options=CricketOptions,
    complete=complete,
    collate=collate,
    forward=lambda network, graphs: network(graphs),
    loss=loss,
    metrics=runs_errors(),
    read=read,
    show=show_balls,
    plot=picture,
    baselines=to_beat,
    accepts=("dropout",),
    settings={
        "epochs": 2,
        "batch_size": 512,
        "eval_batch_size": 512,
        "monitor": "mae",
        "optimizer": "adamw",
        "weight_decay": 1e-3,
        "ema": 0.995,
        "clip_norm": 5.0,
        "lr": 2e-3,
        "warmup_steps": 200,
        "schedule": "cosine",
    },
)
