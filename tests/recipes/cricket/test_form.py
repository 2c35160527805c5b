from dataclasses import replace

import numpy as np
import pytest

from samestep.recipes.cricket.corpus import from_documents, merge, take
from samestep.recipes.cricket.form import WIDTH, form, keep_form
from samestep.recipes.cricket.synthetic import documents
from tests.cricket_files import ball, innings, match
from tests.cricket_files import corpus_of as of


def day(number, runs):
    """Return a match in which A scores so many runs from one ball, and B none."""
    first, second = innings("A", [ball(runs)]), innings("B", [ball(0)])
    return match(first, second, date=f"2024-01-{number:02}")


def every(corpus):
    return np.arange(len(corpus.matches["date"]))


def test_form_is_of_earlier_days_alone():
    before = form(of(day(1, 4), day(2, 0), day(2, 0), day(3, 0)), None)
    after = form(of(day(1, 4), day(2, 6), day(2, 6), day(3, 6)), None)
    np.testing.assert_array_equal(before[:6], after[:6])  # two innings a match: up to day 2
    assert after[6, 0] > before[6, 0]
    # On day 1 A scored more than usual, and B, to whom A bowled, less.
    assert before[2, 0] > before[0, 0] == 0
    assert before[3, 3] < 0


def test_runs_against_a_weak_attack_count_for_less():
    def meets(number, batters, bowlers, runs):
        sides = innings(batters, [ball(runs)]), innings(bowlers, [ball(1)])
        return match(*sides, date=f"2024-01-{number:02}", teams=(batters, bowlers))

    weak = [meets(k, "C", "B", 6) for k in range(1, 9)]
    after_weak = form(of(*weak, meets(9, "A", "B", 6), meets(10, "A", "D", 1)), None)
    first = form(of(meets(9, "A", "B", 6), meets(10, "A", "D", 1)), None)
    assert 0 < after_weak[-2, 0] < first[-2, 0]


def test_what_is_usual_comes_from_the_training_part_alone():
    one, other = (of(day(1, 4), day(2, 0), day(3, runs)) for runs in (0, 6))
    train = np.array([0, 1])
    assert keep_form(one, train).usual == keep_form(other, train).usual
    assert keep_form(one, every(one)).usual != keep_form(other, every(other)).usual
    assert keep_form(one, train).ratings != keep_form(other, train).ratings


def test_later_matches_go_on_from_what_a_run_has_kept():
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
