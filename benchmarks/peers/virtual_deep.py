"""100 MiB of weights and next to no computation: the memory of gradients stands out."""

import torch
from torch import nn

from samestep.core.recipe import Recipe, Splits

WIDTH, LAYERS = 640, 64


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def data() -> Splits:
    draw = torch.Generator().manual_seed(42)
    inputs = torch.randn(64, WIDTH, generator=draw)
    return Splits(train=(inputs, torch.randint(10, (64,), generator=draw)))


recipe = Recipe(
    model=model, data=data, settings={"optimizer": "sgd", "momentum": 0.0, "lr": 1e-3, "epochs": 1}
)
