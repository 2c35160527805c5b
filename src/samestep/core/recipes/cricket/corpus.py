"""Many matches as a few arrays: columns of balls, of innings and of matches, and lists of names.

A row of one table points to rows of another by number: 100 bytes a match and about a dozen a ball.
"""

import hashlib
import os
import pickle
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from samestep.base.errors import UserError
from samestep.core.recipes.cricket.scorecard import BadMatchError, Ball, Innings, Scorecard, decode

VERSION = 2
"""Of these arrays: to be raised whenever they, or how they are read, change."""

Array = npt.NDArray[Any]
Table = Mapping[str, Array]
"""Column → values, all of one length."""

WIDE, NO_BALL, BYE, LEG_BYE, PENALTY, BOWLERS_WICKET = 1, 2, 4, 8, 16, 32
"""Bits of the column `kind`; the last one: a wicket that is the bowler's."""
FEMALE, INTERNATIONAL = 1, 2
"""Bits of the column `kind` of a match."""
NO_POWERPLAY = 255
# Not from `recipe_splits`, which imports torch: the processes that read matches import this file.
_SPLITS = ("train", "validation", "test")

_TYPES: Mapping[str, Mapping[str, type]] = {
    "balls": {
        **dict.fromkeys(("over", "runs", "batter_runs", "kind", "wickets"), np.uint8),
        **dict.fromkeys(("batter", "non_striker", "bowler"), np.uint32),
    },
    "innings": {
        **dict.fromkeys(("number", "powerplay", "before"), np.uint8),
        **dict.fromkeys(("target", "balls"), np.uint16),
        **dict.fromkeys(("match", "batting", "bowling", "start"), np.uint32),
    },
    "matches": {"date": np.int32, "kind": np.uint8, "venue": np.uint32, "file": np.uint32},
}
"""Table → its columns, in the order in which a row gives them."""
_POINTS_TO = {
    **dict.fromkeys(("batter", "non_striker", "bowler"), "players"),
    **dict.fromkeys(("batting", "bowling"), "teams"),
    "venue": "venues",
    "file": "files",
}

# https://www.lords.org/mcc/the-laws-of-cricket: the other ways out are not credited to the bowler.
_BOWLERS = frozenset({"bowled", "caught", "caught and bowled", "lbw", "stumped", "hit wicket"})
_NOT_OUT = frozenset({"retired hurt", "retired not out"})
_T20 = ("T20", "IT20")
_OVERS, _PER_OVER = 20, 6


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Matches of twenty overs a side, sorted by date and then by name."""

    balls: Table
    """`over` from 0; `runs` in all, `batter_runs` of them the batter's; `kind` (bits), `wickets`
    that fell; `batter`, `non_striker`, `bowler` (players)."""
    innings: Table
    """`match`; `number` from 0; `batting`, `bowling` (teams); `target` (0: none); `balls` that the
    side may face, `powerplay`: the last over of its first one; `before`: runs awarded before it;
    `start`: its first ball."""
    matches: Table
    """`date` in days since 1970, `kind` (bits), `venue`, `file`."""
    lists: Mapping[str, tuple[str, ...]]
    """`players` (identifiers), `people` (their names), `teams`, `venues`, `files`; `bad` and
    `passed`: files that cannot be read, and those of other kinds, with the reason."""

    @property
    def num_balls(self) -> int:
        """The number of balls."""
        return len(self.balls["over"])

    def ends(self) -> Array:
        """Return the ball after the last one of each innings."""
        return np.append(self.innings["start"][1:], self.num_balls).astype(np.int64)

    def innings_of_balls(self) -> Array:
        """Return the innings (balls,) of each ball."""
        starts = self.innings["start"].astype(np.int64)
        return np.repeat(np.arange(len(starts)), self.ends() - starts)

    def save(self, file: BinaryIO) -> None:
        """Write all of it as one npz file."""
        named = {f"{t}.{name}": getattr(self, t)[name] for t in _TYPES for name in _TYPES[t]}
        lists = np.frombuffer(msgspec.json.encode(dict(self.lists)), np.uint8)
        np.savez(file, lists=lists, **named)

    def save_at(self, path: Path, folder: Path) -> None:
        """Write a file whole or not at all: first in `folder`, under a name of its own."""
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            self.save(file)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(path)


def load(file: BinaryIO) -> Corpus:
    """Read a corpus that `Corpus.save` wrote.

    Raises:
        ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile: it is not such a file.
    """
    with np.load(file, allow_pickle=False) as arrays:
        tables = {t: {name: arrays[f"{t}.{name}"] for name in _TYPES[t]} for t in _TYPES}
        lists = msgspec.json.decode(arrays["lists"].tobytes(), type=dict[str, tuple[str, ...]])
    return Corpus(**tables, lists=lists)


def serve() -> None:
    """Read documents into part files, as they come on standard input, until it ends."""
    while True:
        try:
            path, documents = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent
        except EOFError:
            return
        answer = None
        try:
            from_documents(documents).save_at(path, path.parent)
        except OSError as error:
            answer = error
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def from_documents(documents: Iterable[tuple[str, bytes]]) -> Corpus:
    """Return the matches in JSON documents; those that cannot be read are in `lists["bad"]`."""
    building = _Building()
    for name, document in documents:
        try:
            building.add(name, decode(document))
        except BadMatchError as error:
            building.lists["bad"].append(f"{name}: {error}")
    return building.corpus()


class _Numbered(dict[str, int]):
    """Names → their numbers, given in order of appearance."""

    def __missing__(self, name: str) -> int:
        self[name] = number = len(self)
        return number


class _Building:
    """Tables that grow match by match."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[int, ...]]] = {table: [] for table in _TYPES}
        self.players, self.teams, self.venues = _Numbered(), _Numbered(), _Numbered()
        self.people: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {"files": [], "bad": [], "passed": []}

    def add(self, name: str, card: Scorecard) -> None:
        """Add a match, or say why it is passed over."""
        info = card.info
        played = [innings for innings in card.innings if not innings.super_over]
        why = ""
        if info.match_type not in _T20:
            why = f"a match of the kind {info.match_type}, not T20"
        elif info.balls_per_over != _PER_OVER:
            why = f"overs of {info.balls_per_over} balls, not 6"
        elif not any(over.deliveries for innings in played for over in innings.overs):
            why = "no innings, so no balls"
        if why:
            self.lists["passed"].append(f"{name}: {why}")
            return
        if len(played) > 2:
            raise BadMatchError(f"innings: {len(played)} that are not super overs; expected 2")
        first = 0
        for number, innings in enumerate(played):
            if innings.overs and (last := innings.overs[-1].over) >= _OVERS:
                raise BadMatchError(
                    f"innings: over {last} in a match of 20 overs; expected 0 to 19"
                )
            self._add_innings(card, innings, number, first)
            # What a side has scored in the end is what the other has to beat.
            first = sum(ball.runs.total for over in innings.overs for ball in over.deliveries)
            if innings.penalty_runs:
                first += innings.penalty_runs.pre + innings.penalty_runs.post
        kind = FEMALE * (info.gender == "female")
        kind += INTERNATIONAL * (info.team_type == "international")
        days = info.dates[0].toordinal() - _EPOCH
        self.rows["matches"].append((days, kind, self.venues[info.venue], len(self.lists["files"])))
        self.lists["files"].append(name)

    def _add_innings(self, card: Scorecard, innings: Innings, number: int, first: int) -> None:
        info, people, balls = card.info, card.info.registry.people, self.rows["balls"]
        other = info.teams[innings.team == info.teams[0]]
        target = 0
        length = min(info.overs or _OVERS, _OVERS) * _PER_OVER
        if number == 1:
            target = first + 1
            if innings.target is not None:
                target = innings.target.runs or target
                overs = innings.target.overs or 0.0  # 14.4 are 14 overs and 4 balls
                length = int(overs) * _PER_OVER + round(overs % 1 * 10) or length
        # A later one is taken when the batting side wants it: what is to come says nothing here.
        parts = sorted((part.start, int(part.end)) for part in innings.powerplays)
        powerplay = min(parts[0][1], NO_POWERPLAY) if parts else NO_POWERPLAY
        before = innings.penalty_runs.pre if innings.penalty_runs else 0
        sides = self.teams[innings.team], self.teams[other]
        row = (number, powerplay, before, target, min(length, 65535))
        self.rows["innings"].append((*row, len(self.rows["matches"]), *sides, len(balls)))
        for over in innings.overs:
            for ball in over.deliveries:
                three = []
                for name in (ball.batter, ball.non_striker, ball.bowler):
                    player = people.get(name, name)
                    three.append(self.players[player])
                    self.people.setdefault(player, name)
                balls.append((over.over, *_facts(ball), *three))

    def corpus(self) -> Corpus:
        """Return the tables as they are by now."""
        tables: dict[str, Table] = {}
        for name, types in _TYPES.items():
            table = np.array(self.rows[name], np.int64).reshape(-1, len(types))
            columns = zip(types.items(), table.T, strict=True)
            tables[name] = {column: values.astype(kind) for (column, kind), values in columns}
        lists = {name: tuple(values) for name, values in self.lists.items()} | {
            "players": tuple(self.players),
            "people": tuple(self.people[player] for player in self.players),
            "teams": tuple(self.teams),
            "venues": tuple(self.venues),
        }
        return Corpus(**tables, lists=lists)


_EPOCH = 719163  # 1970-01-01 as Python counts days


def _facts(ball: Ball) -> tuple[int, int, int, int]:
    """Return runs, the batter's runs, the kind and the wickets of a ball."""
    kind = wickets = 0
    if (extras := ball.extras) is not None:
        kind = WIDE * (extras.wides > 0) | NO_BALL * (extras.noballs > 0)
        kind |= BYE * (extras.byes > 0) | LEG_BYE * (extras.legbyes > 0)
        kind |= PENALTY * (extras.penalty > 0)
    for wicket in ball.wickets:
        wickets += wicket.kind not in _NOT_OUT
        kind |= BOWLERS_WICKET * (wicket.kind in _BOWLERS)
    return ball.runs.total, ball.runs.batter, kind, wickets


def merge(parts: Iterable[Corpus]) -> Corpus:
    """Return all matches of some corpora as one, sorted by date and name."""
    numbers = {name: _Numbered() for name in ("players", "teams", "venues")}
    tables: dict[str, list[dict[str, Array]]] = {table: [] for table in _TYPES}
    people: dict[str, str] = {}
    lists: dict[str, list[str]] = {name: [] for name in ("files", "bad", "passed")}
    shift = {"start": 0, "match": 0}
    for part in parts:
        own = {n: np.array([numbers[n][x] for x in part.lists[n]], np.int64) for n in numbers}
        own["files"] = np.arange(len(part.lists["files"])) + len(lists["files"])
        for player, name in zip(part.lists["players"], part.lists["people"], strict=True):
            people.setdefault(player, name)
        for name, values in lists.items():
            values.extend(part.lists[name])
        for table, joined in tables.items():
            joined.append(
                {
                    name: own[_POINTS_TO[name]][column]
                    if name in _POINTS_TO
                    else column + np.int64(shift.get(name, 0))
                    for name, column in getattr(part, table).items()
                }
            )
        shift["start"] += part.num_balls
        shift["match"] += len(part.matches["date"])
    whole = {table: _joined(some, _TYPES[table]) for table, some in tables.items()}
    named = {n: tuple(v) for n, v in numbers.items()} | {n: tuple(v) for n, v in lists.items()}
    named["people"] = tuple(people[player] for player in numbers["players"])
    corpus = Corpus(**whole, lists=named)
    names = np.array(corpus.lists["files"], dtype=str)[corpus.matches["file"]]
    return take(corpus, np.lexsort((names, corpus.matches["date"])))


def _joined(parts: list[dict[str, Array]], types: Mapping[str, type]) -> dict[str, Array]:
    """Return the rows of all parts; numbers of players and the like in the smallest type."""
    whole = {}
    for name, kind in types.items():
        column = np.concatenate([np.zeros(0, kind), *(part[name] for part in parts)])
        small = np.min_scalar_type(max(int(column.max(initial=0)), 256))
        whole[name] = column.astype(small if name in _POINTS_TO else kind)
    return whole


def ranges(starts: Array, lengths: Array) -> Array:
    """Return start, start + 1 … of each range, one range behind the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def take(corpus: Corpus, matches: Array) -> Corpus:
    """Return some matches, in the order given; lists of names stay as they are."""
    innings, ends = corpus.innings, corpus.ends()
    first = np.searchsorted(innings["match"], matches, "left")
    number = np.searchsorted(innings["match"], matches, "right") - first
    rows = ranges(first, number)
    starts = innings["start"].astype(np.int64)[rows]
    lengths = ends[rows] - starts
    balls = ranges(starts, lengths)
    chosen = {name: column[rows] for name, column in innings.items()}
    chosen["match"] = np.repeat(np.arange(len(matches)), number).astype(np.uint32)
    chosen["start"] = (np.cumsum(lengths) - lengths).astype(np.uint32)
    return Corpus(
        balls={name: column[balls] for name, column in corpus.balls.items()},
        innings=chosen,
        matches={name: column[matches] for name, column in corpus.matches.items()},
        lists=corpus.lists,
    )


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
    return {name: np.flatnonzero(parts == place) for place, name in enumerate(_SPLITS)}


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
    kept = {name: parts[name][used[parts[name]]] for name in _SPLITS[:2]}
    return {**kept, "test": np.flatnonzero(~used)}
