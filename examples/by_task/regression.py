"""Predict a number from the columns of a table; a straight line is what it has to beat."""

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from samestep import Recipe, Splits


def table(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return columns of different scales (number, 5), and what follows from them (number, 1)."""
    generator = torch.Generator().manual_seed(seed)
    columns = torch.rand(number, 5, generator=generator)
    a, b, c, d, _ = columns.T  # as in Friedman (1991)
    target = 10 * (3.1416 * a * b).sin() + 20 * (c - 0.5) ** 2 + 10 * d
    target = target + torch.randn(number, generator=generator)
    return columns * torch.tensor([1.0, 10.0, 100.0, 1.0, 1.0]), target[:, None]


TRAIN, VALIDATION, TEST = table(2000, 0), table(300, 1), table(300, 2)
MEAN, STD = TRAIN[0].mean(dim=0), TRAIN[0].std(dim=0)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
    )


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the error of each row."""
    return (outputs - targets).abs().squeeze(1)


def baselines() -> dict[str, dict[str, float]]:
    def widened(inputs: Tensor) -> Tensor:
        return torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)

    line = torch.linalg.lstsq(widened(TRAIN[0]), TRAIN[1]).solution
    guesses = {"mean": TRAIN[1].mean(), "straight line": widened(TEST[0]) @ line}
    return {
        name: {"error": float((guess - TEST[1]).abs().mean())} for name, guess in guesses.items()
    }


recipe = Recipe(
    model=model,
    data=lambda: Splits(train=TRAIN, validation=VALIDATION, test=TEST),
    transform=lambda inputs: (inputs - MEAN.to(inputs)) / STD.to(inputs),
    loss=nn.functional.mse_loss,
    metrics={"error": absolute},
    lower_is_better=("error",),
    baselines=baselines,
    schedule=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.3, patience=0),
    settings={"epochs": 10, "batch_size": 64, "lr": 5e-3},
)
