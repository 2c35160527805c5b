"""Hold what every peer shares: the data, the models and the stopwatch, in plain torch.

Nothing here comes from samestep, so the peers stay honest. A peer trains one warm-up epoch, then
`--epochs` epochs on the clock, and prints one JSON line.
"""

import argparse
import gzip
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

BATCH_SIZE = 32
LEARNING_RATE = 1e-3
MEAN, STD = 0.1307, 0.3081  # MNIST's published normalisation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""The CPU's tables hide every GPU from their processes."""

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
torch.manual_seed(42)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the runner tells a peer."""

    epochs: int
    data_dir: Path | None
    workers: int
    batch_size: int
    width: int
    """Channels of ResNet-18's first stage."""


def options() -> Options:
    """Read the peer's command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3, help="epochs on the clock")
    parser.add_argument("--data-dir", type=Path, help="directory of the IDX files")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--width", type=int, default=64)
    return Options(**vars(parser.parse_args()))


def now() -> float:
    """Read the clock, once the device has done all that it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(train_epoch: Callable[[int], int], epochs: int) -> None:
    """Time `train_epoch(epoch)`, which returns its number of samples, after one warm-up epoch."""
    seconds = []
    samples = 0
    for epoch in range(epochs + 1):
        start = now()
        samples = train_epoch(epoch)
        seconds.append(now() - start)
    report(seconds, samples)


def report(seconds: list[float], samples: int) -> None:
    """Print the JSON line on rank 0; the throughput is that of the median timed epoch."""
    if os.environ.get("RANK", "0") != "0":
        return
    timed = seconds[1:]
    line = {
        "samples_per_s": samples / statistics.median(timed),
        "epochs": len(timed),
        "samples": samples,
        "threads": torch.get_num_threads(),
        "first_epoch_s": seconds[0],
        "epoch_s": timed,
    }
    print(json.dumps(line), flush=True)


def spiral(num_samples: int = 10_000, noise: float = 0.2, seed: int = 42) -> tuple[Tensor, Tensor]:
    """Draw two interleaved spirals; return the 70% that train: (samples, 2) and (samples,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_samples) % 2
    radius = torch.rand(num_samples, generator=generator).sqrt()
    angle = radius * 3 * math.pi + labels * math.pi
    points = 3 * radius[:, None] * torch.stack((angle.cos(), angle.sin()), dim=1)
    points += noise * torch.randn(points.shape, generator=generator)
    train = torch.randperm(num_samples, generator=generator)[: int(0.7 * num_samples)]
    return points[train], labels[train]


def mlp(dropout: float = 0.1) -> nn.Module:
    """Build the spiral's MLP 2-64-32-16-2."""
    widths = (2, 64, 32, 16)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 2))


def simple_model() -> nn.Module:
    """Build the perceptron 784-128-10."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def convnet() -> nn.Module:
    """Build the network of PyTorch's MNIST example, up to its logits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def train_files(data_dir: Path | None) -> tuple[Tensor, Tensor]:
    """Read the training IDX files: uint8 (samples, 28, 28) and int64 (samples,)."""
    if data_dir is None:
        raise SystemExit("this peer needs --data-dir, the directory of the IDX files")
    images = _idx(data_dir / "train-images-idx3-ubyte", header=16).view(-1, 28, 28)
    return images, _idx(data_dir / "train-labels-idx1-ubyte", header=8).long()


def _idx(path: Path, header: int) -> Tensor:
    packed = path.with_name(path.name + ".gz")
    raw = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=header).copy())
