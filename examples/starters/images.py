"""Predict the class of an image; all images fit in memory.

    pip install 'samestep[images]'            # Pillow, which reads image files
    samestep train NAME.py                    # train; the run goes into a folder in runs/
    samestep verify NAME.py                   # is it the same training on 1, 2 and 3 ranks?
    samestep train NAME.py --nproc 2          # the same training, shared by two processes
    samestep train NAME.py --help             # the settings, such as --lr 0.01
    samestep predict runs/ID FILE.jpg         # its classes, from the best checkpoint

It trains at once, on images that it makes up. Change it from the top down. For folders of images
that do not fit in memory there is a recipe: samestep train images --data-dir FOLDER
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from samestep import Recipe, Splits, uniform
from samestep.data.augment import crop, flip, normalise
from samestep.data.images.decode import decode

FOLDER: Path | None = None  # --- your data here --- such as Path("photos"): photos/CLASS/*.jpg
CLASSES = ("disc", "square", "stripes")
SIDE = 16  # pixels; a file is cut to a square and resized to this
# Of each channel over your training images, on a scale from 0 to 1.
MEAN, DEVIATION = (0.4, 0.4, 0.4), (0.25, 0.25, 0.25)


def images() -> tuple[Tensor, Tensor]:
    """Return bytes (images, 3, SIDE, SIDE), and for each image the place of its class."""
    if FOLDER is not None:
        files = sorted(FOLDER.glob("*/*.jpg"))  # each machine lists a folder in another order
        labels = torch.tensor([CLASSES.index(file.parent.name) for file in files])
        return torch.stack([read(file) for file in files]), labels
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(900) % len(CLASSES)
    across = torch.arange(SIDE).expand(SIDE, SIDE)
    middles = torch.randint(5, SIDE - 5, (900, 2), generator=generator)
    made = torch.randint(120, (900, 3, SIDE, SIDE), generator=generator, dtype=torch.uint8)
    for image, label, (x, y) in zip(made, classes.tolist(), middles.tolist(), strict=True):
        to_x, to_y = (across - x).abs(), (across.T - y).abs()
        near = (to_x <= 4) & (to_y <= 4)
        image[:, (to_x**2 + to_y**2 <= 16, near, near & (to_y % 2 == 0))[label]] += 100
    return made, classes


def read(file: Path) -> Tensor:
    try:
        return decode(file, SIDE)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def data() -> Splits:
    """Hold out a tenth to choose the best epoch by, and a tenth to test the result once."""
    inputs, targets = images()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1))
    test, validation, train = order.tensor_split([len(order) // 10, len(order) // 5])
    return Splits(
        train=(inputs[train], targets[train]),
        validation=(inputs[validation], targets[validation]),
        test=(inputs[test], targets[test]),
        classes=CLASSES,  # a test then counts each class
    )


def augment(batch: Tensor, keys: Tensor) -> Tensor:
    """Shift and mirror images at random, in training only.

    A key belongs to a sample and an epoch: on any number of ranks, and after a resume, an image is
    changed in the same way. `torch.rand` would draw other numbers on each rank.
    """
    draws = uniform(keys, 3)  # (batch, 3) in [0, 1)
    return flip(crop(batch, draws[:, :2], padding=2), draws[:, 2])


def model() -> nn.Module:
    """Return a small network of convolutions.

    GroupNorm sees one image. BatchNorm sees those that lie on one rank, so its numbers depend on
    how many ranks there are: samestep verify would say so, and Recipe(accepts=…) allows it.
    """
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(CLASSES))),
    )


# Without `loss` it is the cross-entropy, and without `metrics` the accuracy.
recipe = Recipe(
    model=model,
    data=data,
    augment=augment,
    transform=lambda batch: normalise(batch, MEAN, DEVIATION),
    read=lambda _, path: read(path),
    # Defaults of the flags. The batch counts over all ranks, so that their number changes nothing.
    settings={"epochs": 6, "batch_size": 32, "lr": 3e-3},
)
