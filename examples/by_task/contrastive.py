"""Contrastive learning (SimCLR, Chen et al., 2020): the two views of an image find each other."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Recipe, Splits

SIDE, TEMPERATURE = 16, 0.2


class Views(Dataset[tuple[Tensor, Tensor]]):
    """Images of stripes; a sample is two views of one (2, 1, 16, 16), and its number."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        turn, rate, phase = torch.rand(3, number, 1, 1, generator=generator)
        angle, place = torch.pi * turn, torch.arange(SIDE)
        along = angle.cos() * place + angle.sin() * place[:, None]
        self.images = ((0.5 + 1.5 * rate) * along + 2 * torch.pi * phase).sin()[:, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.stack([self.view(index), self.view(index)]), torch.tensor(index)

    def view(self, index: int) -> Tensor:
        """Return an image shifted, lighter or darker, and noisy."""
        shifted = self.images[index].roll(torch.randint(SIDE, (2,)).tolist(), dims=(1, 2))
        return (0.5 + torch.rand(())) * shifted + 0.3 * torch.randn(shifted.shape)


class Encoder(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, width, 5, 2, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(16 * width, 64), nn.ReLU(), nn.Linear(64, 16)),
        )

    def forward(self, views: Tensor) -> Tensor:
        return nn.functional.normalize(self.net(views.flatten(0, 1)).unflatten(0, (-1, 2)), dim=2)


def nt_xent(outputs: Tensor, _: Tensor) -> Tensor:
    """Return how badly each view finds the other of its image among all views of the batch."""
    views = outputs.transpose(0, 1).flatten(0, 1)
    scores = (views @ views.T / TEMPERATURE).fill_diagonal_(-torch.inf)
    partner = torch.arange(len(views), device=views.device).roll(len(outputs))
    return nn.functional.cross_entropy(scores, partner)


recipe = Recipe(
    model=Encoder,
    data=lambda: Splits(train=Views(800, 0), validation=Views(128, 1)),
    loss=nt_xent,
    loss_over="batch",
    settings={"epochs": 4, "batch_size": 64, "lr": 5e-3},
)
