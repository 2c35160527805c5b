"""Many matches as a few arrays: columns of balls, of innings and of matches, and lists of names.

A row of one table points to rows of another by number, so that 100 bytes a match and about a dozen
a ball hold what the graphs are made of.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from samestep.recipes.cricket.scorecard import BadMatchError, Ball, Innings, Scorecard, decode

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

_BALLS = {
    **dict.fromkeys(("over", "runs", "batter_runs", "kind", "wickets"), np.uint8),
    **dict.fromkeys(("batter", "non_striker", "bowler"), np.uint32),
}
_INNINGS = {
    **dict.fromkeys(("number", "powerplay", "before"), np.uint8),
    **dict.fromkeys(("target", "balls"), np.uint16),
    **dict.fromkeys(("match", "batting", "bowling", "start"), np.uint32),
}
_MATCHES = {"date": np.int32, "kind": np.uint8, "venue": np.uint32, "file": np.uint32}
_POINTS_TO = {
    **dict.fromkeys(("batter", "non_striker", "bowler"), "players"),
    **dict.fromkeys(("batting", "bowling"), "teams"),
    "venue": "venues",
    "file": "files",
}
_LISTS = ("players", "people", "teams", "venues", "files", "bad", "passed")

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

    def num_bytes(self) -> int:
        """Return the bytes of all columns."""
        tables = (self.balls, self.innings, self.matches)
        return sum(column.nbytes for table in tables for column in table.values())

    def save(self, file: BinaryIO) -> None:
        """Write all of it as one npz file."""
        named = {"balls": self.balls, "innings": self.innings, "matches": self.matches}
        arrays = {f"{t}.{name}": c for t, table in named.items() for name, c in table.items()}
        lists = np.frombuffer(msgspec.json.encode(dict(self.lists)), np.uint8)
        np.savez(file, lists=lists, **arrays)  # type: ignore[arg-type]


def load(file: BinaryIO) -> Corpus:
    """Return what `Corpus.save` wrote.

    Raises:
        ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile: it is no such file.
    """
    tables: dict[str, dict[str, Array]] = {"balls": {}, "innings": {}, "matches": {}}
    with np.load(file, allow_pickle=False) as arrays:
        for name in arrays.files:
            if name != "lists":
                table, _, column = name.partition(".")
                tables[table][column] = arrays[name]
        lists = msgspec.json.decode(arrays["lists"].tobytes(), type=dict[str, tuple[str, ...]])
    return Corpus(**tables, lists=lists)


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


@dataclass
class _Building:
    """Tables that grow match by match."""

    balls: list[tuple[int, ...]] = field(default_factory=list)
    innings: list[tuple[int, ...]] = field(default_factory=list)
    matches: list[tuple[int, ...]] = field(default_factory=list)
    players: _Numbered = field(default_factory=_Numbered)
    people: dict[str, str] = field(default_factory=dict)
    teams: _Numbered = field(default_factory=_Numbered)
    venues: _Numbered = field(default_factory=_Numbered)
    lists: dict[str, list[str]] = field(default_factory=lambda: {n: [] for n in _LISTS})

    def add(self, name: str, card: Scorecard) -> None:
        """Add a match, or say why it is passed over."""
        info = card.info
        played = [innings for innings in card.innings if not innings.super_over]
        if info.match_type not in _T20:
            self.lists["passed"].append(f"{name}: a match of the kind {info.match_type}, not T20")
            return
        if info.balls_per_over != _PER_OVER:
            self.lists["passed"].append(f"{name}: overs of {info.balls_per_over} balls, not 6")
            return
        if not any(over.deliveries for innings in played for over in innings.overs):
            self.lists["passed"].append(f"{name}: no innings, so no balls")
            return
        if len(played) > 2:
            raise BadMatchError(f"innings: {len(played)} that are not super overs; expected 2")
        first = 0
        for number, innings in enumerate(played):
            if innings.overs and (last := innings.overs[-1].over) >= _OVERS:
                raise BadMatchError(
                    f"innings: over {last} in a match of 20 overs; expected 0 to 19"
                )
            self._add_innings(info.registry.people, card, innings, number, first)
            first = _runs(innings)
        kind = FEMALE * (info.gender == "female")
        kind += INTERNATIONAL * (info.team_type == "international")
        days = info.dates[0].toordinal() - _EPOCH
        self.matches.append((days, kind, self.venues[info.venue], len(self.lists["files"])))
        self.lists["files"].append(name)

    def _add_innings(
        self, people: Mapping[str, str], card: Scorecard, innings: Innings, number: int, first: int
    ) -> None:
        info = card.info
        other = info.teams[innings.team == info.teams[0]]
        target, balls = 0, min(info.overs or _OVERS, _OVERS) * _PER_OVER
        if number == 1:
            target = first + 1
            if innings.target is not None:
                target = innings.target.runs or target
                balls = _balls(innings.target.overs) or balls
        # A later one is taken when the batting side wants it: what is to come says nothing here.
        parts = sorted((part.start, int(part.end)) for part in innings.powerplays)
        powerplay = parts[0][1] if parts else NO_POWERPLAY
        before = innings.penalty_runs.pre if innings.penalty_runs else 0
        row = (number, min(powerplay, NO_POWERPLAY), before, target, min(balls, 65535))
        places = (len(self.matches), self.teams[innings.team], self.teams[other], len(self.balls))
        self.innings.append((*row, *places))
        for over in innings.overs:
            for ball in over.deliveries:
                names = (ball.batter, ball.non_striker, ball.bowler)
                three = [self.players[people.get(name, name)] for name in names]
                for name in names:
                    self.people.setdefault(people.get(name, name), name)
                self.balls.append((over.over, *_facts(ball), *three))

    def corpus(self) -> Corpus:
        """Return the tables as they are by now."""
        lists = {name: tuple(values) for name, values in self.lists.items()}
        lists |= {
            "players": tuple(self.players),
            "people": tuple(self.people[player] for player in self.players),
            "teams": tuple(self.teams),
            "venues": tuple(self.venues),
        }
        return Corpus(
            balls=_columns(self.balls, _BALLS),
            innings=_columns(self.innings, _INNINGS),
            matches=_columns(self.matches, _MATCHES),
            lists=lists,
        )


_EPOCH = 719163  # 1970-01-01 as Python counts days


def _runs(innings: Innings) -> int:
    """Return what a side has scored in the end."""
    scored = sum(ball.runs.total for over in innings.overs for ball in over.deliveries)
    awarded = innings.penalty_runs
    return scored + (awarded.pre + awarded.post if awarded else 0)


def _balls(overs: float | None) -> int:
    """Return a length as the format has it in balls: 14.4 are 14 overs and 4 balls."""
    return 0 if overs is None else int(overs) * _PER_OVER + round(overs % 1 * 10)


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


def _columns(rows: Sequence[tuple[int, ...]], types: Mapping[str, type]) -> dict[str, Array]:
    table = np.array(rows, np.int64).reshape(len(rows), len(types))
    return {name: table[:, place].astype(kind) for place, (name, kind) in enumerate(types.items())}


def ranges(starts: Array, lengths: Array) -> Array:
    """Return start, start + 1 … of each range, one range behind the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def merge(parts: Sequence[Corpus]) -> Corpus:
    """Return all matches of some corpora as one, sorted by date and name."""
    numbers = {name: _Numbered() for name in ("players", "teams", "venues")}
    tables: dict[str, list[dict[str, Array]]] = {"balls": [], "innings": [], "matches": []}
    people: dict[str, str] = {}
    lists: dict[str, list[str]] = {name: [] for name in ("files", "bad", "passed")}
    for part in parts:
        own = {n: np.array([numbers[n][x] for x in part.lists[n]], np.int64) for n in numbers} | {
            "files": np.arange(len(part.lists["files"])) + len(lists["files"])
        }
        for player, name in zip(part.lists["players"], part.lists["people"], strict=True):
            people.setdefault(player, name)
        shift = {
            "start": sum(len(t["over"]) for t in tables["balls"]),
            "match": sum(len(t["date"]) for t in tables["matches"]),
        }
        for name, values in lists.items():
            values.extend(part.lists[name])
        for table, joined in tables.items():
            joined.append(_renumbered(getattr(part, table), own, shift))
    whole = {
        table: _joined(some, kinds)
        for (table, some), kinds in zip(tables.items(), (_BALLS, _INNINGS, _MATCHES), strict=True)
    }
    named = {n: tuple(v) for n, v in numbers.items()} | {n: tuple(v) for n, v in lists.items()}
    named["people"] = tuple(people[player] for player in numbers["players"])
    return _sorted(Corpus(**whole, lists=named))


def _renumbered(
    table: Table, own: Mapping[str, Array], shift: Mapping[str, int]
) -> dict[str, Array]:
    """Return a part's table with its numbers as they are in the whole."""
    return {
        name: own[_POINTS_TO[name]][column]
        if name in _POINTS_TO
        else column + np.int64(shift.get(name, 0))
        for name, column in table.items()
    }


def _joined(tables: Sequence[Table], types: Mapping[str, type]) -> dict[str, Array]:
    return {
        name: np.concatenate([np.zeros(0, kind), *(table[name] for table in tables)]).astype(
            _narrow(name, kind, tables)
        )
        for name, kind in types.items()
    }


def _narrow(name: str, kind: type, tables: Sequence[Table]) -> Any:
    """Return the smallest type for numbers of players and the like."""
    if name not in _POINTS_TO:
        return kind
    most = max((int(table[name].max(initial=0)) for table in tables), default=0)
    return np.min_scalar_type(max(most, 256))


def _sorted(corpus: Corpus) -> Corpus:
    """Return the matches by date and then by name, with their innings and balls."""
    names = np.array(corpus.lists["files"], dtype=str)[corpus.matches["file"]]
    return take(corpus, np.lexsort((names, corpus.matches["date"])))


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
