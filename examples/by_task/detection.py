"""Find objects: each image has its own number of boxes, so a batch has a list of them."""

import torch
from torch import Tensor, nn

from samestep import Recipe, Splits

CELLS, STRIDE = 8, 4  # of 4 × 4 pixels each, in images of 32 × 32


def draw(seed: int) -> tuple[Tensor, Tensor]:
    """Return a noisy image (1, 32, 32) and the boxes (boxes, 4) of one to three bright objects."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(7, (1 + seed % 3, 4), generator=generator)
    boxes = torch.cat([3 * drawn[:, :2], 3 * drawn[:, :2] + 6 + drawn[:, 2:]], dim=1)
    image = 0.3 * torch.randn(1, 32, 32, generator=generator)
    for left, top, right, bottom in boxes.tolist():
        image[:, top:bottom, left:right] += 1
    return image, boxes.float()


class Detector(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 4, 2, 1)),
            *(nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 5, 3, 1, 1)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return for each cell the score of an object's centre, and a box: (batch, 8, 8, 5)."""
        score, left, top, right, bottom = super().forward(images).unbind(dim=1)
        x = STRIDE * (torch.arange(CELLS, device=images.device) + 0.5)
        return torch.stack([score, x - left, x[:, None] - top, x + right, x[:, None] + bottom], 3)


def loss(outputs: Tensor, boxes: list[Tensor]) -> Tensor:
    """Return the cross-entropy of all scores and the error of the boxes, per object."""
    true, image = torch.cat(boxes), [n for n, some in enumerate(boxes) for _ in some]
    x, y = ((true[:, :2] + true[:, 2:]) / 2 / STRIDE).long().T
    centres = outputs[image, y, x]
    cross_entropy = nn.functional.softplus(outputs[..., 0]).sum() - centres[:, 0].sum()
    return (cross_entropy + (centres[:, 1:] - true).abs().mean(dim=1).sum()) / len(true)


def f1(outputs: Tensor, boxes: list[Tensor]) -> Tensor:
    """Return the F1 of each image; a box is found where no side is off by three pixels or more."""
    found = [guesses[guesses[..., 0] > 0, 1:] for guesses in outputs]
    off = [(a[:, None] - b).abs().amax(dim=2) for a, b in zip(boxes, found, strict=True)]
    return torch.stack([2 * (one < 3).any(dim=1).sum() / sum(one.shape) for one in off])


recipe = Recipe(
    model=Detector,
    data=lambda: Splits(train=[*map(draw, range(800))], validation=[*map(draw, range(800, 900))]),
    collate=lambda samples: (torch.stack([s[0] for s in samples]), [s[1] for s in samples]),
    loss=loss,
    loss_terms=lambda batch: sum(map(len, batch[1])),
    metrics={"f1": f1},
    settings={"epochs": 5, "batch_size": 16, "lr": 3e-3},
)
