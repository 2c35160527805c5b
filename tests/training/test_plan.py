"""What follows from the settings: batch sizes on any ranks, lengths, learning rates."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samestep import Settings, UserError
from samestep.training.due import is_recorded
from samestep.training.plan import learning_rate, make_plan

SIZES = st.integers(1, 12)
PLENTY = 10_000


def plan_of(num_samples=PLENTY, world_size=1, *, resumed=False, **told):
    told.setdefault("epochs", 1)
    return make_plan(Settings(**told), num_samples, world_size, resumed=resumed)


@given(SIZES, SIZES, SIZES)
def test_any_two_of_the_batch_sizes_give_the_third(batch, world_size, accumulate):
    total = batch * world_size * accumulate
    for told in (
        {"batch_size": batch, "accumulate": accumulate},
        {"global_batch_size": total, "accumulate": accumulate},
        {"global_batch_size": total, "batch_size": batch},
        {"global_batch_size": total, "batch_size": batch, "accumulate": accumulate},
    ):
        plan = plan_of(world_size=world_size, **told)
        assert (plan.global_batch_size, plan.batch_size, plan.accumulate) == (
            total,
            batch,
            accumulate,
        )


def test_without_accumulate_there_is_one_micro_step():
    assert plan_of(world_size=3, batch_size=8).global_batch_size == 24
    assert plan_of(world_size=3, global_batch_size=24).batch_size == 8


def test_a_batch_size_larger_than_a_ranks_share_is_cut_to_it():
    """Beside a global batch, the batch size is what fits a rank's memory: the most of it."""
    plan = plan_of(world_size=2, global_batch_size=24, batch_size=64)
    assert (plan.batch_size, plan.accumulate) == (12, 1)


@given(st.integers(1, 200), st.none() | SIZES, st.none() | SIZES, SIZES)
@settings(max_examples=300)
def test_sizes_that_do_not_divide_are_refused_with_the_nearest_that_would(
    total, batch, accumulate, world_size
):
    told = {"batch_size": batch, "accumulate": accumulate}
    try:
        plan = plan_of(world_size=world_size, global_batch_size=total, **told)
    except UserError as error:
        message = str(error)
        assert f"--global-batch-size {total}" in message
        found = re.search(r"The nearest that would do: (\d+)(?: or (\d+))?\.", message)
        if found is None:
            assert f"--accumulate is {accumulate}" in message
            assert batch is not None
            return
        named = [int(size) for size in found.groups() if size]
        assert len(named) == 2 or named[0] > total
        unit = int(re.search(r"not a multiple of (\d+)", message)[1])
        assert all(abs(size - total) < unit for size in named)
        told["accumulate"] = accumulate if batch is None else None
        for size in named:
            assert plan_of(world_size=world_size, global_batch_size=size, **told)
    else:
        assert plan.global_batch_size == total
        assert plan.batch_size * world_size * plan.accumulate == total
        assert accumulate in (None, plan.accumulate)
        assert batch is None or plan.batch_size <= batch


def test_the_refusal_says_what_was_multiplied():
    with pytest.raises(UserError, match=r"100 .* 24 .*8 × 3"):
        plan_of(world_size=3, global_batch_size=100, batch_size=8)


def test_batch_sizes_that_contradict_each_other_are_refused():
    with pytest.raises(UserError, match="--accumulate 3, but --accumulate is 2"):
        plan_of(global_batch_size=24, batch_size=8, accumulate=2)


def test_a_static_graph_with_micro_steps_on_several_ranks_is_refused():
    told = {"batch_size": 4, "accumulate": 2, "static_graph": True}
    assert plan_of(**told).accumulate == 2
    with pytest.raises(UserError, match=r"--static-graph .* 2 micro-steps"):
        plan_of(world_size=2, **told)


def test_without_any_batch_size_the_two_flags_are_named():
    with pytest.raises(UserError, match=r"--batch-size .* or --global-batch-size"):
        plan_of()


def test_without_a_length_the_two_flags_are_named():
    with pytest.raises(UserError, match="--epochs or --max-steps"):
        plan_of(epochs=None, batch_size=4)


@given(st.integers(1, 500), st.integers(1, 60), SIZES, st.integers(1, 300), st.booleans())
def test_steps_and_epochs_follow_from_the_one_that_ends_first(
    num_samples, batch, epochs, max_steps, drop_last
):
    per_epoch = num_samples // batch if drop_last else -(-num_samples // batch)
    assume(per_epoch)
    how = {"batch_size": batch, "drop_last": drop_last}
    whole = plan_of(num_samples, epochs=epochs, **how)
    assert (whole.steps_per_epoch, whole.epochs) == (per_epoch, epochs)
    assert whole.total_steps == epochs * per_epoch
    cut = plan_of(num_samples, epochs=None, max_steps=max_steps, **how)
    assert cut.total_steps == max_steps
    assert (cut.epochs - 1) * per_epoch < max_steps <= cut.epochs * per_epoch
    both = plan_of(num_samples, epochs=epochs, max_steps=max_steps, **how)
    assert both.total_steps == min(whole.total_steps, cut.total_steps)
    assert both.epochs == min(whole.epochs, cut.epochs)


def test_more_ranks_than_samples_are_refused_with_the_most_that_would_do():
    with pytest.raises(UserError, match=r"8 ranks .* 7 "):
        plan_of(7, 8, batch_size=1)
    assert plan_of(7, 7, batch_size=1).total_steps == 1
    with pytest.raises(UserError, match="at most 7 ranks"):
        plan_of(7, 8, global_batch_size=8, resumed=True)


