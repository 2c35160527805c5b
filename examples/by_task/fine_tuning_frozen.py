"""Fine-tune a pretrained network: first layers frozen, the next at a tenth of the rate."""

import torch
from torch import Tensor, nn

from samestep import Recipe, Settings, Splits


def stripes(number: int, seed: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return noisy stripes (number, 1, 16, 16) in one of so many directions, and which."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (number,), generator=generator)
    phase = 6.3 * torch.rand(number, 1, 1, generator=generator)
    angle = (labels * torch.pi / classes)[:, None, None]
    x = torch.arange(16)
    images = (angle.cos() * x + angle.sin() * x[:, None] + phase).sin()
    return (images + torch.randn(images.shape, generator=generator))[:, None], labels


def network(classes: int) -> nn.Sequential:
    first = nn.Sequential(nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU())
    second = nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))
    return nn.Sequential(first, second, head)


def pretrained() -> nn.Sequential:
    """Return a network that tells four directions: trained here, yours comes from a file."""
    model, (images, labels) = network(4), stripes(2000, 2, classes=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for rows in torch.arange(2000).split(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    return model


class FineTuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, _ = pretrained()
        self.head = network(8)[2]
        self.first.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Classify with BatchNorm as it was pretrained, in training too."""
        return self.head(self.second.eval()(self.first.eval()(images)))


def optimizer(model: FineTuned, settings: Settings) -> torch.optim.Optimizer:
    second = {"params": model.second.parameters(), "lr": settings.lr / 10}
    return torch.optim.AdamW([{"params": model.head.parameters()}, second], lr=settings.lr)


recipe = Recipe(
    model=FineTuned,
    data=lambda: Splits(train=stripes(300, 0, 8), validation=stripes(300, 1, 8)),
    optimizer=optimizer,
    settings={"epochs": 8, "batch_size": 32, "lr": 0.02},
)
