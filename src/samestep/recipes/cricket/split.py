"""Which matches are for training, validation and test: by date, or by a draw of each match."""

import hashlib

import numpy as np

from samestep.data.recipe_splits import SPLITS
from samestep.errors import UserError
from samestep.recipes.cricket.corpus import Array, Corpus

Dates = tuple[str, str]
"""The first days (YYYY-MM-DD) of the validation and of the test."""


def boundaries(corpus: Corpus) -> Dates:
    """Return dates that leave the last tenth to the test, the one before to validation."""
    days = np.unique(corpus.matches["date"])
    dates = [str(day) for day in days.astype("datetime64[D]")]
    if len(dates) < 3:
        shown = ", ".join(dates)
        raise UserError(
            f"All {len(corpus.matches['date']):,} matches were played on {shown}: a split by date "
            "needs three dates or more. Name more matches with --data-dir, or use --split-by "
            "random."
        )
    validation, test = (len(dates) * part // 10 for part in (8, 9))
    return dates[min(validation, len(dates) - 2)], dates[min(test, len(dates) - 1)]


def by_date(corpus: Corpus, dates: Dates) -> dict[str, Array]:
    """Return the matches of each split."""
    first = np.array(dates, "datetime64[D]").astype(int)
    return _named(np.searchsorted(first, corpus.matches["date"], "right"))


def at_random(corpus: Corpus, seed: int) -> dict[str, Array]:
    """Return the matches of each split: a tenth each for validation and test.

    Each match is drawn for itself, by its file's name, so that more matches change nothing for
    those that were there.
    """
    stems = [corpus.lists["files"][file].rpartition("/")[2] for file in corpus.matches["file"]]
    hashes = [hashlib.sha256(f"{seed} {stem}".encode()).digest() for stem in stems]
    draws = np.array([int.from_bytes(digest[:7], "big") / 2**56 for digest in hashes])
    return _named((draws >= 0.8).astype(int) + (draws >= 0.9))


def _named(parts: Array) -> dict[str, Array]:
    return {name: np.flatnonzero(parts == place) for place, name in enumerate(SPLITS)}


def balls_of(corpus: Corpus, matches: Array) -> Array:
    """Return the rows of the balls of some matches, in their order."""
    return np.flatnonzero(np.isin(corpus.innings["match"], matches)[corpus.innings_of_balls()])


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
    innings, teams, many = corpus.innings, corpus.lists["teams"], len(corpus.matches["date"])
    first = np.searchsorted(innings["match"], np.arange(many))
    of = innings["match"][corpus.innings_of_balls()]
    columns = (
        *(corpus.matches["date"], corpus.matches["kind"]),
        *(innings["batting"][first], innings["bowling"][first]),
        np.bincount(of, minlength=many),
        np.bincount(of, corpus.balls["runs"], minlength=many).astype(np.int64),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = [f"{d} {k} {teams[a]}|{b} {teams[z]}|{r}" for d, k, a, z, b, r in rows]
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
