"""The order of samples: each once an epoch, on any number of ranks, from any step on."""

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.order import epoch_order, share, step_range, steps_per_epoch

GOLDEN_FIRST = [6, 1, 2, 8, 10, 3, 7, 11, 0, 4, 5, 9]
GOLDEN_SECOND = [6, 4, 5, 9, 1, 8, 3, 2, 0, 11, 10, 7]

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)
WORLD_SIZES = st.integers(1, 9)


@dataclass(frozen=True)
class Epoch:
    num_samples: int
    global_batch: int
    drop_last: bool
    seed: int
    epoch: int

    @property
    def steps(self) -> range:
        return range(steps_per_epoch(self.num_samples, self.global_batch, drop_last=self.drop_last))

    @property
    def order(self) -> list[int]:
        return epoch_order(self.num_samples, self.seed, self.epoch).tolist()

    def shares(self, step: int, world_size: int) -> list[list[int]]:
        order, positions = self.order, step_range(self.num_samples, self.global_batch, step)
        return [
            [order[k] for k in share(positions, rank, world_size)] for rank in range(world_size)
        ]

    def taken(self, steps: range, world_size: int) -> list[list[int]]:
        """Return the samples of each step over all ranks, in rank order."""
        return [[i for part in self.shares(step, world_size) for i in part] for step in steps]


epochs = st.builds(
    Epoch,
    num_samples=st.integers(1, 120),
    global_batch=st.integers(1, 40),
    drop_last=st.booleans(),
    seed=SEEDS,
    epoch=EPOCHS,
)


@given(epochs, WORLD_SIZES)
@settings(max_examples=150)
def test_all_ranks_together_train_each_sample_exactly_once_an_epoch(epoch, world_size):
    trained = sorted(i for step in epoch.taken(epoch.steps, world_size) for i in step)
    if epoch.drop_last:
        remainder = epoch.num_samples % epoch.global_batch
        assert len(trained) == len(set(trained)) == epoch.num_samples - remainder
        assert set(trained) <= set(range(epoch.num_samples))
    else:
        assert trained == list(range(epoch.num_samples))


@given(epochs, WORLD_SIZES)
@settings(max_examples=150)
def test_every_step_is_full_but_perhaps_the_last(epoch, world_size):
    *full, last = [len(step) for step in epoch.taken(epoch.steps, world_size)] or [0]
    assert set(full) <= {epoch.global_batch}
    if epoch.drop_last:
        assert last in (0, epoch.global_batch)
    else:
        assert last == (epoch.num_samples - 1) % epoch.global_batch + 1


@given(epochs, WORLD_SIZES)
@settings(max_examples=150)
def test_a_step_takes_the_same_samples_on_any_number_of_ranks(epoch, world_size):
    assert epoch.taken(epoch.steps, world_size) == epoch.taken(epoch.steps, 1)


@given(epochs, WORLD_SIZES)
@settings(max_examples=100)
def test_the_ranks_shares_of_a_step_differ_by_at_most_one_sample(epoch, world_size):
    for step in epoch.steps:
        sizes = [len(part) for part in epoch.shares(step, world_size)]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@given(epochs, st.lists(WORLD_SIZES, min_size=1, max_size=4), st.data())
@settings(max_examples=150)
def test_resuming_at_any_step_on_any_number_of_ranks_goes_on_with_the_same_samples(
    epoch, world_sizes, data
):
    """However often an epoch is interrupted, on whatever number of ranks it goes on."""
    taken = []
    step = 0
    for world_size in world_sizes:
        stop = data.draw(st.integers(step, len(epoch.steps)), label=f"stop of {world_size} ranks")
        taken += epoch.taken(range(step, stop), world_size)
        step = stop
    taken += epoch.taken(range(step, len(epoch.steps)), data.draw(WORLD_SIZES, label="the rest"))
    flat = [i for part in taken for i in part]
    assert flat == epoch.order[: len(flat)]
    assert len(flat) == sum(len(part) for part in epoch.taken(epoch.steps, 1))


@given(st.integers(0, 100), st.integers(0, 100), WORLD_SIZES)
def test_shares_are_consecutive_and_complete(start, length, world_size):
    positions = range(start, start + length)
    shares = [share(positions, rank, world_size) for rank in range(world_size)]
    assert [i for part in shares for i in part] == list(positions)


@given(SEEDS, EPOCHS, EPOCHS)
@settings(max_examples=60)
def test_another_epoch_has_another_order(seed, one, other):
    same = torch.equal(epoch_order(100, seed, one), epoch_order(100, seed, other))
    assert same == (one == other)


@given(SEEDS, SEEDS, EPOCHS)
@settings(max_examples=60)
def test_another_seed_has_another_order(one, other, epoch):
    same = torch.equal(epoch_order(100, one, epoch), epoch_order(100, other, epoch))
    assert same == (one == other)


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
    second = Epoch(num_samples=12, global_batch=5, drop_last=False, seed=42, epoch=1)
    assert [second.shares(step, 2)[1] for step in range(3)] == [
        GOLDEN_SECOND[3:5],
        GOLDEN_SECOND[8:10],
        GOLDEN_SECOND[11:12],
    ]


def test_positions_of_a_step_end_with_the_data():
    assert step_range(10, 4, 1) == range(4, 8)
    assert step_range(10, 4, 2) == range(8, 10)
    assert steps_per_epoch(10, 4) == 3
    assert steps_per_epoch(10, 4, drop_last=True) == 2
