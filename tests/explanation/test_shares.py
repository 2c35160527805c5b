"""The shares that are told are those that the ranks then read."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samestep import Settings, UserError
from samestep.data.batches import open_source
from samestep.explanation.schedule import evaluation_shares, full_step, last_step
from samestep.ranks.world import ImaginedWorld
from samestep.training.plan import make_plan

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
    told = {0: full_step(plan, run, world)}
    if (last := last_step(plan, run, world)) is not None:
        told[plan.steps_per_epoch - 1] = last
    for shares in told.values():
        assert sum(ranks_of(s) * s.samples for s in shares.shares) == shares.samples
        assert max(s.samples for s in shares.shares) >= shares.samples / plan.world_size
    for rank in range(plan.world_size):
        own = replace(world, rank=rank)
        source = open_source(data, own, seed=0, dtype=None, num_workers=0)
        for step, shares in told.items():
            how = {"global_batch": plan.global_batch_size, "drop_last": run.drop_last}
            blocks = source.blocks(0, step, cut=plan.cut(run), **how)
            block = next(single for found in blocks for single in found.singles())
            (mine,) = [s for s in shares.shares if s.first_rank <= rank <= s.last_rank]
            assert block.global_size == shares.samples
            assert mine.samples == (block.rows if block.weight else 0)
            if run.virtual_ranks:
                assert mine.micro_steps == tuple(part.rows for part in block.parts)
                assert sum(mine.virtual_ranks) == block.rows


def ranks_of(share):
    return share.last_rank - share.first_rank + 1


def test_an_epoch_that_the_batch_divides_has_no_step_of_its_own_at_its_end():
    run = Settings(epochs=1, batch_size=10)
    plan = make_plan(run, 30, 2)
    assert last_step(plan, run, imagined(run, 2)) is None


@pytest.mark.parametrize(("samples", "shares"), [(10, (2, 3)), (8, (2, 2)), (3, (0, 1))])
def test_an_evaluation_is_shared_out_too(samples, shares):
    assert evaluation_shares(samples, ImaginedWorld(world_size=4)) == shares
