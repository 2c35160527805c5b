"""Segment images with a small U-Net; pixels on a border are of no class and do not count."""

from functools import partial

import torch
from torch import Tensor, nn

from samestep import Recipe, Splits

SIDE, CLASSES, VOID = 24, 3, 255


def scenes(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images (number, 1, 24, 24) of a disc and a square, and the class of each pixel."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    places = 4 + 16 * torch.rand(number, 4, 1, 1, generator=generator)
    disc = (x - places[:, 0]).hypot(y - places[:, 1]) - 5
    square = torch.maximum((x - places[:, 2]).abs(), (y - places[:, 3]).abs()) - 3.5
    classes = torch.where(square < 0, 2, (disc < 0).long())
    brightness = torch.tensor([0.0, 1.0, 0.5])[classes]
    images = brightness + 0.3 * torch.randn(classes.shape, generator=generator)
    classes[(disc.abs() < 0.5) | (square.abs() < 0.5)] = VOID
    return images[:, None], classes


def block(a: int, b: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = block(1, 8), nn.Sequential(block(8, 16), block(16, 16))
        self.up, self.joined = nn.ConvTranspose2d(16, 8, 2, stride=2), block(16, 8)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(images)
        coarse = self.coarse(nn.functional.max_pool2d(fine, 2))
        return self.head(self.joined(torch.cat([fine, self.up(coarse)], dim=1)))


def mean_iou(outputs: Tensor, classes: Tensor) -> Tensor:
    """Return for each image the intersection over union, the mean of the three classes."""
    names = torch.arange(CLASSES, device=classes.device).view(-1, 1, 1, 1)
    found = (outputs.argmax(dim=1) == names) & (classes != VOID)
    true = classes == names
    return ((found & true).sum((2, 3)) / (found | true).sum((2, 3)).clamp(min=1)).mean(dim=0)


recipe = Recipe(
    model=UNet,
    data=lambda: Splits(train=scenes(600, 0), validation=scenes(100, 1)),
    loss=partial(nn.functional.cross_entropy, ignore_index=VOID),
    loss_terms=lambda batch: (batch[1] != VOID).sum(),
    metrics={"iou": mean_iou},
    settings={"epochs": 4, "batch_size": 16, "lr": 0.01},
)
