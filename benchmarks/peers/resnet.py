"""Hold ResNet-18 for 32 x 32, CIFAR-10's binary files and the usual augmentation, by hand."""

from pathlib import Path

import numpy as np
import torch
from common import DEVICE
from torch import Tensor, nn
from torch.nn.functional import pad, relu

BATCH_SIZE = 64
PADDING = 4
MEAN = torch.tensor((0.4914, 0.4822, 0.4465), device=DEVICE).view(3, 1, 1) * 255
STD = torch.tensor((0.2470, 0.2435, 0.2616), device=DEVICE).view(3, 1, 1) * 255


class Block(nn.Module):
    """Two convolutions and a way past them (He et al. 2016)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.past = nn.Sequential()
        if stride != 1 or fan_in != fan_out:
            conv = nn.Conv2d(fan_in, fan_out, 1, stride, bias=False)
            self.past = nn.Sequential(conv, nn.BatchNorm2d(fan_out))

    def forward(self, x: Tensor) -> Tensor:
        """Return maps (batch, fan_out, height / stride, width / stride)."""
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + self.past(x))


def resnet18(width: int = 64) -> nn.Module:
    """Build it with the stem for small images, channels last."""
    stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU()]
    fan_in = width
    for fan_out in (width, 2 * width, 4 * width, 8 * width):
        layers += [Block(fan_in, fan_out, 1 if fan_out == width else 2), Block(fan_out, fan_out, 1)]
        fan_in = fan_out
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, 10)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def train_images(folder: Path | None) -> tuple[Tensor, Tensor]:
    """Read the nine tenths that train: uint8 (samples, 3, 32, 32) and int64 (samples,)."""
    if folder is None:
        raise SystemExit("this peer needs --data-dir, the directory of the binary files")
    files = [folder / f"data_batch_{number}.bin" for number in range(1, 6)]
    table = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    table = torch.from_numpy(table[: len(table) * 9 // 10])
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].long()


def augment(images: Tensor) -> Tensor:
    """Crop each image at random out of a border of 4, mirror half of them, normalise."""
    padded = pad(images, (PADDING,) * 4)
    windows = padded.unfold(2, 32, 1).unfold(3, 32, 1)
    top, left = torch.randint(2 * PADDING + 1, (2, len(images)), device=images.device)
    cropped = windows[torch.arange(len(images), device=images.device), :, top, left]
    mirrored = torch.rand(len(images), device=images.device) < 0.5
    cropped = torch.where(mirrored[:, None, None, None], cropped.flip(3), cropped)
    return (cropped.float() - MEAN) / STD


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer that everyone uses here."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, fused=True)
