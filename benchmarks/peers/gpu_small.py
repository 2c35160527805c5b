"""Hold the two small problems of the GPU's tables: the spiral, or MNIST if its folder is given."""

from pathlib import Path

from common import MEAN, STD, mlp, simple_model, spiral, train_files
from torch import Tensor, nn


def problem(data_dir: Path | None) -> tuple[Tensor, Tensor, nn.Module]:
    """Return float32 inputs and int64 targets in the host's memory, and the model."""
    if data_dir is None:
        return *spiral(), mlp()
    pixels, labels = train_files(data_dir)
    return pixels.float().div_(255).sub_(MEAN).div_(STD), labels, simple_model()
