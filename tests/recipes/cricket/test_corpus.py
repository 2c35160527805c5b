from dataclasses import replace

import numpy as np
import pytest

from samestep.base.errors import UserError
from samestep.core.recipes.cricket import corpus as corpora
from samestep.core.recipes.cricket.corpus import (
    BOWLERS_WICKET,
    BYE,
    LEG_BYE,
    at_random,
    boundaries,
    by_date,
    from_documents,
    merge,
    take,
)
from samestep.core.recipes.cricket.form import form, keep_form
from samestep.core.recipes.cricket.scorecard import BadMatchError, decode
from samestep.core.recipes.cricket.scores import errors
from samestep.core.recipes.cricket.synthetic import documents
from tests.cricket_files import ball, corpus_of, encoded, innings, match
from tests.cricket_files import corpus_of as of


def same(one, other):
    assert one.lists == other.lists
    for table in ("balls", "innings", "matches"):
        ones, others = getattr(one, table), getattr(other, table)
        assert ones.keys() == others.keys()
        for name, column in ones.items():
            assert column.dtype == others[name].dtype
            np.testing.assert_array_equal(column, others[name])


def test_a_ball_keeps_its_runs_and_wickets_and_a_player_is_who_the_registry_says():
    over = [
        ball(4),
        ball(0, wides=2),
        ball(1, noballs=1),
        ball(0, byes=1),
        ball(0, legbyes=2),
        ball(0, penalty=5),
        ball(0, out="A1", kind="caught"),
        ball(1, batter="A3", out="A2", kind="run out"),
        ball(0, batter="A3", other="A4", out="A3", kind="retired hurt"),
    ]
    balls = corpus_of(match(innings("A", over))).balls
    assert balls["runs"].tolist() == [4, 2, 2, 1, 2, 5, 0, 1, 0]
    assert balls["batter_runs"].tolist() == [4, 0, 1, 0, 0, 0, 0, 1, 0]
    kinds = [0, corpora.WIDE, corpora.NO_BALL, BYE, LEG_BYE, corpora.PENALTY, BOWLERS_WICKET, 0, 0]
    assert balls["kind"].tolist() == kinds
    assert balls["wickets"].tolist() == [0, 0, 0, 0, 0, 0, 1, 1, 0]
    renamed = match(
        innings("A", [ball(1, batter="A. One")]), registry={"people": {"A. One": "id-a1"}}
    )
    corpus = corpus_of(match(), renamed)
    batters = [corpus.lists["players"][k] for k in corpus.balls["batter"]]
    assert (batters[0], batters[-1]) == ("id-a1", "id-a1")
    assert len(corpus.lists["people"]) == len(corpus.lists["players"])


def test_super_overs_are_left_out_and_targets_are_of_the_rain_rule():
    tied = match(
        innings("A", [ball(1)]),
        innings("B", [ball(1)], target={"overs": 20, "runs": 2}),
        innings("A", [ball(6)], super_over=True),
        innings("B", [ball(4)], super_over=True),
    )
    corpus = corpus_of(tied)
    assert corpus.balls["runs"].tolist() == [1, 1]
    assert corpus.innings["number"].tolist() == [0, 1]
    playing = [{"from": 0.1, "to": 4.3, "type": "mandatory"}]
    later = [{"from": 10.1, "to": 11.6, "type": "batting"}, {"from": 0.1, "to": 3.6}]
    sides = innings("A", [ball(6)], powerplays=playing), innings("B", [ball(1)])
    table = corpus_of(match(*sides), match(innings("A", [ball(6)], powerplays=later))).innings
    assert table["powerplay"].tolist() == [4, 255, 3]

    def second(**more):
        corpus = corpus_of(match(innings("A", [ball(6)]), innings("B", [ball(1)], **more)))
        return corpus.innings["target"].tolist(), corpus.innings["balls"].tolist()

    assert second(target={"overs": 20, "runs": 50}) == ([0, 50], [120, 120])
    assert second(target={"overs": 14.4, "runs": 40}) == ([0, 40], [120, 88])
    assert second() == ([0, 7], [120, 120])  # a match that was broken off has no target
    first = innings("A", [ball(6)], penalty_runs={"pre": 5, "post": 5})
    table = corpus_of(match(first, innings("B", [ball(1)]))).innings
    assert table["before"].tolist() == [5, 0]
    assert table["target"].tolist() == [0, 17]


def test_what_is_no_match_is_passed_over_and_bad_files_and_versions_named():
    cards = [match(match_type="ODI", overs=50), match() | {"innings": []}, match()]
    cards.append(match(balls_per_over=5))
    missing = match()
    del missing["innings"]
    corpus = corpus_of(*cards, missing, match(innings("A", forfeited=True)))
    assert corpus.lists["files"] == ("002.json",)
    assert len(corpus.lists["passed"]) == 5
    assert corpus.lists["bad"] == ()
    long = innings("A", *[[ball(1)]] * 21)
    deep = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    some = {"a.json": b"{", "b.json": encoded(match()), "c.json": b"", "d.json": deep}
    corpus = merge([from_documents((some | {"e.json": encoded(match(long))}).items())])
    assert [text[:6] for text in corpus.lists["bad"]] == ["a.json", "c.json", "d.json", "e.json"]
    assert corpus.lists["files"] == ("b.json",)
    assert corpus.num_balls == 5
    card = match(version="3.0.0")
    card["innings"] = {"first": []}
    with pytest.raises(BadMatchError, match=r"data_version is '3\.0\.0'"):
        decode(encoded(card))


