import pytest

from samestep.recipes.cricket.scorecard import BadMatchError, decode
from tests.cricket_files import ball, encoded, innings, match


def test_every_part_of_an_innings_that_the_format_has_is_read():
    whole = ball(0, legbyes=1, out="A1", kind="run out") | {
        "replacements": {
            "match": [{"in": "A9", "out": "A1", "team": "A", "reason": "concussion_substitute"}],
            "role": [{"in": "B2", "reason": "injury", "role": "bowler"}],
        },
        "review": {"by": "A", "batter": "A1", "decision": "upheld", "umpires_call": True},
    }
    whole["wickets"][0]["fielders"] = [{"name": "B3"}, {"substitute": True}]
    whole["runs"]["non_boundary"] = True
    parts = {"absent_hurt": ["A11"], "declared": False, "forfeited": False, "super_over": True}
    parts |= {"miscounted_overs": {"0": {"balls": "7", "umpire": "U"}, "1": {"balls": 5}}}
    parts |= {"penalty_runs": {"pre": 5, "post": 5}, "target": {"overs": 14.4, "runs": 100}}
    parts |= {"powerplays": [{"from": 0.1, "to": 5.6, "type": "mandatory"}]}
    card = decode(encoded(match(innings("A", [whole], **parts), version="1.0.0")))
    assert card.info.dates[0].isoformat() == "2024-01-01"
    read = card.innings[0]
    assert (read.target.overs, read.penalty_runs.pre, read.super_over) == (14.4, 5, True)
    assert read.miscounted_overs["0"].balls == "7"
    assert read.overs[0].deliveries[0].replacements.role[0].new == "B2"


def changed(*path, to):
    """Return the file of a match with one value changed; `to=None` removes it."""
    card = match()
    part = card
    for key in path[:-1]:
        part = part[key]
    if to is None:
        del part[path[-1]]
    else:
        part[path[-1]] = to
    return encoded(card)


FIRST = ("innings", 0, "overs", 1, "deliveries", 1)


@pytest.mark.parametrize(
    ("document", "parts"),
    [
        (changed("meta", "data_version", to="2.0.0"), ["meta.data_version", "2.0.0", "1.1.0"]),
        (changed(*FIRST, "runs", "total", to=7), ["overs[1].deliveries[1].runs.total is 7", "6"]),
        (changed(*FIRST, "runs", "total", to=-1), ["innings[0].overs[1].deliveries[1].runs.total"]),
        (changed(*FIRST, "bowler", to=None), ["innings[0].overs[1].deliveries[1]", "bowler"]),
        (changed(*FIRST, "ricochet", to=1), ["innings[0].overs[1].deliveries[1]", "ricochet"]),
        (changed(*FIRST, "extras", to={"wides": 1}), ["deliveries[1].runs.extras is 0", "1"]),
        (changed("innings", 1, "team", to="C"), ["innings[1].team is 'C'", "A, B"]),
        (changed("innings", 0, "overs", 1, "over", to=0), ["innings[0].overs[1].over is 0"]),
        (changed("innings", 0, "reserved", to=1), ["innings[0]", "reserved"]),
        (changed("info", "dates", to=["1.1.2024"]), ["info.dates[0]", "YYYY-MM-DD"]),
        (changed("info", to=None), ["info"]),
        (b'{"meta": {"data_ver', ["complete JSON document"]),
        (b"[]", ["expected `object`"]),
    ],
)
def test_what_is_malformed_is_told_with_its_path(document, parts):
    with pytest.raises(BadMatchError) as caught:
        decode(document)
    assert [part for part in parts if part not in str(caught.value)] == [], caught.value


def test_an_unknown_version_is_told_before_what_it_changed():
    card = match(version="3.0.0")
    card["innings"] = {"first": []}
    with pytest.raises(BadMatchError, match=r"data_version is '3\.0\.0'"):
        decode(encoded(card))
