"""Which matches are for training, validation and test: by date, or by a draw of each match."""

import datetime as dt
import hashlib
from dataclasses import dataclass

import numpy as np

from samestep.data.recipe_splits import SPLITS
from samestep.errors import UserError
from samestep.recipes.cricket.corpus import Array, Corpus

_EPOCH = dt.date(1970, 1, 1)


@dataclass(frozen=True)
class Dates:
    """The first days (YYYY-MM-DD) of the validation and of the test."""

    validation: str
    test: str


def boundaries(corpus: Corpus) -> Dates:
    """Return dates that leave the last tenth to the test, the one before to validation."""
    dates = np.unique(corpus.matches["date"])
    places = (len(dates) * 8 // 10, len(dates) * 9 // 10)
    if len(dates) < 3:
        shown = ", ".join(map(_shown, dates))
        raise UserError(
            f"All {len(corpus.matches['date']):,} matches were played on {shown}: a split by date "
            "needs three dates or more. Name more matches with --data-dir, or use --split-by "
            "random."
        )
    validation, test = (min(places[0], len(dates) - 2), min(places[1], len(dates) - 1))
    return Dates(_shown(dates[validation]), _shown(dates[test]))


def _shown(days: int) -> str:
    return (_EPOCH + dt.timedelta(days=int(days))).isoformat()


def by_date(corpus: Corpus, dates: Dates) -> dict[str, Array]:
    """Return the matches of each split."""
    first = [(dt.date.fromisoformat(day) - _EPOCH).days for day in (dates.validation, dates.test)]
    return _named(np.searchsorted(np.array(first), corpus.matches["date"], "right"))


def at_random(corpus: Corpus, seed: int) -> dict[str, Array]:
    """Return the matches of each split: a tenth each for validation and test.

    Each match is drawn for itself, by its file's name, so that more matches change nothing for
    those that were there.
    """
    draws = np.array([_draw(corpus.lists["files"][file], seed) for file in corpus.matches["file"]])
    return _named((draws >= 0.8).astype(int) + (draws >= 0.9))


def _draw(name: str, seed: int) -> float:
    """Return a number in [0, 1) for the file of a match, wherever it lies."""
    stem = name.rpartition("/")[2]
    return int.from_bytes(hashlib.sha256(f"{seed} {stem}".encode()).digest()[:7], "big") / 2**56


def _named(parts: Array) -> dict[str, Array]:
    return {name: np.flatnonzero(parts == place) for place, name in enumerate(SPLITS)}


def balls_of(corpus: Corpus, matches: Array) -> Array:
    """Return the rows of the balls of some matches, in their order."""
    chosen = np.zeros(len(corpus.matches["date"]), bool)
    chosen[matches] = True
    return np.flatnonzero(chosen[corpus.innings["match"]][corpus.innings_of_balls()])


def thinned(corpus: Corpus, rows: Array, per_match: int, seed: int) -> Array:
    """Return at most `per_match` balls of each match, drawn by seed, in their order."""
    match = corpus.innings["match"][corpus.innings_of_balls()[rows]]
    draws = np.random.default_rng(seed).random(len(rows))
    order = np.lexsort((draws, match))
    counts = np.bincount(match, minlength=len(corpus.matches["date"]))
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows[np.sort(order[place < per_match])]


def digests(corpus: Corpus) -> Array:
    """Return an identifier of each match (matches,) that does not depend on its file's name.

    It is made of the date, the sides in the order they bat, the balls and the runs.
    """
    innings, teams = corpus.innings, corpus.lists["teams"]
    first = np.searchsorted(innings["match"], np.arange(len(corpus.matches["date"])))
    of = innings["match"][corpus.innings_of_balls()]
    many = len(corpus.matches["date"])
    columns = (
        *(corpus.matches["date"], corpus.matches["kind"]),
        *(innings["batting"][first], innings["bowling"][first]),
        np.bincount(of, minlength=many),
        np.bincount(of, corpus.balls["runs"], minlength=many).astype(np.int64),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = (f"{d} {k} {teams[a]}|{b} {teams[z]}|{r}" for d, k, a, z, b, r in rows)
    return np.array([hashlib.sha256(line.encode()).hexdigest()[:10] for line in lines], dtype=str)


def without_known(
    corpus: Corpus, parts: dict[str, Array], known: tuple[str, ...]
) -> dict[str, Array]:
    """Return the parts as a run has them that has used the matches with some digests.

    What it has used stays where it was, and all others are of the test, whatever their date.
    """
    used = np.isin(digests(corpus), np.array(known, dtype=str))
    kept = {name: parts[name][used[parts[name]]] for name in SPLITS[:2]}
    return {**kept, "test": np.flatnonzero(~used)}