def test_matches_are_sorted_by_date_however_they_come():
    some = list(documents(12, seed=3))
    whole = merge([from_documents(some)])
    parts = merge([from_documents(some[9:]), from_documents(some[:4]), from_documents(some[4:9])])
    assert np.all(np.diff(whole.matches["date"]) >= 0)
    for table in ("over", "runs", "kind", "wickets"):
        np.testing.assert_array_equal(whole.balls[table], parts.balls[table])
    for corpus in (whole, parts):
        names = [corpus.lists["files"][k] for k in corpus.matches["file"]]
        assert names == sorted(names)
    for player in ("batter", "bowler"):
        one, other = (
            [corpus.lists["players"][k] for k in corpus.balls[player]] for corpus in (whole, parts)
        )
        assert one == other


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


def day(number, runs):
    first, second = innings("A", [ball(runs)]), innings("B", [ball(0)])
    return match(first, second, date=f"2024-01-{number:02}")


def every(corpus):
    return np.arange(len(corpus.matches["date"]))


def test_form_is_of_earlier_days_and_against_a_weak_attack_counts_for_less():
    before = form(of(day(1, 4), day(2, 0), day(2, 0), day(3, 0)), None)
    after = form(of(day(1, 4), day(2, 6), day(2, 6), day(3, 6)), None)
    np.testing.assert_array_equal(before[:6], after[:6])  # two innings a match: up to day 2
    assert after[6, 0] > before[6, 0]
    # On day 1 A scored more than usual, and B, to whom A bowled, less.
    assert before[2, 0] > before[0, 0] == 0
    assert before[3, 3] < 0
    one, other = (of(day(1, 4), day(2, 0), day(3, runs)) for runs in (0, 6))
    train = np.array([0, 1])
    assert keep_form(one, train).usual == keep_form(other, train).usual
    assert keep_form(one, every(one)).usual != keep_form(other, every(other)).usual
    assert keep_form(one, train).ratings != keep_form(other, train).ratings

    def meets(number, batters, bowlers, runs):
        sides = innings(batters, [ball(runs)]), innings(bowlers, [ball(1)])
        return match(*sides, date=f"2024-01-{number:02}", teams=(batters, bowlers))

    weak = [meets(k, "C", "B", 6) for k in range(1, 9)]
    after_weak = form(of(*weak, meets(9, "A", "B", 6), meets(10, "A", "D", 1)), None)
    first = form(of(meets(9, "A", "B", 6), meets(10, "A", "D", 1)), None)
    assert 0 < after_weak[-2, 0] < first[-2, 0]
    corpus = merge([from_documents(documents(30, seed=0))])
    last = int(np.unique(corpus.matches["date"])[-5])
    old = take(corpus, np.flatnonzero(corpus.matches["date"] < last))
    new = take(corpus, np.flatnonzero(corpus.matches["date"] >= last))
    kept = keep_form(old, every(old))
    # With the old ones beside them, the new ones find the same ratings, up to rounding.
    whole, many = form(corpus, replace(kept, until="")), len(old.innings["start"])
    np.testing.assert_allclose(form(new, kept), whole[many:], atol=1e-4)
    np.testing.assert_allclose(form(corpus, kept), whole, atol=1e-4)


def of_days(*days):
    return corpus_of(*(match(date=f"2024-{1 + day // 28:02}-{1 + day % 28:02}") for day in days))


def test_the_last_tenth_or_a_random_split_of_whole_matches_is_the_test():
    corpus = of_days(*range(20), 0, 0, 19)
    found = by_date(corpus, boundaries(corpus))
    days = corpus.matches["date"] - corpus.matches["date"].min()
    assert {name: sorted(days[rows]) for name, rows in found.items()} == {
        "train": [0, 0, *range(16)],
        "validation": [16, 17],
        "test": [18, 19, 19],
    }
    corpus = of_days(0, 1, 2)
    assert [len(rows) for rows in by_date(corpus, boundaries(corpus)).values()] == [1, 1, 1]
    for days in ((0, 0, 0), (0, 1)):
        with pytest.raises(UserError, match="2024-01-01"):
            boundaries(of_days(*days))
    few, many = of_days(*range(10)), of_days(*range(40))
    first, second = at_random(few, seed=1), at_random(many, seed=1)
    for name in first:
        assert set(first[name]) <= set(second[name])  # the first ten have the same names
    assert sorted(np.concatenate(list(second.values()))) == list(range(40))
    assert at_random(many, seed=2)["train"].tolist() != second["train"].tolist()
    found = errors(np.array([1.0, 2.0, 6.0]), np.array([1.0, 4.0, 1.0]))
    assert found["mae"] == pytest.approx(7 / 3)
    assert found["rmse"] == pytest.approx(np.sqrt(29 / 3))
    assert found["r2"] == pytest.approx(1 - 29 / 6)
    assert found["median_error"] == 2
