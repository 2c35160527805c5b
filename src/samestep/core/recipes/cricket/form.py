"""How teams and venues have done on earlier days, against what is usual and whom they met.

Each side, bowling attack and venue has a rating: runs and wickets per ball beyond what is usual
after this many overs and wickets. An innings is expected to go by the sum of its three ratings, and
moves each by a part of what it went beyond that, as Elo's ratings move; the more balls a rating
has seen, the less. A run keeps the ratings after all its matches, and later matches continue from
there, so that a new season does not begin with unknown teams.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from samestep.core.recipes.cricket.corpus import FEMALE, Array, Corpus
from samestep.core.recipes.cricket.situation import OVERS, situation

_USUAL = (1.25, 0.055)
"""Runs and wickets per ball without a training part."""
_WICKETS = 11
_PRIOR_BALLS = {"batting": 300, "bowling": 300, "venue": 1000}
_MOST_BALLS = 1500
"""The cap of a rating's balls, so that recent innings keep moving it."""
_SCALE = (5.0, 50.0)
WIDTH = 11
"""Features: three each of the batting side, of the bowling side and of the venue, and two sums."""

Rating = list[float]
"""Runs per ball, wickets per ball, and the balls that they come from."""


@dataclass(frozen=True)
class KeptForm:
    """What a run knows of form when its matches end."""

    names: tuple[str, ...] = ()
    """What is rated, such as `batting India`."""
    ratings: tuple[float, ...] = ()
    """Runs, wickets and balls of each (names × 3)."""
    usual: tuple[float, ...] = ()
    """Runs and wickets per ball, by overs bowled and wickets lost (20 × 11 × 2)."""
    until: str = ""
    """The last date (YYYY-MM-DD) that is in the ratings."""


def keep_form(corpus: Corpus, train: Array) -> KeptForm:
    """Return the ratings after all matches; what is usual comes from the matches `train`."""
    usual = _usual_of(corpus, train)
    ratings: dict[str, Rating] = {}
    for _ in _walk(corpus, usual, ratings, KeptForm()):
        pass
    names = tuple(sorted(ratings))
    until = str(corpus.matches["date"].max().astype("datetime64[D]"))
    kept = tuple(round(float(number), 6) for name in names for number in ratings[name])
    return KeptForm(names, kept, usual, until)


def form(corpus: Corpus, kept: KeptForm | None) -> Array:
    """Return the features (innings, 11) of what was known on the day before each match."""
    kept = kept or KeptForm()
    usual = kept.usual or _USUAL * (OVERS * _WICKETS)
    rows = np.zeros((len(corpus.innings["start"]), WIDTH), np.float32)
    for row, parties in enumerate(_walk(corpus, usual, {}, kept)):
        rated = np.array(parties)
        rows[row, :9] = np.column_stack([rated[:, :2] * _SCALE, np.log1p(rated[:, 2]) / 8]).ravel()
        rows[row, 9:] = rated[:, :2].sum(axis=0) * _SCALE
    return rows


def _usual_of(corpus: Corpus, matches: Array) -> tuple[float, ...]:
    """Return runs and wickets per ball by over and wickets lost; rare ones lean on their over."""
    known = situation(corpus)
    cells = _cells(known.over, known.wickets)
    rows = np.isin(corpus.innings["match"], matches)[known.innings]
    both = []
    for name in ("runs", "wickets"):
        values = corpus.balls[name][rows].astype(np.float64)
        sums = np.bincount(cells[rows], values, minlength=OVERS * _WICKETS)
        counts = np.bincount(cells[rows], minlength=OVERS * _WICKETS)
        sums, counts = sums.reshape(OVERS, _WICKETS), counts.reshape(OVERS, _WICKETS)
        over = (sums.sum(1) + values.mean()) / (counts.sum(1) + 1)
        both.append((sums + 30 * over[:, None]) / (counts + 30))
    return tuple(round(float(number), 4) for number in np.stack(both, axis=2).ravel())


def _cells(over: Array, wickets: Array) -> Array:
    cells: Array = np.minimum(over, OVERS - 1) * _WICKETS + np.minimum(wickets, _WICKETS - 1)
    return cells


def _walk(
    corpus: Corpus, usual: tuple[float, ...], ratings: dict[str, Rating], kept: KeptForm
) -> Iterator[list[Rating]]:
    """Yield the three ratings before the day of each innings, and move them after that day."""
    until = int(np.datetime64(kept.until, "D").astype(int)) if kept.until else None
    beyond, balls = _beyond(corpus, usual)
    day, today = -1, list[tuple[tuple[str, ...], int]]()
    for row, names in enumerate(_parties(corpus)):
        date = int(corpus.matches["date"][corpus.innings["match"][row]])
        if date > day:
            for others, before in today:
                _move(ratings, others, beyond[before], balls[before])
            today = []
            day = date
            if until is not None and date > until:
                for place, name in enumerate(kept.names):
                    ratings[name] = list(kept.ratings[place * 3 : place * 3 + 3])
                until = None
        yield [ratings.get(name, [0.0, 0.0, 0.0]) for name in names]
        today.append((names, row))
    for others, before in today:
        _move(ratings, others, beyond[before], balls[before])


def _beyond(corpus: Corpus, usual: tuple[float, ...]) -> tuple[Array, Array]:
    """Return runs and wickets beyond the usual of each innings (innings, 2), and its balls."""
    known, many = situation(corpus), len(corpus.innings["start"])
    expected = np.array(usual).reshape(-1, 2)[_cells(known.over, known.wickets)]
    actual = np.stack([corpus.balls["runs"], corpus.balls["wickets"]], axis=1)
    columns = (actual - expected).T
    sums = [np.bincount(known.innings, column, minlength=many) for column in columns]
    return np.stack(sums, axis=1), np.bincount(known.innings, minlength=many)


def _parties(corpus: Corpus) -> Iterator[tuple[str, str, str]]:
    """Yield the names of what each innings rates; women's and men's sides share their team's."""
    matches, teams, venues = corpus.matches, corpus.lists["teams"], corpus.lists["venues"]
    columns = (corpus.innings[name] for name in ("match", "batting", "bowling"))
    for match, batting, bowling in zip(*columns, strict=True):
        women = " women" if matches["kind"][match] & FEMALE else ""
        sides = f"batting {teams[batting]}{women}", f"bowling {teams[bowling]}{women}"
        yield *sides, f"venue {venues[matches['venue'][match]]}"


def _move(ratings: dict[str, Rating], names: tuple[str, ...], beyond: Array, balls: int) -> None:
    """Move the ratings of an innings by their parts of what it went beyond their sum."""
    if not balls:
        return
    rated = [ratings.setdefault(name, [0.0, 0.0, 0.0]) for name in names]
    errors = [float(beyond[k]) / balls - sum(rating[k] for rating in rated) for k in (0, 1)]
    for rating, prior in zip(rated, _PRIOR_BALLS.values(), strict=True):
        part = balls / (rating[2] + balls + prior)
        rating[0] += part * errors[0]
        rating[1] += part * errors[1]
        rating[2] = min(rating[2] + float(balls), _MOST_BALLS)
