"""Random numbers from keys: the same for the same key anywhere, and plausible as random numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep import uniform
from samestep.data import keyed_random as keys
from samestep.data.keyed_random import mix, sample_keys

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 1000)


def as_signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def test_the_numbers_are_those_of_splitmix64():
    """The generator's published first outputs for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + k * keys._GOLDEN) & (2**64 - 1) for k in (1, 2, 3)]
    assert [keys._mix64(state) for state in states] == published
    drawn = uniform(torch.tensor([1234567]), 3)
    assert drawn.tolist() == [[(value >> 40) / 2**24 for value in published]]


@given(SEEDS, EPOCHS, st.lists(st.integers(0, 2**40), min_size=1, max_size=30))
def test_a_samples_key_is_the_mixture_of_seed_epoch_and_sample(seed, epoch, samples):
    expected = [
        as_signed(keys._mix64((mix(seed, epoch) + sample * keys._GOLDEN) % 2**64))
        for sample in samples
    ]
    for kind in (torch.int64, torch.int32) if max(samples) < 2**31 else (torch.int64,):
        assert sample_keys(seed, epoch, torch.tensor(samples, dtype=kind)).tolist() == expected


@given(
    SEEDS,
    EPOCHS,
    st.permutations(range(40)),
    st.lists(st.integers(1, 39), max_size=5),
    st.integers(1, 6),
)
def test_what_is_drawn_for_a_sample_does_not_depend_on_its_batch(seed, epoch, order, cuts, draws):
    """Nor on how many numbers are drawn for it: the first stay the same."""
    whole = uniform(sample_keys(seed, epoch, torch.arange(40)), draws + 3)[:, :draws]
    batches = torch.tensor(order).tensor_split(sorted(cuts))
    drawn = torch.cat([uniform(sample_keys(seed, epoch, batch), draws) for batch in batches])
    assert torch.equal(drawn, whole[torch.tensor(order)])


@given(st.lists(SEEDS, min_size=1, max_size=4), st.lists(SEEDS, min_size=1, max_size=4))
def test_mix_gives_63_bits_and_tells_its_arguments_apart(one, other):
    assert 0 <= mix(*one) < 2**63
    assert (mix(*one) == mix(*other)) == (one == other)


def test_the_numbers_are_those_that_earlier_versions_drew():
    """A resumed run must augment as before: if this fails, every old run would change."""
    assert mix(42, 0) == 765482523205348131
    assert sample_keys(42, 3, torch.arange(2)).tolist() == [
        -2706933286377414808,
        -1890242524682471187,
    ]
