"""What is kept, and when a training may stop, before any of it has happened."""

from hypothesis import given
from hypothesis import strategies as st

from samestep import Settings
from samestep.explanation import schedule
from samestep.explanation.schedule import PlannedEvent, first_stop, kept_files, planned_events
from samestep.run.index import Index, Retention
from samestep.training.plan import make_plan
from samestep.training.stopping import Watch
from samestep.training.work import Position


def events_of(samples=30, *, position=None, evaluates=True, **told):
    run = Settings(batch_size=10, **told)
    plan = make_plan(run, samples, 1)
    return planned_events(plan, run, position or Position(), evaluates=evaluates)


def test_each_epoch_saves_and_evaluates_where_there_is_something_to_evaluate():
    saved = [(3, "checkpoint_epoch_1.pt"), (6, "checkpoint_epoch_2.pt")]
    for evaluates in (True, False):
        found = events_of(epochs=2, evaluates=evaluates)
        assert [(e.step, e.saves) for e in found] == saved
        assert all(e.evaluates == evaluates for e in found)


def test_what_is_due_by_steps_comes_between_and_not_twice_at_the_end_of_an_epoch():
    found = events_of(epochs=2, checkpoint_every_steps=2, eval_every_epochs=2)
    assert [(e.step, e.evaluates, e.saves) for e in found] == [
        (2, False, "checkpoint_step_2.pt"),
        (3, False, "checkpoint_epoch_1.pt"),
        (4, False, "checkpoint_step_4.pt"),
        (6, True, "checkpoint_epoch_2.pt"),
    ]


def test_a_run_that_goes_on_has_only_what_is_left():
    at = Position(step=4, epoch=1, step_in_epoch=1)
    assert [e.step for e in events_of(epochs=3, position=at)] == [6, 9]
    assert events_of(max_steps=4, position=at) == ()


def test_a_stream_has_no_calendar():
    assert events_of(samples=0, epochs=2) is None


@given(st.integers(1, 6), st.none() | st.integers(1, 6))
def test_kept_are_the_best_and_the_last(epochs, top):
    found = events_of(epochs=epochs)
    kept = kept_files(found, Retention(top_k=top), Index())
    if top is None:
        assert kept.fewest == kept.most == epochs
    else:
        assert kept.fewest == min(top, epochs)
        assert kept.most == min(top + 1, epochs)


def test_patience_counts_from_the_first_evaluation_or_from_where_a_run_stands():
    found = tuple(PlannedEvent(step=n, epoch=n, evaluates=True, saves="") for n in range(1, 9))
    new = Watch(metric="loss", mode="min")
    assert first_stop(3, found, new) == found[3]
    began = Watch(metric="loss", mode="min", best=1.0, reference=1.0, evaluations_since=2)
    assert first_stop(3, found, began) == found[0]
    assert first_stop(None, found, new) is None
    assert first_stop(9, found, new) is None


def test_early_stopping_may_save_whatever_is_evaluated_and_not_planned_to_be_saved():
    often = {"epochs": 2, "eval_every_steps": 2}
    for patience, more in ((None, {}), (3, {"checkpoint_every_steps": 2}), (3, {})):
        settings = {**often, **more, "patience": patience}
        expected = patience is not None and not more
        found = schedule.saves_the_best(Settings(batch_size=10, **settings), events_of(**settings))
        assert found is expected
