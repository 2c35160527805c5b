"""Be the least script that does the first step of `samestep train spiral` with its imports."""

from dataclasses import dataclass

import torch
import tyro
from common import DEVICE, mlp, spiral
from rich.console import Console
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Settings:
    """What a hand-written script would let its user set."""

    lr: float = 1e-3
    batch_size: int = 32
    dropout: float = 0.1
    noise: float = 0.2
    num_samples: int = 10_000
    seed: int = 42


settings = tyro.cli(Settings)
console = Console()
torch.manual_seed(settings.seed)
drawn = spiral(settings.num_samples, settings.noise, settings.seed)
points, labels = (tensor.to(DEVICE) for tensor in drawn)
model = mlp(settings.dropout).to(DEVICE).train()
optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)
console.print(f"spiral: {len(points)} samples, batches of {settings.batch_size}")

batch = torch.randperm(len(points))[: settings.batch_size]
loss = cross_entropy(model(points[batch]), labels[batch])
loss.backward()
optimizer.step()
optimizer.zero_grad()
console.print(f"first step done: loss {loss.item():.4f}")
