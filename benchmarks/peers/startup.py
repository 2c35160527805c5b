"""Be the least script that does the first step of `samestep train spiral` with its imports."""

from argparse import ArgumentParser

import torch
from common import DEVICE, mlp, spiral
from rich.console import Console
from torch.nn.functional import cross_entropy

parser = ArgumentParser()
defaults = {"lr": 1e-3, "batch_size": 32, "dropout": 0.1, "noise": 0.2, "num_samples": 10_000}
for name, value in {**defaults, "seed": 42}.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
settings = parser.parse_args()
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
