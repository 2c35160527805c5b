"""Made-up matches in Cricsheet's format, for trying things out without data; read as real ones are.

Players differ in skill, pitches in how much is scored, and batters hit out towards the end, so that
there is something to learn. Nothing here was fitted to real matches.
"""

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from samestep.core.recipes.cricket.match_files import Document

_NUM_TEAMS, _NUM_VENUES, _SQUAD = 8, 6, 13
_RUNS = np.array([0, 1, 2, 3, 4, 6])
_USUAL = np.log([0.36, 0.40, 0.07, 0.01, 0.11, 0.05])
_HOPED = np.array([-1.0, 0.1, 0.3, 0.3, 1.0, 1.4])
"""How much likelier a run becomes for a better batter, an easier pitch, a later over."""
_WICKETS = ("caught", "bowled", "lbw", "run out", "stumped")
_FIRST_DAY = dt.date(2020, 1, 1)


class _League:
    """Who plays, and how well: drawn once."""

    def __init__(self, draw: np.random.Generator) -> None:
        self.draw = draw
        self.skill: dict[str, tuple[float, float]] = {}
        """Player → batting and bowling."""
        self.teams: dict[str, list[str]] = {}
        for team in range(_NUM_TEAMS):
            strength = draw.normal(0, 0.2)
            names = [f"P{team}{place:02}" for place in range(_SQUAD)]
            for place, name in enumerate(names):
                batting = strength + 0.5 - 0.1 * place + draw.normal(0, 0.2)
                self.skill[name] = (batting, strength + draw.normal(0, 0.2))
            self.teams[f"Team {team}"] = names
        self.venues = {f"Ground {venue}": draw.normal(0, 0.2) for venue in range(_NUM_VENUES)}


def documents(num_matches: int, seed: int) -> Iterator[Document]:
    """Yield made-up matches, the same for the same seed."""
    league = _League(np.random.default_rng(seed))
    for number in range(num_matches):
        card = _match(league, number)
        yield f"{number:06}.json", msgspec.json.encode(card)


def _match(league: _League, number: int) -> dict[str, Any]:
    draw = league.draw
    names = [str(name) for name in draw.choice(list(league.teams), 2, replace=False)]
    venue = str(draw.choice(list(league.venues)))
    elevens = {
        name: [league.teams[name][p] for p in sorted(draw.choice(_SQUAD, 11, replace=False))]
        for name in names
    }
    pitch = league.venues[venue] + draw.normal(0, 0.15)
    one, other = names
    first = _Side(league, elevens[one], elevens[other][5:], pitch, None)
    innings = [first.innings(one)]
    second = _Side(league, elevens[other], elevens[one][5:], pitch, first.score + 1)
    innings.append(second.innings(other))
    day = _FIRST_DAY + dt.timedelta(days=2 * (number // 2))
    people = {player: f"id-{player}" for eleven in elevens.values() for player in eleven}
    return {
        "meta": {"data_version": "1.1.0", "created": day.isoformat(), "revision": 1},
        "info": {
            "balls_per_over": 6,
            "dates": [day.isoformat()],
            "gender": "male",
            "match_type": "T20",
            "overs": 20,
            "players": elevens,
            "registry": {"people": people},
            "team_type": "club",
            "teams": names,
            "venue": venue,
        },
        "innings": innings,
    }


@dataclass
class _Side:
    """A side at the crease."""

    league: _League
    batters: list[str]
    bowlers: list[str]
    pitch: float
    target: int | None
    score: int = 0
    wickets: int = 0

    def __post_init__(self) -> None:
        self.striker, self.other = self.batters[:2]

    def innings(self, team: str) -> dict[str, Any]:
        """Play, and return the innings."""
        overs: list[dict[str, Any]] = []
        while len(overs) < 20 and not self._is_over():
            overs.append({"over": len(overs), "deliveries": self._over(len(overs))})
        powerplay = {"from": 0.1, "to": 5.6, "type": "mandatory"}
        aim = {} if self.target is None else {"target": {"overs": 20, "runs": self.target}}
        return {"team": team, "overs": overs, "powerplays": [powerplay], **aim}

    def _is_over(self) -> bool:
        return self.wickets == 10 or (self.target is not None and self.score >= self.target)

    def _over(self, number: int) -> list[dict[str, Any]]:
        bowler = self.bowlers[(number * 2 + number // 5) % len(self.bowlers)]
        deliveries: list[dict[str, Any]] = []
        legal = 0
        while legal < 6 and not self._is_over():
            ball = self._ball(number, bowler)
            legal += not {"wides", "noballs"} & ball.get("extras", {}).keys()
            deliveries.append(ball)
        self.striker, self.other = self.other, self.striker
        return deliveries

    def _ball(self, over: int, bowler: str) -> dict[str, Any]:
        draw = self.league.draw
        hope = self.league.skill[self.striker][0] - self.league.skill[bowler][1] + self.pitch
        hope += (over - 10) / 20
        weights = np.exp(_USUAL + hope * _HOPED)
        runs = int(draw.choice(_RUNS, p=weights / weights.sum()))
        ball: dict[str, Any] = {"batter": self.striker, "bowler": bowler, "non_striker": self.other}
        extras: dict[str, int] = {}
        chance = draw.random()
        if chance < 0.04:
            runs, extras = 0, {"wides": 1}
        elif chance < 0.05:
            extras = {"noballs": 1}
        elif chance < 0.07 and runs == 1:
            runs, extras = 0, {"legbyes": 1}
        elif draw.random() < 0.045 + 0.03 * (over >= 15) - 0.015 * hope:
            runs = 0
            ball["wickets"] = [{"kind": str(draw.choice(_WICKETS)), "player_out": self.striker}]
        added = sum(extras.values())
        ball["runs"] = {"batter": runs, "extras": added, "total": runs + added}
        if extras:
            ball["extras"] = extras
        self.score += runs + added
        if "wickets" in ball:
            self.wickets += 1
            self.striker = self.batters[min(self.wickets + 1, 10)]
        elif (runs + extras.get("legbyes", 0)) % 2:
            self.striker, self.other = self.other, self.striker
        return ball
