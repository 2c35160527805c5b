"""A variational autoencoder (Kingma and Welling, 2014) on images; noise comes with the sample."""

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.utils.data import Dataset

from samestep import Recipe, Splits

SIDE, SIZE, CODE = 12, 144, 4
Outputs = tuple[Tensor, Tensor, Tensor]


class Discs(Dataset[tuple[dict[str, Tensor], Tensor]]):
    def __init__(self, number: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, y, radius = torch.rand(3, number, 1, 1, generator=generator)
        places = torch.arange(SIDE)
        inside = (places - 3 - 6 * x).hypot(places[:, None] - 3 - 6 * y) < 2 + 2 * radius
        self.images = inside.flatten(1).float()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return an image, and noise that depends on seed, epoch and sample alone."""
        image = self.images[index]
        return {"image": image, "noise": torch.randn(CODE)}, image


class VAE(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIZE, width), nn.ReLU(), nn.Linear(width, 2 * CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, width), nn.ReLU(), nn.Linear(width, SIZE))

    def forward(self, image: Tensor, noise: Tensor) -> Outputs:
        mean, log_variance = self.encoder(image).chunk(2, dim=1)
        return self.decoder(mean + (log_variance / 2).exp() * noise), mean, log_variance


def loss(outputs: Outputs, images: Tensor) -> dict[str, Tensor]:
    """Return both parts of the negative evidence lower bound, as sums over the images."""
    logits, mean, log_variance = outputs
    return {
        "reconstruction": cross_entropy(logits, images, reduction="sum"),
        "kl": 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(),
    }


recipe = Recipe(
    model=VAE,
    data=lambda: Splits(train=Discs(2000, 0), validation=Discs(200, 1)),
    loss=loss,
    reduction="sum",
    loss_weights={"kl": 0.5},
    metrics={"error": lambda outputs, images: (outputs[0].sigmoid() - images).square().mean(1)},
    lower_is_better=("error",),
    settings={"epochs": 8, "batch_size": 64, "lr": 3e-3},
)
