"""Random numbers from keys, the same anywhere, and the crops and flips that they decide on."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import uniform
from samestep.data import keyed_random as keys
from samestep.data.augment import crop, flip, normalise
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


def slowly(image, draws, padding):
    """Crop and flip one image (channels, height, width), pixel by pixel as the words say it."""
    channels, height, width = image.shape
    top, left = (int(np.floor(d * (2 * padding + 1))) - padding for d in draws[:2])
    out = np.zeros_like(image)
    for c in range(channels):
        for y in range(height):
            for x in range(width):
                if 0 <= y + top < height and 0 <= x + left < width:
                    out[c, y, x] = image[c, y + top, x + left]
    return out[:, :, ::-1] if draws[2] < 0.5 else out


def some_images(count, height=32, width=32):
    generator = torch.Generator().manual_seed(0)
    shape = (count, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**62),
    padding=st.integers(1, 5),
    height=st.integers(3, 9),
    width=st.integers(3, 9),
)
def test_a_batch_is_cropped_and_flipped_as_its_images_are_one_by_one(seed, padding, height, width):
    images = some_images(4, height, width)
    draws = uniform(sample_keys(seed, 0, torch.arange(4)), 3)
    batch = flip(crop(images, draws[:, :2], padding=padding), draws[:, 2])
    for image, row, result in zip(images.numpy(), draws.numpy(), batch.numpy(), strict=True):
        assert (slowly(image, row, padding) == result).all()


def test_draws_at_the_ends_stay_inside_and_normalising_gives_mean_0_and_deviation_1():
    images = some_images(2)
    low, high = torch.zeros(2, 2), torch.full((2, 2), 1 - 2.0**-24)
    assert (crop(images, low, padding=4)[:, :, 4:, 4:] == images[:, :, :28, :28]).all()
    assert (crop(images, high, padding=4)[:, :, :28, :28] == images[:, :, 4:, 4:]).all()
    images = some_images(6)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2)
    out = normalise(images, mean, std)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )
    assert out.dtype == torch.float32
    assert float((out - expected).abs().max()) < 1e-5
