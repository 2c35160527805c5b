"""Crops and flips of whole batches: equal to one image at a time, and the sample's own."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import uniform
from samestep.data.augment import crop, flip, normalise
from samestep.data.keyed_random import sample_keys


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


def test_draws_at_the_ends_stay_inside_the_border():
    images = some_images(2)
    low, high = torch.zeros(2, 2), torch.full((2, 2), 1 - 2.0**-24)
    assert (crop(images, low, padding=4)[:, :, 4:, 4:] == images[:, :, :28, :28]).all()
    assert (crop(images, high, padding=4)[:, :, :28, :28] == images[:, :, 4:, 4:]).all()


def test_normalising_gives_each_channel_the_mean_0_and_the_deviation_1_of_its_constants():
    images = some_images(6)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.2)
    out = normalise(images, mean, std)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(
        3, 1, 1
    )
    assert out.dtype == torch.float32
    assert float((out - expected).abs().max()) < 1e-5
