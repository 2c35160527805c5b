import sys

import numpy as np
import pytest

from samestep.errors import UserError
from samestep.recipes.cricket.corpus import at_random, boundaries, by_date, from_documents, merge
from samestep.recipes.cricket.scores import baselines, errors
from samestep.recipes.cricket.synthetic import documents
from tests.cricket_files import corpus_of, match


def of_days(*days):
    """Return a corpus with a match on each of some days of 2024."""
    return corpus_of(*(match(date=f"2024-{1 + day // 28:02}-{1 + day % 28:02}") for day in days))


def test_the_last_tenth_of_the_dates_is_the_test_and_the_one_before_the_validation():
    corpus = of_days(*range(20), 0, 0, 19)
    found = by_date(corpus, boundaries(corpus))
    days = corpus.matches["date"] - corpus.matches["date"].min()
    assert {name: sorted(days[rows]) for name, rows in found.items()} == {
        "train": [0, 0, *range(16)],
        "validation": [16, 17],
        "test": [18, 19, 19],
    }


def test_three_dates_are_one_for_each_and_fewer_are_refused():
    corpus = of_days(0, 1, 2)
    assert [len(rows) for rows in by_date(corpus, boundaries(corpus)).values()] == [1, 1, 1]
    for days in ((0, 0, 0), (0, 1)):
        with pytest.raises(UserError, match="2024-01-01"):
            boundaries(of_days(*days))


def test_a_random_split_takes_whole_matches_and_depends_on_nothing_but_their_names():
    few, many = of_days(*range(10)), of_days(*range(40))
    first, second = at_random(few, seed=1), at_random(many, seed=1)
    for name in first:
        assert set(first[name]) <= set(second[name])  # the first ten have the same names
    assert sorted(np.concatenate(list(second.values()))) == list(range(40))
    assert at_random(many, seed=2)["train"].tolist() != second["train"].tolist()


def test_errors_are_over_all_balls():
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
