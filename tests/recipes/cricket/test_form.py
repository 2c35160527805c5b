import sys
from dataclasses import replace

import numpy as np
import pytest

from samestep.errors import UserError
from samestep.recipes.cricket.corpus import (
    at_random,
    boundaries,
    by_date,
    from_documents,
    merge,
    take,
)
from samestep.recipes.cricket.form import WIDTH, form, keep_form
from samestep.recipes.cricket.scores import baselines, errors
from samestep.recipes.cricket.synthetic import documents
from tests.cricket_files import ball, corpus_of, innings, match
from tests.cricket_files import corpus_of as of


def day(number, runs):
    first, second = innings("A", [ball(runs)]), innings("B", [ball(0)])
    return match(first, second, date=f"2024-01-{number:02}")


def every(corpus):
    return np.arange(len(corpus.matches["date"]))


def test_form_is_of_earlier_days_alone_and_what_is_usual_of_the_training_part():
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


def test_runs_against_a_weak_attack_count_for_less_and_later_matches_go_on_from_there():
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


@pytest.mark.parametrize("kept", [True, False])
def test_no_matches_have_no_form(kept):
    corpus = of(day(1, 4))
    some = keep_form(corpus, every(corpus)) if kept else None
    assert form(merge([from_documents([])]), some).shape == (0, WIDTH)


def of_days(*days):
    return corpus_of(*(match(date=f"2024-{1 + day // 28:02}-{1 + day % 28:02}") for day in days))


def test_the_last_tenth_of_the_dates_is_the_test_and_fewer_than_three_are_refused():
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


def test_a_random_split_takes_whole_matches_and_errors_are_over_all_balls():
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


def test_without_scikit_learn_the_trees_are_left_out_and_that_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    corpus = merge([from_documents(documents(4, seed=0))])
    rows = np.arange(corpus.num_balls)
    found = baselines(corpus, rows, rows, 5)
    assert "pip install" in found["trees"]
    assert {name for name, told in found.items() if told != found["trees"]} == {
        *("constant", "run_rate", "table")
    }
