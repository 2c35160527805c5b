"""Everything that graphs of balls are made of, as one row per ball: features, players, distances.

A graph is then a choice of rows; building a batch of them takes no Python per ball.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from samestep.core.recipes.cricket.corpus import (
    BYE,
    FEMALE,
    INTERNATIONAL,
    LEG_BYE,
    NO_BALL,
    WIDE,
    Array,
    Corpus,
)
from samestep.core.recipes.cricket.form import WIDTH, KeptForm, form
from samestep.core.recipes.cricket.situation import (
    DEATH_FROM,
    OVERS,
    Situation,
    first_rows,
    last_over,
    phase,
    previous,
    runs_to_come,
    situation,
)

CONTEXTS = ("match", "state", "striker", "non_striker", "bowler", "partnership", "momentum")
"""Types of nodes of which a graph has one each, not counting the query."""
SAME = ("same_bowler", "same_batter", "same_matchup")
"""Types of the edges from a ball to the last one before it with the same players."""
NUM_FEATURES = {
    "match": 4 + WIDTH,
    "state": 11,
    "striker": 4,
    "non_striker": 4,
    "bowler": 4,
    "partnership": 3,
    "momentum": 12,
    "query": 4,
    "ball": 12,
}
"""Type of node → its number of features."""
IDENTITIES = {
    "match": ("venue", "team", "team"),
    "striker": ("player",),
    "non_striker": ("player",),
    "bowler": ("player",),
    "ball": ("player", "player"),
}
"""Type of node → of what vocabulary each column of its `ids` is; 0 is what that does not have."""


@dataclass(frozen=True)
class Vocabularies:
    """Names that have an embedding of their own: the first one gets number 1, others 0."""

    players: tuple[str, ...]
    venues: tuple[str, ...]
    teams: tuple[str, ...]


def vocabularies(corpus: Corpus, matches: Array, *, fewest_balls: int) -> Vocabularies:
    """Return the players, venues and teams of some matches, sorted.

    Players who face and bowl fewer balls than `fewest_balls` in them are left out, so that the
    embedding of the unknown is trained.
    """
    sides = np.isin(corpus.innings["match"], matches)
    rows, many = sides[corpus.innings_of_balls()], len(corpus.lists["players"])
    played = sum(
        np.bincount(corpus.balls[name][rows], minlength=many) for name in ("batter", "bowler")
    )
    sets = {
        "players": np.flatnonzero(played >= fewest_balls),
        "venues": np.unique(corpus.matches["venue"][matches]),
        "teams": np.union1d(corpus.innings["batting"][sides], corpus.innings["bowling"][sides]),
    }
    named = {n: tuple(sorted(corpus.lists[n][k] for k in some)) for n, some in sets.items()}
    return Vocabularies(**named)


@dataclass(frozen=True)
class Tables:
    """One row per ball of a corpus."""

    features: Mapping[str, Tensor]
    """Type of node → (balls, features) float32: of the ball itself, and of what is known before."""
    ids: Mapping[str, Tensor]
    """Type of node → (balls, identities) int32."""
    back: Mapping[str, Tensor]
    """Each of `SAME` → how many balls ago that was (balls,) int16; 0: not in this innings."""
    players: Tensor
    """(balls, 3) int32, striker, non-striker and bowler as the corpus numbers them."""
    position: Tensor
    """Place of the ball in its innings (balls,) int32, from 0."""
    target: Tensor
    """Runs to come (balls,) float32."""
    group: Tensor
    """(balls, 4) uint8: phase (0 to 2) and innings, by which errors are grouped; the over from 0,
    and the ball of the over from 1, wides and no-balls among them."""


def make_tables(
    corpus: Corpus, known_names: Vocabularies, horizon: int | None, kept: KeptForm | None = None
) -> Tables:
    """Return the tables of a corpus for a horizon in overs; None: to the end of the innings.

    `kept` is how teams and venues did before these matches.
    """
    balls, innings = corpus.balls, corpus.innings
    known = situation(corpus)
    of, number = known.innings, innings["number"][known.innings]
    players = np.stack([balls[n] for n in ("batter", "non_striker", "bowler")], axis=1)
    keys = of * len(corpus.lists["players"])
    batter, bowler = keys + players[:, 0], keys + players[:, 2]
    matchup = batter * len(corpus.lists["players"]) + players[:, 2]
    back = zip(SAME, (bowler, batter, matchup), strict=True)
    over = balls["over"]
    ball = np.arange(len(of)) - first_rows(of * 256 + over) + 1
    groups = (phase(known.over), number, over, np.minimum(ball, 255))
    return Tables(
        features=_features(corpus, known, horizon, form(corpus, kept)),
        ids=_ids(corpus, known, known_names),
        back={name: torch.from_numpy(previous(k).astype(np.int16)) for name, k in back},
        players=torch.from_numpy(players.astype(np.int32)),
        position=torch.from_numpy((np.arange(len(of)) - known.start).astype(np.int32)),
        target=torch.from_numpy(runs_to_come(corpus, horizon).astype(np.float32)),
        group=torch.from_numpy(np.stack(groups, axis=1).astype(np.uint8)),
    )


def _table(*columns: Array) -> Tensor:
    return torch.from_numpy(np.stack([c.astype(np.float32) for c in columns], axis=1))


def _rate(runs: Array, balls: Array, usual: float = 1.25) -> Array:
    """Return runs per ball, drawn towards a usual rate while the balls are few."""
    rate: Array = (runs + 6 * usual) / (balls + 6)
    return rate


def _features(
    corpus: Corpus, known: Situation, horizon: int | None, forms: Array
) -> dict[str, Tensor]:
    """Return the features of each type of node, scaled to about 1; forms are (innings, 11)."""
    innings = corpus.innings
    number = innings["number"][known.innings]
    kind = corpus.matches["kind"][innings["match"]][known.innings]
    left, needed = known.balls_left, np.maximum(known.target - known.score, 0)
    required = np.where(number > 0, np.minimum(needed / np.maximum(left, 1), 6), 0)
    to_go = np.minimum(last_over(known.over, horizon), OVERS) - known.over
    scales = np.array([6.0, 12.0, 30.0])
    (runs, balls, wickets), (together, faced) = known.bowler.T, known.partnership.T
    return {
        "match": _table(
            *((kind & FEMALE) > 0, (kind & INTERNATIONAL) > 0, number),
            *(innings["balls"][known.innings] / 120, *forms[known.innings].T),
        ),
        "state": _table(
            *(known.score / 100, known.wickets / 5, left / 120, known.legal / 120),
            *(_rate(known.score, known.legal), known.target / 150, required),
            *(needed / 100 * (number > 0), known.in_powerplay, known.over >= DEATH_FROM),
            _rate(known.score, known.legal) * to_go / 5,
        ),
        "striker": _batter(known.striker),
        "non_striker": _batter(known.non_striker),
        "bowler": _table(runs / 20, balls / 12, wickets, _rate(runs, balls)),
        "partnership": _table(together / 30, faced / 24, _rate(together, faced)),
        "momentum": _table(
            *(known.recent_runs / scales).T,
            *(known.recent_wickets * 5 / scales).T,
            *(known.recent_dots / scales).T,
            *(known.recent_fours_and_sixes * 3 / scales).T,
        ),
        "query": _table(known.over / OVERS, known.legal_in_over / 6, to_go / 5, number),
        "ball": _ball(corpus, known),
    }


def _batter(counts: Array) -> Tensor:
    return _table(counts[:, 0] / 30, counts[:, 1] / 24, _rate(*counts.T), counts[:, 1] == 0)


def _ball(corpus: Corpus, known: Situation) -> Tensor:
    """Return the features of each ball once it is bowled, and of the state that it was bowled in.

    A graph has them only for balls before its query.
    """
    balls = corpus.balls
    runs, kind = balls["runs"], balls["kind"]
    return _table(
        *(runs / 4, balls["batter_runs"] / 4, runs == 0, balls["batter_runs"] == 4),
        *(balls["batter_runs"] >= 6, (kind & WIDE) > 0, (kind & NO_BALL) > 0),
        *((kind & (BYE | LEG_BYE)) > 0, balls["wickets"], known.over / OVERS),
        *(known.score / 100, known.wickets / 5),
    )


def _ids(corpus: Corpus, known: Situation, names: Vocabularies) -> dict[str, Tensor]:
    balls, innings = corpus.balls, corpus.innings
    players = _numbers(corpus.lists["players"], names.players)
    teams = _numbers(corpus.lists["teams"], names.teams)
    venues = _numbers(corpus.lists["venues"], names.venues)
    of = known.innings
    venue = venues[corpus.matches["venue"]][innings["match"]][of]
    sides = [teams[innings[side]][of] for side in ("batting", "bowling")]
    striker, other, bowler = (players[balls[n]] for n in ("batter", "non_striker", "bowler"))
    columns = {
        "match": (venue, *sides),
        "striker": (striker,),
        "non_striker": (other,),
        "bowler": (bowler,),
        "ball": (striker, bowler),
    }
    return {name: torch.from_numpy(np.stack(some, axis=1)) for name, some in columns.items()}


def _numbers(names: Sequence[str], vocabulary: Sequence[str]) -> Array:
    """Return the number (names,) int32 that each name has in a vocabulary; 0 if it has none."""
    places = {name: place for place, name in enumerate(vocabulary, start=1)}
    return np.array([places.get(name, 0) for name in names], np.int32)
