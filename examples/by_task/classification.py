"""Classify images with a convolutional network; each is mirrored and shifted by its own key."""

import torch
from torch import Tensor, nn

import samestep
from samestep import Recipe, Splits

CLASSES = ("rows", "columns", "squares", "rings")
SIDE = 16


def waves(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (number, 1, 16, 16) in uint8, as files hold them, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(CLASSES), (number,), generator=generator)
    phase, rate = torch.rand(2, number, 1, 1, generator=generator)
    y, x = torch.meshgrid(torch.arange(SIDE) - 7.5, torch.arange(SIDE) - 7.5, indexing="ij")
    rate, phase = 0.8 + rate, 6.3 * phase
    rows, columns = (rate * y + phase).sin(), (rate * x + phase).sin()
    kinds = torch.stack([rows, columns, rows * columns, (rate * x.hypot(y) + phase).sin()], dim=1)
    pictures = kinds[torch.arange(number), labels]
    pictures = pictures + torch.randn(pictures.shape, generator=generator)
    return (64 * pictures + 128).clamp(0, 255).byte()[:, None], labels


def augment(images: Tensor, keys: Tensor) -> Tensor:
    """Mirror half of the images, and shift each by up to two pixels."""
    draws = samestep.uniform(keys, 2)
    images = torch.where(draws[:, :1, None, None] < 0.5, images.flip(-1), images)
    shift = (5 * draws[:, 1]).long() - 2
    places = (torch.arange(SIDE, device=images.device) + shift[:, None]) % SIDE
    return images.gather(-1, places[:, None, None].expand(images.shape))


def model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(CLASSES))),
    )


# Without `loss` it is the cross-entropy, and without `metrics` the accuracy.
recipe = Recipe(
    model=model,
    data=lambda: Splits(train=waves(1500, 0), validation=waves(300, 1), classes=CLASSES),
    augment=augment,
    transform=lambda images: images.float() / 128 - 1,
    settings={"epochs": 4, "batch_size": 32, "lr": 5e-3, "schedule": "cosine"},
)
