"""One match as Cricsheet writes it in JSON, formats 1.0.0 and 1.1.0, decoded and checked.

https://cricsheet.org/format/json/ describes the fields. Within innings every field is known here,
so that nothing which could change a score is passed over in silence; of the rest of a file only
what is used is looked at.
"""

import datetime as dt
from typing import Annotated, Any, Literal

import msgspec

VERSIONS = ("1.0.0", "1.1.0")

_Small = Annotated[int, msgspec.Meta(ge=0, le=255)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=65535)]
WicketKind = Literal[
    "bowled",
    "caught",
    "caught and bowled",
    "handled the ball",
    "hit the ball twice",
    "hit wicket",
    "lbw",
    "obstructing the field",
    "retired hurt",
    "retired not out",
    "retired out",
    "run out",
    "stumped",
    "timed out",
]


_Unread = Any
"""What changes no score; only its name is known."""


class BadMatchError(Exception):
    """A match that cannot be read; the message says where in the file, and what was expected."""


class _Strict(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A part of which every field is known."""


class Runs(_Strict):
    """The runs of one delivery."""

    batter: _Small
    extras: _Small
    total: _Small
    non_boundary: bool = False


class Extras(_Strict):
    """The extras of one delivery, by kind."""

    byes: _Small = 0
    legbyes: _Small = 0
    noballs: _Small = 0
    penalty: _Small = 0
    wides: _Small = 0


class Wicket(_Strict):
    """A batter who left, out or not."""

    kind: WicketKind
    player_out: str
    fielders: _Unread = None


class Ball(_Strict):
    """One ball, legal or not."""

    batter: str
    bowler: str
    non_striker: str
    runs: Runs
    extras: Extras | None = None
    wickets: tuple[Wicket, ...] = ()
    replacements: _Unread = None
    review: _Unread = None


class Over(_Strict):
    """An over, numbered from 0."""

    over: Annotated[int, msgspec.Meta(ge=0, le=254)]
    deliveries: tuple[Ball, ...]


class PenaltyRuns(_Strict):
    """Runs awarded before or after an innings."""

    pre: _Small = 0
    post: _Small = 0


class Powerplay(msgspec.Struct, rename={"start": "from", "end": "to"}, gc=False):
    """Overs with restrictions on the field; 5.6 is the 6th delivery of over 5."""

    start: float
    end: float


class Target(_Strict):
    """What the second side needs, and in how many overs: 14.4 are 14 overs and 4 balls."""

    overs: float | None = None
    runs: _Count | None = None


class Innings(_Strict):
    """One innings; `team` bats."""

    team: str
    overs: tuple[Over, ...] = ()
    absent_hurt: _Unread = None
    declared: bool = False
    forfeited: bool = False
    miscounted_overs: _Unread = None
    penalty_runs: PenaltyRuns | None = None
    powerplays: tuple[Powerplay, ...] = ()
    super_over: bool = False
    target: Target | None = None


class Registry(msgspec.Struct, gc=False):
    """Names → identifiers, which stay the same for a person."""

    people: dict[str, str] = {}


class Info(msgspec.Struct, gc=False):
    """Facts about a match without its balls; the result is deliberately not read."""

    dates: Annotated[tuple[dt.date, ...], msgspec.Meta(min_length=1)]
    match_type: str
    teams: Annotated[tuple[str, ...], msgspec.Meta(min_length=2, max_length=2)]
    balls_per_over: Annotated[int, msgspec.Meta(ge=1, le=20)] = 6
    gender: str = ""
    overs: Annotated[int, msgspec.Meta(ge=1, le=254)] | None = None
    registry: Registry = msgspec.field(default_factory=Registry)
    team_type: str = ""
    venue: str = ""


class Meta(msgspec.Struct, gc=False):
    """The file about itself."""

    data_version: str


class Head(msgspec.Struct, gc=False):
    """The part of a file that says how the rest is to be read."""

    meta: Meta


class Scorecard(Head, gc=False):
    """One match."""

    info: Info
    innings: tuple[Innings, ...] = ()


_DECODER = msgspec.json.Decoder(Scorecard)
_HEAD = msgspec.json.Decoder(Head)
_NO_EXTRAS = Extras()
_LEVELS: tuple[tuple[str, type], ...] = (
    ("innings", Innings),
    ("overs", Over),
    ("deliveries", Ball),
)


def decode(document: bytes) -> Scorecard:
    """Return the match in a JSON document.

    Raises:
        BadMatchError: it is not such a match; the message names the path inside.
    """
    try:
        card = _DECODER.decode(document)
    except RecursionError as error:
        raise BadMatchError("this is not a match: its parts are nested too deep") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMatchError(_reason(document, error)) from error
    _check_version(card.meta.data_version)
    for place, innings in enumerate(card.innings):
        _check(card.info, innings, f"innings[{place}]")
    return card


def _check_version(version: str) -> None:
    if version not in VERSIONS:
        raise BadMatchError(
            f"meta.data_version is {version!r}; this reader knows {' and '.join(VERSIONS)}"
        )


def _check(info: Info, innings: Innings, path: str) -> None:
    if innings.team not in info.teams:
        raise BadMatchError(
            f"{path}.team is {innings.team!r}; expected one of info.teams: {', '.join(info.teams)}"
        )
    last = -1
    for place, over in enumerate(innings.overs):
        if over.over <= last:
            raise BadMatchError(
                f"{path}.overs[{place}].over is {over.over}; expected more than the {last} before"
            )
        last = over.over
        for ball, delivery in enumerate(over.deliveries):
            runs, extras = delivery.runs, delivery.extras or _NO_EXTRAS
            at = f"{path}.overs[{place}].deliveries[{ball}].runs"
            if runs.batter + runs.extras != runs.total:
                expected = runs.batter + runs.extras
                raise BadMatchError(
                    f"{at}.total is {runs.total}; expected batter + extras, {expected}"
                )
            named = extras.byes + extras.legbyes + extras.noballs + extras.penalty + extras.wides
            if named != runs.extras:
                raise BadMatchError(
                    f"{at}.extras is {runs.extras}; expected the sum of the delivery's extras, "
                    f"{named}"
                )


def _reason(document: bytes, error: Exception) -> str:
    """Return a document's first error and its place; msgspec does not say which ball it is."""
    try:
        part: Any = msgspec.json.decode(document)
    except (msgspec.DecodeError, UnicodeDecodeError) as broken:
        return f"this is not a complete JSON document: {broken}"
    try:
        _check_version(_HEAD.decode(document).meta.data_version)
    except BadMatchError as unknown:
        return str(unknown)
    except msgspec.DecodeError:
        pass  # the first error says it
    path = ""
    message = str(error)
    for key, kind in _LEVELS:
        bad = _first_bad(part.get(key) if isinstance(part, dict) else None, kind)
        if bad is None:
            break
        place, part, message = bad
        path += f"{key}[{place}]."
    what, _, where = message.partition(" - at `$")
    what = what.replace("Invalid RFC3339 encoded date", "Expected a date, YYYY-MM-DD")
    inside = path + where.rstrip("`").lstrip(".")
    return f"{inside.rstrip('.') or 'the file'}: {what[:1].lower()}{what[1:]}"


def _first_bad(parts: object, kind: type) -> tuple[int, Any, str] | None:
    """Return the place of the first part that is not of a kind, the part, and what is wrong."""
    if not isinstance(parts, list):
        return None
    for place, part in enumerate(parts):
        try:
            msgspec.convert(part, kind)
        except msgspec.ValidationError as error:
            return place, part, str(error)
    return None