def test_drop_last_that_would_leave_no_step_is_refused():
    with pytest.raises(UserError, match=r"--drop-last .* 7 .* 8"):
        plan_of(7, batch_size=8, drop_last=True)
    assert plan_of(8, batch_size=8, drop_last=True).total_steps == 1
    assert plan_of(7, batch_size=8).total_steps == 1


@given(SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_a_resumed_run_keeps_its_global_batch_and_its_memory_on_any_ranks(
    batch, world_size, accumulate, other_size, drop_last
):
    """The batch per rank never grows beyond what fitted, and shares need not be equal."""
    before = plan_of(
        world_size=world_size, batch_size=batch, accumulate=accumulate, drop_last=drop_last
    )
    stored = {"batch_size": before.batch_size, "global_batch_size": before.global_batch_size}
    after = plan_of(world_size=other_size, resumed=True, drop_last=drop_last, **stored)
    assert after.global_batch_size == before.global_batch_size
    assert (after.steps_per_epoch, after.total_steps) == (
        before.steps_per_epoch,
        before.total_steps,
    )
    assert after.batch_size <= before.batch_size
    share = -(-after.global_batch_size // other_size)
    assert after.batch_size * (after.accumulate - 1) < share <= after.batch_size * after.accumulate
    again = plan_of(world_size=world_size, resumed=True, drop_last=drop_last, **stored)
    assert again == before


def test_a_resumed_run_may_have_fewer_samples_a_step_than_ranks():
    plan = plan_of(world_size=5, resumed=True, global_batch_size=3, batch_size=3)
    assert (plan.global_batch_size, plan.batch_size, plan.accumulate) == (3, 1, 1)


@pytest.mark.parametrize(
    ("scaling", "total", "expected"),
    [
        ("none", 256, 0.1),
        ("linear", 256, 0.4),
        ("sqrt", 256, 0.2),
        ("linear", 32, 0.05),
        ("sqrt", 16, 0.05),
        ("linear", 64, 0.1),
        ("sqrt", 64, 0.1),
    ],
)
def test_the_learning_rate_follows_the_global_batch(scaling, total, expected):
    told = {"lr": 0.1, "lr_scaling": scaling, "base_batch_size": 64}
    for how in (
        {"global_batch_size": total},
        {"batch_size": total // 2, "world_size": 2},
        {"batch_size": total // 4, "world_size": 2, "accumulate": 2},
    ):
        assert plan_of(**told, **how).lr == pytest.approx(expected, rel=1e-15)


def test_scaling_without_a_base_is_refused():
    with pytest.raises(UserError, match=r"--lr-scaling linear .*--base-batch-size"):
        plan_of(batch_size=4, lr_scaling="linear")


def rates(**told):
    told = {"batch_size": 1, "epochs": None, "lr": 0.3, **told}
    plan = plan_of(**told)
    return [learning_rate(plan, Settings(**told), step) for step in range(plan.total_steps)]


def test_without_schedule_and_warm_up_the_rate_is_constant():
    assert rates(max_steps=7) == [0.3] * 7


@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from(["constant", "cosine"]))
def test_the_warm_up_is_a_straight_line_that_reaches_the_rate(warmup, more, schedule):
    ramp = rates(max_steps=warmup + more, warmup_steps=warmup, schedule=schedule)[: warmup + 1]
    slope = 0.3 / (warmup + 1)
    assert ramp == pytest.approx([slope * (step + 1) for step in range(warmup + 1)], rel=1e-12)
    assert ramp[0] > 0
    assert ramp[-1] == pytest.approx(0.3, rel=1e-15)


@given(st.integers(0, 30), st.integers(1, 60))
def test_the_cosine_falls_from_the_rate_to_0_at_the_end(warmup, length):
    told = {"max_steps": warmup + length, "warmup_steps": warmup, "schedule": "cosine"}
    fall = rates(**told)[warmup:]
    assert fall[0] == pytest.approx(0.3, rel=1e-15)
    assert fall == sorted(fall, reverse=True)
    assert len(set(fall)) == length
    assert min(fall) > 0, "no step is wasted"
    plan = plan_of(batch_size=1, epochs=None, lr=0.3, max_steps=told["max_steps"])
    assert learning_rate(plan, Settings(**told), plan.total_steps) == pytest.approx(0, abs=1e-15)
    middle = fall[length // 2]
    if length % 2 == 0:
        assert middle == pytest.approx(0.15, rel=1e-12)


def test_a_warm_up_longer_than_the_run_only_rises():
    ramp = rates(max_steps=5, warmup_steps=9, schedule="cosine")
    assert ramp == pytest.approx([0.03 * k for k in range(1, 6)])


def test_warm_up_and_cosine_start_from_the_scaled_rate():
    told = {"lr_scaling": "linear", "base_batch_size": 1, "batch_size": 4, "max_steps": 6}
    scaled = rates(**told, warmup_steps=2, schedule="cosine")
    assert max(scaled) == pytest.approx(1.2)


def test_how_often_steps_are_recorded_follows_from_the_length_unless_it_is_given():
    lengths = {1: 1, 399: 1, 400: 2, 1_095: 5, 4_380: 20, 10_000: 50, 10**6: 50}
    for steps, every in lengths.items():
        told = {"batch_size": 4, "epochs": None, "max_steps": steps}
        assert plan_of(**told).log_every == every
        assert plan_of(**told, log_every=7).log_every == 7


@given(st.integers(1, 30_000))
@settings(max_examples=50)
def test_a_stream_of_unknown_length_has_records_enough_wherever_it_ends(length):
    plan = plan_of(num_samples=0, batch_size=4)
    assert plan.log_every is None
    recorded = [s for s in range(1, length + 1) if is_recorded(s, plan.log_every)]
    assert len(recorded) >= min(length, 200)
    assert len(recorded) <= 1_500 + length / 50
    assert length - recorded[-1] < 50
