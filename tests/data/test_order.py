"""The order of samples: each once an epoch, on any number of ranks, from any step on.

That ranks together read this order, whole or resumed, is proved on batches: test_batches.py.
"""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.order import epoch_order, share, step_range, steps_per_epoch

GOLDEN_FIRST = [6, 1, 2, 8, 10, 3, 7, 11, 0, 4, 5, 9]
GOLDEN_SECOND = [6, 4, 5, 9, 1, 8, 3, 2, 0, 11, 10, 7]

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)
WORLD_SIZES = st.integers(1, 9)


@given(st.integers(1, 120), st.integers(1, 40), st.booleans(), WORLD_SIZES)
@settings(max_examples=150)
def test_steps_take_every_position_once_and_only_the_last_may_be_short(
    num_samples, global_batch, drop_last, world_size
):
    """The ranks' shares of a step are consecutive, and differ by at most one sample."""
    steps = range(steps_per_epoch(num_samples, global_batch, drop_last=drop_last))
    positions = [step_range(num_samples, global_batch, step) for step in steps]
    remainder = num_samples % global_batch
    taken = num_samples - remainder if drop_last else num_samples
    assert [k for part in positions for k in part] == list(range(taken))
    sizes = [global_batch] * (num_samples // global_batch)
    assert [len(part) for part in positions] == sizes + [remainder] * (taken % global_batch > 0)
    for part in positions:
        shares = [share(part, rank, world_size) for rank in range(world_size)]
        assert [k for one in shares for k in one] == list(part)
        assert len(shares[0]) - len(shares[-1]) <= 1
        assert [len(one) for one in shares] == sorted(map(len, shares), reverse=True)


@given(SEEDS, SEEDS, EPOCHS, EPOCHS)
@settings(max_examples=60)
def test_each_seed_and_epoch_has_an_order_of_its_own(seed, other_seed, epoch, other_epoch):
    order = epoch_order(100, seed, epoch)
    assert sorted(order.tolist()) == list(range(100))
    assert torch.equal(order, epoch_order(100, seed, other_epoch)) == (epoch == other_epoch)
    assert torch.equal(order, epoch_order(100, other_seed, epoch)) == (seed == other_seed)


def test_seed_and_epoch_are_not_interchangeable():
    """With seed + epoch, run 1's second epoch would be run 2's first."""
    orders = {
        tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(20) for epoch in range(20)
    }
    assert len(orders) == 400


def test_the_order_depends_on_nothing_but_its_arguments():
    before = epoch_order(1000, 7, 3)
    torch.manual_seed(99)
    torch.randperm(10)
    state = torch.get_rng_state()
    assert torch.equal(epoch_order(1000, 7, 3), before)
    assert torch.equal(torch.get_rng_state(), state), "the global generator must not be touched"


def test_every_sample_comes_early_and_late():
    """Over many epochs a sample's place is spread over the whole epoch, as of a fair shuffle."""
    num_samples, num_epochs = 50, 400
    places = torch.stack(
        [torch.argsort(epoch_order(num_samples, 1, epoch)) for epoch in range(num_epochs)]
    ).double()
    mean = (num_samples - 1) / 2
    deviation = ((num_samples**2 - 1) / 12) ** 0.5 / num_epochs**0.5
    assert (places.mean(0) - mean).abs().max() < 5 * deviation


def test_the_order_is_the_one_that_earlier_versions_had():
    """A run must resume under a newer version: if this fails, every old run would change."""
    assert epoch_order(12, 42, 0).tolist() == GOLDEN_FIRST
    assert epoch_order(12, 42, 1).tolist() == GOLDEN_SECOND
    shares = [share(step_range(12, 5, step), 1, 2) for step in range(3)]
    assert shares == [range(3, 5), range(8, 10), range(11, 12)]
