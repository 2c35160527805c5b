"""What follows from the settings: batch sizes on any ranks, lengths, learning rates."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from samestep import Settings, UserError
from samestep.base.settings import flag_name, merge_layers
from samestep.core.data.order import TokenCut, group_steps, micro_steps, share
from samestep.core.plan import is_recorded, learning_rate, make_plan
from samestep.core.session.notes import plan_notes
from samestep.launch.ranks.world import World

SIZES = st.integers(1, 12)
PLENTY = 10_000


def plan_of(num_samples=PLENTY, world_size=1, **told):
    told.setdefault("epochs", 1)
    return make_plan(Settings(**told), num_samples, world_size)


@given(
    st.integers(1, 200), SIZES, st.none() | SIZES, st.none() | SIZES, st.booleans(), st.booleans()
)
@settings(max_examples=100)
def test_any_ranks_share_any_batch(batch, world_size, micro_batch, accumulate, virtual, together):
    assume(world_size <= batch)
    told = {"micro_batch_size": micro_batch} if micro_batch else {"accumulate": accumulate}
    how = Settings(batch_size=batch, epochs=1, sync_batchnorm=together, **told)
    virtual_ranks = (batch + world_size) // 2 if virtual else 0
    if virtual:
        how = replace(how, sync_batchnorm=False, virtual_ranks=virtual_ranks)
    plan = make_plan(how, PLENTY, world_size)
    taken, sizes, numbers = [], [], []
    for rank in range(world_size):
        world = World(rank=rank, world_size=world_size, virtual_ranks=virtual_ranks)
        blocks = group_steps(torch.arange(PLENTY), 0, 1, batch, world, drop_last=False)
        block = next(blocks)
        parts = list(micro_steps(block, plan.cut, world))
        counted = [part for part in parts if part.weight]
        taken += [index for part in counted for index in part.inputs.tolist()]
        sizes.append(sum(part.rows for part in counted))
        numbers.append(len(parts))
        assert all(part.rows <= plan.micro_batch_size for part in parts)
        assert {part.rows for part in counted} <= plan.full_micro_steps()
    assert sorted(taken) == list(range(batch))
    assert plan.micro_batch_size <= (micro_batch or batch)
    assert micro_batch or plan.accumulate <= (accumulate or 1)
    if not virtual:
        assert max(sizes) - min(sizes) <= 1
        assert max(numbers) == plan.accumulate
        if not (micro_batch or accumulate):  # as much at once as there is
            assert (plan.micro_batch_size, plan.accumulate) == (max(sizes), 1)
    assert not how.sync_batchnorm or set(numbers) == {plan.accumulate}


@given(st.lists(st.integers(1, 40), min_size=1), SIZES, SIZES, st.booleans(), st.booleans())
def test_each_step_of_tokens_is_cut_alike(sizes, world_size, accumulate, virtual, together):
    how = Settings(batch_tokens=80, accumulate=accumulate, epochs=2, sync_batchnorm=together)
    parts = world_size
    if virtual:
        parts = world_size + 2
        how = replace(how, sync_batchnorm=False, virtual_ranks=parts)
    assume(sum(sizes) >= parts)
    plan = make_plan(how, sum(sizes), world_size, by_tokens=TokenCut(tuple(sizes), 2))
    assert (plan.steps_per_epoch, plan.global_batch_size) == (len(sizes), max(sizes))
    assert plan.total_steps == 2 * len(sizes)
    for size in sizes:
        each = [len(share(range(size), part, parts)) for part in range(parts)]
        cuts = [plan.cut(rows, size) for rows in each if rows]
        assert all(
            sum(counted for _, _, counted in cut) == rows
            for cut, rows in zip(cuts, filter(None, each), strict=True)
        )
        most = -(-size // (parts * accumulate))
        assert all(rows <= max(1, most) for cut in cuts for _, rows, _ in cut)
        assert all(len(cut) <= accumulate for cut in cuts)


BATCHES = ("batch_size", "batch_size_per_rank", "micro_batch_size")
NO_TOKENS = {"drop_last": True, "order": "columns", "lr_scaling": "linear"}
TOKENS = {"batch_tokens": 9, "base_batch_size": 1}
MICRO = {"batch_size": 24, "micro_batch_size": 8}
SCALED = {"batch_size": 4, "lr_scaling": "linear"}
# The samples, the ranks and the settings of what does not go together, and what is said of it.
REFUSED = [
    *((9, 1, TOKENS | {n: 4}, f"--{flag_name(n)} 4 .* --batch-tokens 9") for n in BATCHES),
    *(
        (9, 1, TOKENS | {n: v}, f"--{flag_name(n)}.* --batch-tokens 9")
        for n, v in NO_TOKENS.items()
    ),
    (7, 1, {"batch_size": 8, "order": "columns"}, r"--order columns.* 7 .* 8 columns"),
    (7, 1, {"batch_size": 8, "drop_last": True}, r"--drop-last .* 7 .* 8"),
    (7, 8, {"batch_size": 8}, r"8 ranks .* 7 "),
    (99, 3, {"batch_size": 24, "batch_size_per_rank": 8}, r"24 and --batch-size-per-rank 8"),
    (99, 7, {"batch_size": 3}, r"--batch-size 3 .* 7 .*--batch-size 7"),
    (99, 7, {"batch_size": 3, "virtual_ranks": 7}, r"--batch-size 3 .* 7 .*--batch-size 7"),
    (99, 2, {"batch_size": 3, "virtual_ranks": 1}, "--virtual-ranks 1 is less than the 2 ranks"),
    (99, 1, MICRO | {"accumulate": 2}, "--accumulate 3, but --accumulate is 2"),
    (99, 2, {"batch_size": 8, "accumulate": 2, "static_graph": True}, "--static-graph .* 2 micro"),
    (99, 1, {}, "--batch-size"),
    (99, 1, {"batch_size": 4, "epochs": None}, "--epochs or --max-steps"),
    (99, 1, SCALED, "--lr-scaling linear .*--base-batch-size"),
]


@pytest.mark.parametrize(("samples", "ranks", "told", "named"), REFUSED)
def test_what_does_not_go_together_is_refused_by_its_flags(samples, ranks, told, named):
    with pytest.raises(UserError, match=named):
        plan_of(samples, ranks, **told)


@given(st.integers(1, 500), st.integers(1, 60), SIZES, st.integers(1, 300), st.booleans())
def test_what_ends_first_decides_steps_and_epochs(num_samples, batch, epochs, max_steps, drop_last):
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


@given(st.integers(12, 200), SIZES, st.none() | SIZES, SIZES)
def test_a_resumed_run_keeps_its_batch_and_its_memory(batch, world_size, accumulate, other_size):
    before = plan_of(world_size=world_size, batch_size=batch, accumulate=accumulate)
    stored = {"batch_size": batch, "micro_batch_size": before.micro_batch_size}
    after = plan_of(world_size=other_size, **stored)
    assert after.global_batch_size == batch
    assert after.micro_batch_size <= before.micro_batch_size
    assert plan_of(world_size=world_size, **stored) == before


@pytest.mark.parametrize(
    ("scaling", "total", "expected"), [("none", 256, 0.1), ("linear", 256, 0.4), ("sqrt", 16, 0.05)]
)
def test_the_learning_rate_follows_the_global_batch(scaling, total, expected):
    told = {"lr": 0.1, "lr_scaling": scaling, "base_batch_size": 64}
    for how in (
        {"batch_size": total},
        {"batch_size": total, "world_size": 2, "accumulate": 2},
        {"batch_size_per_rank": total // 2, "world_size": 2},
    ):
        assert plan_of(**told, **how).lr == pytest.approx(expected, rel=1e-15)


def rates(**told):
    told = {"batch_size": 1, "epochs": None, "lr": 0.3, **told}
    plan = plan_of(**told)
    return [learning_rate(plan, Settings(**told), step) for step in range(plan.total_steps)]


@given(st.integers(1, 30), st.integers(1, 30), st.sampled_from(["constant", "cosine"]))
def test_the_warm_up_is_a_straight_line_that_reaches_the_rate(warmup, more, schedule):
    ramp = rates(max_steps=warmup + more, warmup_steps=warmup, schedule=schedule)[: warmup + 1]
    slope = 0.3 / (warmup + 1)
    assert ramp == pytest.approx([slope * (step + 1) for step in range(warmup + 1)], rel=1e-12)
    assert ramp[0] > 0
    assert ramp[-1] == pytest.approx(0.3, rel=1e-15)
    told = {"max_steps": warmup, "warmup_steps": warmup, "schedule": schedule}
    of_transformers = [0.3 * step / max(1, warmup) for step in range(warmup)]
    assert rates(**told, warmup_from=0.0) == pytest.approx(of_transformers, rel=1e-12)
    assert rates(**told, warmup_from=0.4)[:1] == pytest.approx([0.12], rel=1e-12)


NUMBER = st.floats(0.01, 4)


@given(st.integers(0, 30), st.integers(1, 60), NUMBER, st.floats(0, 0.99))
def test_each_schedule_falls_as_transformers_does(w, more, power, e):
    schedules = pytest.importorskip("transformers.optimization")
    total, end = w + more, 0.3 * e
    both, theirs_too = {"lr_end": end, "lr_power": power}, {"lr_end": end, "power": power}
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    for name, own, make, more_told in (
        ("linear", {}, "get_linear_schedule_with_warmup", {}),
        ("cosine", {"lr_end": end}, "get_cosine_with_min_lr_schedule_with_warmup", {"min_lr": end}),
        ("polynomial", both, "get_polynomial_decay_schedule_with_warmup", theirs_too),
    ):
        for warmup, steps in ((w, w), (w / total, math.ceil(total * (w / total)))):
            theirs = getattr(schedules, make)(optimizer, steps, total, **more_told).lr_lambdas[0]
            ours = rates(max_steps=total, warmup_steps=warmup, warmup_from=0, schedule=name, **own)
            expected = [0.3 * theirs(step) for step in range(total)]
            assert ours == pytest.approx(expected, rel=1e-9, abs=1e-12)


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


def test_what_goes_together_is_planned_with_its_rates_and_records_and_layers_replace_each_other():
    ramp = rates(max_steps=5, warmup_steps=9, schedule="cosine")
    assert ramp == pytest.approx([0.03 * k for k in range(1, 6)])
    assert rates(max_steps=7) == [0.3] * 7
    told = {"lr_scaling": "linear", "base_batch_size": 1, "batch_size": 4, "max_steps": 6}
    scaled = rates(**told, warmup_steps=2, schedule="cosine")
    assert max(scaled) == pytest.approx(1.2)
    lengths = {1: 1, 399: 1, 400: 2, 1_095: 5, 4_380: 20, 10_000: 50, 10**6: 50}
    for steps, every in lengths.items():
        told = {"batch_size": 4, "epochs": None, "max_steps": steps}
        assert plan_of(**told).log_every == every
        assert plan_of(**told, log_every=7).log_every == 7
    for num, ranks, how in ((8, 1, {"order": "columns"}), (8, 1, {"drop_last": True}), (8, 8, {})):
        assert plan_of(num, ranks, batch_size=8, **how).steps_per_epoch == 1
    assert plan_of(7, batch_size=8).total_steps == 1
    assert plan_of(**MICRO, accumulate=3).accumulate == 3
    assert plan_of(batch_size=8, accumulate=2, static_graph=True).accumulate == 2
    plan = plan_of(world_size=3, batch_size_per_rank=8, accumulate=2)
    assert (plan.global_batch_size, plan.micro_batch_size, plan.accumulate) == (24, 4, 2)
    below = {"batch_size": 4, "micro_batch_size": 2}
    assert merge_layers(below, {"batch_tokens": 9}) == {"batch_tokens": 9}
    assert merge_layers({"batch_tokens": 9}, {"batch_size": 4}) == {"batch_size": 4}
    below = {"monitor": "loss:min"}
    assert merge_layers(below, {"monitor": "accuracy"}) == {"monitor": "accuracy"}
    assert merge_layers(below, {"monitor": "loss"}) == {"monitor": "loss", "mode": "min"}
    both = merge_layers(below, {"monitor": "accuracy:max"})
    assert both == {"monitor": "accuracy", "mode": "max"}
    assert merge_layers({"batch_size": 4}, {"global_batch_size": 8}) == {"batch_size": 8}
    with pytest.raises(UserError, match="batch_size is 8 and global_batch_size is 64"):
        merge_layers({"batch_size": 8, "global_batch_size": 64})


@pytest.mark.parametrize(
    ("ranks", "told", "named"),
    [
        (1, {"warmup_steps": 5}, "--warmup-steps 5"),
        (5, {}, "--batch-size-per-rank"),
        (1, {"accumulate": 9}, "--accumulate 9"),
        (4, {"warmup_steps": 4, "accumulate": 2}, None),
    ],
)
def test_what_is_odd_about_the_length_or_the_shares_is_a_note(ranks, told, named):
    how = Settings(batch_size=32, max_steps=5, **told)
    notes = plan_notes(make_plan(how, PLENTY, ranks), how)
    assert [named in note for note in notes] == ([True] if named else [])


@given(st.integers(1, 30_000))
@settings(max_examples=25)
def test_a_stream_of_unknown_length_has_records_enough_wherever_it_ends(length):
    plan = plan_of(num_samples=0, batch_size=4)
    assert plan.log_every is None
    recorded = [s for s in range(1, length + 1) if is_recorded(s, plan.log_every)]
    assert len(recorded) >= min(length, 200)
    assert len(recorded) <= 1_500 + length / 50
    assert length - recorded[-1] < 50
