"""The arrays are compared with a plain walk through the same matches, ball by ball."""

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.core.recipes.cricket.corpus import from_documents, merge
from samestep.core.recipes.cricket.situation import runs_to_come, situation
from samestep.core.recipes.cricket.synthetic import documents
from tests.cricket_files import ball, corpus_of, innings, match


def recent(gone, count):
    return [sum(count(ball) for ball in gone[-n:]) for n in (6, 12, 30)]


def walk(card):
    """Yield what is known before each ball of a match, as a scorer would write it down."""
    for number, side in enumerate(card["innings"]):
        score = wickets = legal = 0
        batting, bowling, gone = {}, {}, []
        pair, together = None, [0, 0]
        for over in side["overs"]:
            legal_in_over = 0
            for one in over["deliveries"]:
                batter, other, bowler = one["batter"], one["non_striker"], one["bowler"]
                if {batter, other} != pair:
                    pair, together = {batter, other}, [0, 0]
                yield {
                    "over": over["over"],
                    "score": score,
                    "wickets": wickets,
                    "legal": legal,
                    "legal_in_over": legal_in_over,
                    "balls_left": max(120 - 6 * over["over"] - legal_in_over, 0),
                    "target": side["target"]["runs"] if number else 0,
                    "striker": list(batting.get(batter, (0, 0))),
                    "non_striker": list(batting.get(other, (0, 0))),
                    "bowler": list(bowling.get(bowler, (0, 0, 0))),
                    "partnership": list(together),
                    "recent_runs": recent(gone, lambda b: b["runs"]["total"]),
                    "recent_wickets": recent(gone, lambda b: "wickets" in b),
                    "recent_dots": recent(gone, lambda b: b["runs"]["total"] == 0),
                    "recent_fours_and_sixes": recent(gone, lambda b: b["runs"]["batter"] >= 4),
                }
                extras, total = one.get("extras", {}), one["runs"]["total"]
                is_legal = not {"wides", "noballs"} & extras.keys()
                runs, faced = batting.get(batter, (0, 0))
                batting[batter] = (runs + one["runs"]["batter"], faced + ("wides" not in extras))
                given_, bowled, taken = bowling.get(bowler, (0, 0, 0))
                theirs = total - extras.get("legbyes", 0)
                kinds = [w["kind"] for w in one.get("wickets", ()) if w["kind"] != "run out"]
                bowling[bowler] = (given_ + theirs, bowled + is_legal, taken + len(kinds))
                score, wickets = score + total, wickets + ("wickets" in one)
                legal, legal_in_over = legal + is_legal, legal_in_over + is_legal
                together = [together[0] + total, together[1] + 1]
                gone.append(one)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_what_is_known_is_what_a_scorer_would_have_written_down(seed):
    files = list(documents(3, seed))
    known = situation(merge([from_documents(files)]))
    rows = [row for _, file in files for row in walk(msgspec.json.decode(file))]
    for name in rows[0]:
        expected = np.array([row[name] for row in rows])
        np.testing.assert_array_equal(getattr(known, name), expected, err_msg=name)


@settings(max_examples=5)
@given(seed=st.integers(0, 10**6), horizon=st.sampled_from([1, 5, 10, None]))
def test_the_target_is_the_runs_of_the_balls_up_to_the_horizon(seed, horizon):
    files = list(documents(2, seed))
    found = runs_to_come(merge([from_documents(files)]), horizon)
    expected = []
    for _, file in files:
        for side in msgspec.json.decode(file)["innings"]:
            balls = [
                (o["over"], d["runs"]["total"]) for o in side["overs"] for d in o["deliveries"]
            ]
            for place, (over, _runs) in enumerate(balls):
                end = 99 if horizon is None else over + horizon
                if horizon is not None and over < horizon:
                    end = horizon
                if horizon is not None and over >= 20 - horizon:
                    end = 20
                expected.append(sum(runs for other, runs in balls[place:] if other < end))
    assert found.tolist() == expected


def test_a_batter_who_retires_hurt_is_not_out_and_a_miscounted_over_counts():
    over = [
        ball(4, out="A1", kind="retired hurt"),
        ball(2, batter="A3", out="A3"),
        ball(0, batter="A1"),
    ]
    known = situation(corpus_of(match(innings("A", over))))
    assert known.wickets.tolist() == [0, 0, 1]
    assert known.striker.tolist() == [[0, 0], [0, 0], [4, 1]]
    assert known.partnership.tolist() == [[0, 0], [0, 0], [0, 0]]
    seven = innings("A", [ball()] * 7, [ball()] * 2, miscounted_overs={"0": {"balls": 7}})
    known = situation(corpus_of(match(seven)))
    assert known.balls_left.tolist() == [120, 119, 118, 117, 116, 115, 114, 114, 113]
    assert known.legal.tolist() == list(range(9))
    known = situation(corpus_of(match(innings("A", [ball(1)] * 2, penalty_runs={"pre": 5}))))
    assert known.score.tolist() == [5, 6]
