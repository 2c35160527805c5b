"""What is known before each ball, for all balls at once, and what is to be predicted.

Every number of a row comes from earlier rows of its innings, from the ball's own over and the
three players named for it, and from what was settled before the innings. No function here looks at
what a ball brought in its own row; only `runs_to_come` does.
"""

from dataclasses import dataclass

import numpy as np

from samestep.core.recipes.cricket.corpus import (
    BOWLERS_WICKET,
    NO_BALL,
    NO_POWERPLAY,
    PENALTY,
    WIDE,
    Array,
    Corpus,
)

OVERS = 20
BALLS_PER_OVER = 6
POWERPLAY_OVERS, DEATH_FROM = 6, 15
"""Overs with restrictions in a full match, and the over from which an innings comes to its end."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Before each ball: arrays (balls,), or (balls, windows) of the last balls."""

    innings: Array
    """Row of the table of innings."""
    start: Array
    """First ball of the innings."""
    over: Array
    legal_in_over: Array
    legal: Array
    """Balls bowled, without wides and no-balls."""
    balls_left: Array
    """Legal balls that the side may still face; right for miscounted overs, too."""
    in_powerplay: Array
    score: Array
    wickets: Array
    target: Array
    """0 in a first innings."""
    recent_runs: Array
    """(balls, windows), in the last `WINDOWS` balls."""
    recent_wickets: Array
    recent_dots: Array
    recent_fours_and_sixes: Array
    striker: Array
    """(balls, 2): runs and balls faced."""
    non_striker: Array
    bowler: Array
    """(balls, 3): runs conceded, legal balls and wickets."""
    partnership: Array
    """(balls, 2): runs and balls since these two bat together."""


WINDOWS = (6, 12, 30)


def situation(corpus: Corpus) -> Situation:
    """Return the situation before each ball of a corpus."""
    balls, innings = corpus.balls, corpus.innings
    of = corpus.innings_of_balls()
    start = innings["start"].astype(np.int64)[of]
    over = balls["over"].astype(np.int64)
    runs = balls["runs"].astype(np.int64)
    wickets = balls["wickets"].astype(np.int64)
    legal = ((balls["kind"] & (WIDE | NO_BALL)) == 0).astype(np.int64)
    over_start = first_rows(of * 256 + over)
    legal_in_over = _since(legal, over_start)
    last_powerplay = innings["powerplay"][of]
    length = innings["balls"].astype(np.int64)[of]
    boundary = balls["batter_runs"] >= 4
    return Situation(
        innings=of,
        start=start,
        over=over,
        legal_in_over=legal_in_over,
        legal=_since(legal, start),
        balls_left=np.maximum(length - over * BALLS_PER_OVER - legal_in_over, 0),
        in_powerplay=(over <= last_powerplay) & (last_powerplay != NO_POWERPLAY),
        score=_since(runs, start) + innings["before"][of],
        wickets=_since(wickets, start),
        target=innings["target"].astype(np.int64)[of],
        recent_runs=_recent(runs, start),
        recent_wickets=_recent(wickets, start),
        recent_dots=_recent((runs == 0).astype(np.int64), start),
        recent_fours_and_sixes=_recent(boundary.astype(np.int64), start),
        **_players(corpus, of, legal),
    )


def _sums_before(values: Array) -> Array:
    """Return the sums of all values before each row, and of all: (rows + 1,)."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(values, dtype=np.int64)])


def _since(values: Array, first: Array) -> Array:
    """Return the sum of the values from row `first` up to, and without, each row."""
    sums = _sums_before(values)
    return sums[:-1] - sums[first]


def _recent(values: Array, start: Array) -> Array:
    """Return the sums (rows, windows) over the earlier rows of the same innings."""
    rows = np.arange(len(values))
    return np.stack([_since(values, np.maximum(rows - n, start)) for n in WINDOWS], axis=1)


def first_rows(keys: Array) -> Array:
    """Return for each row the first row of its run of equal keys."""
    new = np.append(True, keys[1:] != keys[:-1])[: len(keys)]
    return np.maximum.accumulate(np.where(new, np.arange(len(keys)), 0))


def _by_group(keys: Array, *values: Array) -> Array:
    """Return sums (rows, values) over the earlier rows of the same key."""
    order = np.argsort(keys, kind="stable")
    first = first_rows(keys[order])
    sums = np.empty((len(keys), len(values)), np.int64)
    for place, column in enumerate(values):
        sums[order, place] = _since(column[order], first)
    return sums


def _players(corpus: Corpus, of: Array, legal: Array) -> dict[str, Array]:
    balls = corpus.balls
    many = len(corpus.lists["players"])
    batter, other, bowler = (
        balls[name].astype(np.int64) for name in ("batter", "non_striker", "bowler")
    )
    kind, runs = balls["kind"], balls["runs"].astype(np.int64)
    # Each ball has two rows here, for the one who faces it and for the one who does not.
    keys = np.stack([of * many + batter, of * many + other], axis=1).ravel()
    own = np.stack([balls["batter_runs"], np.zeros_like(balls["batter_runs"])], axis=1).ravel()
    faced = np.stack([(kind & WIDE) == 0, np.zeros(len(kind), bool)], axis=1).ravel()
    batting = _by_group(keys, own, faced).reshape(-1, 2, 2)
    # Wides and no-balls are the bowler's; byes, leg byes and penalties are not.
    extras = runs - balls["batter_runs"]
    theirs = balls["batter_runs"] + np.where(kind & (WIDE | NO_BALL), extras, 0)
    theirs = np.where(kind & PENALTY, balls["batter_runs"], theirs)
    credited = (kind & BOWLERS_WICKET) > 0
    pair = (of * many + np.minimum(batter, other)) * many + np.maximum(batter, other)
    together = first_rows(pair)
    rows = np.arange(len(of))
    return {
        "striker": batting[:, 0],
        "non_striker": batting[:, 1],
        "bowler": _by_group(of * many + bowler, theirs, legal, credited),
        "partnership": np.stack([_since(runs, together), rows - together], axis=1),
    }


def last_over(over: Array, horizon: int | None) -> Array:
    """Return the over before which the runs to be predicted end.

    That is the horizon itself up to there, the end of the innings in its last overs, and otherwise
    that many overs later. Without a horizon it is the end of the innings.
    """
    if horizon is None:
        return np.full_like(over, 255)
    ahead = np.where(over >= OVERS - horizon, OVERS, over + horizon)
    return np.where(over < horizon, horizon, ahead)


def runs_to_come(corpus: Corpus, horizon: int | None) -> Array:
    """Return the runs (balls,) from each ball on in the overs up to its horizon."""
    of = corpus.innings_of_balls()
    over = corpus.balls["over"].astype(np.int64)
    ends = np.searchsorted(of * 256 + over, of * 256 + last_over(over, horizon), "left")
    sums = _sums_before(corpus.balls["runs"])
    return sums[ends] - sums[:-1]


def phase(over: Array) -> Array:
    """Return 0 in the power-play of a full match, 1 in the middle, 2 at the end."""
    return (over >= POWERPLAY_OVERS).astype(np.int64) + (over >= DEATH_FROM)


def previous(keys: Array) -> Array:
    """Return the distance in rows to the previous row of the same key (rows,); 0 without one."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    back = np.zeros(len(keys), np.int64)
    back[order[1:]] = np.where(same, order[1:] - order[:-1], 0)
    return back
