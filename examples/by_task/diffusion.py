"""Denoising diffusion on small images (Ho et al., 2020): the model learns to tell the noise."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from samestep import Recipe, Splits

SIDE, STEPS = 12, 100
KEPT = (1 - torch.linspace(1e-3, 0.1, STEPS)).cumprod(dim=0)
"""How much of an image's variance is left after each step."""


class Noised(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Images of a disc with noise, and that noise; drawn anew for each sample and epoch."""

    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, y = 3 + 6 * torch.rand(2, number, 1, 1, generator=generator)
        places = torch.arange(SIDE)
        inside = (places - x).hypot(places[:, None] - y) < 3
        self.images = 2 * inside[:, None].float() - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        step, noise = torch.randint(STEPS, ()), torch.randn(1, SIDE, SIDE)
        kept = KEPT[step]
        noisy = kept.sqrt() * self.images[index] + (1 - kept).sqrt() * noise
        return {"noisy": noisy, "step": step}, noise


class Denoiser(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.step, self.first = nn.Embedding(STEPS, width), nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=d, dilation=d)
            )
            for d in (1, 2, 4)
        )
        self.last = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, noisy: Tensor, step: Tensor) -> Tensor:
        hidden = self.first(noisy)
        for block in self.blocks:
            hidden = hidden + block(hidden + self.step(step)[:, :, None, None])
        return self.last(hidden)


recipe = Recipe(
    model=Denoiser,
    data=lambda: Splits(train=Noised(1000, 0), validation=Noised(200, 1)),
    loss=nn.functional.mse_loss,
    metrics={"error": lambda outputs, noise: (outputs - noise).square().mean((1, 2, 3))},
    lower_is_better=("error",),
    settings={"epochs": 5, "batch_size": 32, "lr": 3e-3, "ema": 0.99},
)
