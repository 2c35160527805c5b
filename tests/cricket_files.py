"""Matches in Cricsheet's format, written by hand: a few balls, to be changed by a test."""

import json
from pathlib import Path

from samestep.core.recipes.cricket.corpus import from_documents, merge


def ball(runs=0, *, batter="A1", other="A2", bowler="B1", out=None, kind="bowled", **extras):
    """Return a delivery; `wides=1` and so on are its extras, `out` is who leaves."""
    added = sum(extras.values())
    delivery = {
        "batter": batter,
        "bowler": bowler,
        "non_striker": other,
        "runs": {"batter": runs, "extras": added, "total": runs + added},
    }
    if extras:
        delivery["extras"] = extras
    if out:
        delivery["wickets"] = [{"kind": kind, "player_out": out}]
    return delivery


def innings(team="A", *overs, **more):
    listed = [{"over": number, "deliveries": list(over)} for number, over in enumerate(overs)]
    return {"team": team, "overs": listed, **more}


def match(*some, date="2024-01-01", version="1.1.0", **info):
    """Return a match of these innings, or of two short ones."""
    some = some or (
        innings("A", [ball(1), ball(4, batter="A2", other="A1")], [ball(0, wides=1), ball(6)]),
        innings("B", [ball(2, batter="B1", other="B2", bowler="A1")], target={"runs": 13}),
    )
    about = {"balls_per_over": 6, "overs": 20, "dates": [date], "gender": "male", "venue": "Ground"}
    about |= {"match_type": "T20", "team_type": "international", "teams": ["A", "B"]}
    about |= {"registry": {"people": {"A1": "id-a1"}}}
    meta = {"data_version": version, "created": date, "revision": 1}
    return {"meta": meta, "info": about | info, "innings": list(some)}


def encoded(card):
    return json.dumps(card).encode()


def write(folder: Path, cards) -> Path:
    for name, card in cards.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(card if isinstance(card, bytes) else encoded(card))
    return folder


def corpus_of(*cards):
    return merge([from_documents((f"{k:03}.json", encoded(card)) for k, card in enumerate(cards))])
