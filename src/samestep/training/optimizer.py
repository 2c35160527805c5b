"""Build the optimizer, fused where the device has a fused kernel."""

from collections.abc import Iterable

import torch
from torch import nn

from samestep.settings import Settings

_FUSED = ("cpu", "cuda", "mps")


def make_optimizer(
    parameters: Iterable[nn.Parameter], settings: Settings, lr: float, device: torch.device
) -> torch.optim.Optimizer:
    """Return the optimizer of these settings, at a learning rate."""
    parameters = [p for p in parameters if p.requires_grad]
    fused = device.type in _FUSED
    decay = settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=lr, momentum=settings.momentum, weight_decay=decay, fused=fused
        )
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=lr, weight_decay=decay, fused=fused)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr
