"""A recipe of your own: a model, its data, and the settings to begin with."""

import torch
from torch import nn

from samestep import Recipe, Splits


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


def data() -> Splits:
    x = torch.randn(3000, 8, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] * x[:, 1] > 0).long()
    return Splits(
        train=(x[:2000], y[:2000]),
        validation=(x[2000:2500], y[2000:2500]),
        test=(x[2500:], y[2500:]),
    )


recipe = Recipe(model=model, data=data, settings={"epochs": 5, "batch_size": 32})
