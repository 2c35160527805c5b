"""What is kept, when a training may stop, and the ranks' shares, before any of it has happened."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samestep import Settings, UserError
from samestep.base.run.index import Index, Retention
from samestep.core.data.recipe_data import open_source
from samestep.core.plan import make_plan
from samestep.core.training.stopping import Watch
from samestep.core.training.work import Position
from samestep.launch.ranks.world import ImaginedWorld
from samestep.prove.explanation import schedule


def events_of(samples=30, *, position=None, evaluates=True, **told):
    run = Settings(batch_size=10, **told)
    plan = make_plan(run, samples, 1)
    return schedule.planned_events(plan, run, position or Position(), evaluates=evaluates)


def test_each_epoch_saves_and_evaluates_and_what_is_due_by_steps_comes_between_but_not_twice():
    saved = [(3, "checkpoint_epoch_1.pt"), (6, "checkpoint_epoch_2.pt")]
    for evaluates in (True, False):
        found = events_of(epochs=2, evaluates=evaluates)
        assert [(e.step, e.saves) for e in found] == saved
        assert all(e.evaluates == evaluates for e in found)
    found = events_of(epochs=2, checkpoint_every_steps=2, eval_every_epochs=2)
    assert [(e.step, e.evaluates, e.saves) for e in found] == [
        (2, False, "checkpoint_step_2.pt"),
        (3, False, "checkpoint_epoch_1.pt"),
        (4, False, "checkpoint_step_4.pt"),
        (6, True, "checkpoint_epoch_2.pt"),
    ]


def test_a_run_that_goes_on_has_only_what_is_left_and_a_stream_has_no_calendar():
    at = Position(step=4, epoch=1, step_in_epoch=1)
    assert [e.step for e in events_of(epochs=3, position=at)] == [6, 9]
    assert events_of(max_steps=4, position=at) == ()
    assert events_of(samples=0, epochs=2) is None


@given(st.integers(1, 6), st.none() | st.integers(1, 6))
def test_kept_are_the_best_and_the_last(epochs, top):
    found = events_of(epochs=epochs)
    kept = schedule.kept_files(found, Retention(top_k=top), Index())
    if top is None:
        assert kept.fewest == kept.most == epochs
    else:
        assert kept.fewest == min(top, epochs)
        assert kept.most == min(top + 1, epochs)


def test_patience_counts_from_where_a_run_stands_and_may_save_what_is_evaluated():
    found = tuple(
        schedule.PlannedEvent(step=n, epoch=n, evaluates=True, saves="") for n in range(1, 9)
    )
    new = Watch(metric="loss", mode="min")
    assert schedule.first_stop(3, found, new) == found[3]
    began = Watch(metric="loss", mode="min", best=1.0, reference=1.0, evaluations_since=2)
    assert schedule.first_stop(3, found, began) == found[0]
    assert schedule.first_stop(None, found, new) is None
    assert schedule.first_stop(9, found, new) is None
    often = {"epochs": 2, "eval_every_steps": 2}
    for patience, more in ((None, {}), (3, {"checkpoint_every_steps": 2}), (3, {})):
        settings = {**often, **more, "patience": patience}
        expected = patience is not None and not more
        found = schedule.saves_the_best(Settings(batch_size=10, **settings), events_of(**settings))
        assert found is expected


SMALL = st.integers(1, 9)


def imagined(settings_of_run, ranks):
    return ImaginedWorld(world_size=ranks, virtual_ranks=settings_of_run.virtual_ranks or 0)


@st.composite
def trainings(draw):
    """Settings, samples and ranks that go together."""
    told = {"epochs": 1, "drop_last": draw(st.booleans()), "virtual_ranks": draw(st.none() | SMALL)}
    told |= {"batch_size": draw(st.integers(1, 60))}
    told |= {draw(st.sampled_from(["micro_batch_size", "accumulate"])): draw(SMALL)}
    samples, ranks = draw(st.integers(1, 200)), draw(SMALL)
    try:
        run = Settings(**told)
        return run, make_plan(run, samples, ranks)
    except UserError:
        assume(False)


@given(trainings())
@settings(max_examples=60)
def test_the_shares_of_a_step_add_up_to_it_and_are_what_the_ranks_read(training):
    run, plan = training
    world = imagined(run, plan.world_size)
    data = torch.zeros(plan.num_samples, 1), torch.zeros(plan.num_samples)
    told = {0: schedule.full_step(plan, run, world)}
    if (last := schedule.last_step(plan, run, world)) is not None:
        told[plan.steps_per_epoch - 1] = last
    for shares in told.values():
        taken = ((s.last_rank - s.first_rank + 1) * s.samples for s in shares.shares)
        assert sum(taken) == shares.samples
        assert max(s.samples for s in shares.shares) >= shares.samples / plan.world_size
    for rank in range(plan.world_size):
        own = replace(world, rank=rank)
        source = open_source(data, own, seed=0, dtype=None, num_workers=0)
        for step, shares in told.items():
            how = {"global_batch": plan.global_batch_size, "drop_last": run.drop_last}
            blocks = source.blocks(0, step, cut=plan.cut, **how)
            block = next(single for found in blocks for single in found.singles())
            (mine,) = [s for s in shares.shares if s.first_rank <= rank <= s.last_rank]
            assert block.global_size == shares.samples
            assert mine.samples == (block.rows if block.weight else 0)
            if run.virtual_ranks:
                assert mine.micro_steps == tuple(part.rows for part in block.parts)
                assert sum(mine.virtual_ranks) == block.rows


def test_an_epoch_that_the_batch_divides_has_no_step_of_its_own_at_its_end():
    run = Settings(epochs=1, batch_size=10)
    plan = make_plan(run, 30, 2)
    assert schedule.last_step(plan, run, imagined(run, 2)) is None


@pytest.mark.parametrize(("samples", "shares"), [(10, (2, 3)), (8, (2, 2)), (3, (0, 1))])
def test_an_evaluation_is_shared_out_too(samples, shares):
    assert schedule.evaluation_shares(samples, ImaginedWorld(world_size=4)) == shares
