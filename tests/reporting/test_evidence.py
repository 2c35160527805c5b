"""What else is evidence or a direction: epochs, evaluations, the recipe's word, one run alone."""

import pytest

from samestep.errors import UserError
from samestep.reporting.comparison import compare_losses, compare_runs
from samestep.reporting.comparison_text import lines
from samestep.reporting.curves import Point, by_seconds
from samestep.reporting.run_data import read_run
from tests.reporting.made_runs import change, change_start, write_run


def without_steps(records):
    return [record for record in records if record["event"] != "step"]


def with_evaluations(**fields):
    """Return an edit that changes fields of all evaluations."""
    return lambda records: [r | fields if r["event"] == "evaluation" else r for r in records]


def test_epochs_and_evaluations_tell_the_same_training_where_no_step_is_recorded(tmp_path):
    one, other = (change(write_run(tmp_path / name), without_steps) for name in ("one", "other"))
    found = compare_losses(read_run(one), read_run(other))
    assert (found.verdict, found.steps, found.epochs, found.evaluations) == ("equal", 0, 3, 3)
    shown = " ".join("\n".join(lines(compare_runs([one, other]))).split())
    assert "3 epochs and 3 evaluations" in shown


@pytest.mark.parametrize("event", ["epoch", "evaluation"])
def test_a_loss_of_an_epoch_or_an_evaluation_alone_tells_another_training(tmp_path, event):
    def worse(records):
        return [r | {"loss": 0.9} if r["event"] == event else r for r in records]

    one, other = write_run(tmp_path / "one"), change(write_run(tmp_path / "other"), worse)
    found = compare_losses(read_run(one), read_run(other))
    assert (found.verdict, found.first_apart, found.last_alike) == ("apart", 6, 5)


def test_the_test_of_the_best_checkpoint_is_no_evidence(tmp_path):
    tested = with_evaluations(split="test")
    one, other = (change(write_run(tmp_path / name), tested) for name in ("one", "other"))
    assert compare_losses(read_run(one), read_run(other)).evaluations == 0


@pytest.fixture
def errors(tmp_path):
    """Two runs whose recipe has a metric `mae` and says that less of it is better."""

    def named(records):
        for record in records:
            if record["event"] == "evaluation":
                record["mae"] = 1 - record.pop("accuracy")
        return records

    runs = [change(write_run(tmp_path / name), named) for name in ("one", "other")]
    return [change_start(run, lower_is_better=["loss", "mae"]) for run in runs]


def test_the_target_of_a_metric_that_falls_is_reached_from_above(errors):
    found = compare_runs(errors, "mae", 0.4)
    assert found.smaller
    assert [goal.step for goal in found.reached] == [12, 12]
    shown = "\n".join(lines(found))
    assert "mae ≤ 0.4" in shown
    (best,) = [line for line in shown.splitlines() if "best of the run" in line]
    assert best.split()[-1] == "0.2500"


def test_of_a_run_that_does_not_say_another_is_asked(errors, tmp_path):
    old = change(write_run(tmp_path / "old"), with_evaluations(mae=0.3))
    assert compare_runs([old, errors[0]], "mae", 0.4).smaller


def test_what_the_user_said_of_the_monitored_metric_counts_most(errors):
    settings = errors[0] / "settings.toml"
    settings.write_text(settings.read_text() + 'monitor = "mae"\nmode = "max"\n')
    assert not compare_runs(errors, "mae", 0.4).smaller


def test_a_time_at_which_no_run_has_a_value_has_no_row():
    early, late = [Point(1, 1, 1.0, 0.5)], [Point(1, 1, 100.0, 0.5)]
    curve = by_seconds([early, late])
    assert curve.values == ((0.5, None), (None, 0.5))


def test_one_run_alone_may_be_drawn_and_is_compared_with_nothing(tmp_path):
    run = write_run(tmp_path / "one")
    with pytest.raises(UserError, match="--plot"):
        compare_runs([run])
    found = compare_runs([run], alone=True)
    assert "same training" not in "\n".join(lines(found))
    assert found.curves[0]
