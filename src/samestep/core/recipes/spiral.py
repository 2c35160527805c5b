"""Two interleaved spirals and a small MLP: the whole path from one process to many, in seconds."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from samestep.base.errors import UserError
from samestep.core.data.order import split_indices
from samestep.core.recipe import Recipe, Splits

_TURNS = 1.5


class SpiralDataset(TensorDataset):
    """Points (num_samples, 2) on two spirals, and the spiral (num_samples,) each belongs to.

    Class 1 is class 0 turned by π. Of an odd number, class 0 has one point more.

    Args:
        num_samples: points of both classes together.
        noise: standard deviation of the normal noise added to each coordinate; the arms are π
            apart.
        seed: of the points' places and their noise.
    """

    def __init__(self, num_samples: int = 10_000, noise: float = 0.2, seed: int = 42) -> None:
        if num_samples < 2:
            raise UserError(f"--num-samples is {num_samples}; two spirals need 2 or more.")
        if not 0 <= noise < math.inf:
            raise UserError(f"--noise is {noise}; it must be 0 or more.")
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(num_samples) % 2
        # The square root spreads the points evenly over the length of the arm.
        radius = torch.rand(num_samples, generator=generator).sqrt() * (2 * math.pi * _TURNS)
        angle = radius + labels * math.pi
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        points += noise * torch.randn(num_samples, 2, generator=generator)
        super().__init__(points, labels)


_POINTS_SHOWN, _PLACES = 600, 128
_BLUE, _RED = "#1f5fa8", "#c0392b"


@dataclass(frozen=True)
class SpiralOptions:
    """The options of this recipe."""

    num_samples: int = 10_000
    """Points of both spirals together; 70 % train, 15 % validate, 15 % test."""
    noise: float = 0.2
    """Standard deviation of the noise on each coordinate."""
    data_seed: int = 42
    """Seed of the points and of the split."""
    hidden_dims: tuple[int, ...] = (64, 32, 16)
    """Width of each hidden layer."""
    dropout: float = 0.1
    """Probability that a hidden unit is left out in training."""

    def __post_init__(self) -> None:
        if not self.hidden_dims:
            raise UserError("--hidden-dims is empty; give one width or more.")
        if any(width < 1 for width in self.hidden_dims):
            raise UserError(f"--hidden-dims {self.hidden_dims}: each must be 1 or more.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout is {self.dropout}; it must be at least 0 and below 1.")


def model(options: SpiralOptions) -> nn.Module:
    """Return an MLP that maps points (batch, 2) to logits (batch, 2)."""
    layers: list[nn.Module] = []
    width = 2
    for hidden in options.hidden_dims:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
        if options.dropout > 0:
            layers.append(nn.Dropout(options.dropout))
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, 2))


def data(options: SpiralOptions) -> Splits:
    """Make the points and split them 70/15/15."""
    points, labels = SpiralDataset(options.num_samples, options.noise, options.data_seed).tensors
    train, validation, test = split_indices(options.num_samples, (0.70, 0.15), options.data_seed)
    return Splits(
        train=(points[train], labels[train]),
        validation=(points[validation], labels[validation]),
        test=(points[test], labels[test]),
    )


def read(_: SpiralOptions, file: Path) -> list[Tensor]:
    """Return the points of a file: two numbers per line, `x,y`, below a heading or not."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("it is not text; two numbers per line were expected") from error
    rows = [row for row in csv.reader(text.splitlines()) if row]
    first = 1 if rows and not _is_number(rows[0][0]) else 0
    points = []
    for number, row in enumerate(rows[first:], first + 1):
        if len(row) != 2 or not all(map(_is_number, row)):
            raise ValueError(f"line {number} is {','.join(row)!r}, and two numbers were expected")
        points.append(torch.tensor([float(value) for value in row]))
    return points


def boundary(network: nn.Module, splits: Splits) -> Any:
    """Plot the decision regions and the test points."""
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415

    assert isinstance(splits.test, tuple)
    points, labels = (tensor[:_POINTS_SHOWN].cpu() for tensor in splits.test)
    reach = 1.05 * float(points.abs().max())
    weight = next(network.parameters())
    axis = torch.linspace(-reach, reach, _PLACES)
    across, up = torch.meshgrid(axis, axis, indexing="xy")
    places = torch.stack([across, up], dim=-1).flatten(0, 1).to(weight)
    second = network(places).float().softmax(dim=1)[:, 1].view(_PLACES, _PLACES).cpu().numpy()
    colours = LinearSegmentedColormap.from_list("arms", [_BLUE, "white", _RED])
    figure = Figure(figsize=(5.4, 5.2))
    axes = figure.add_axes((0.12, 0.09, 0.85, 0.85))
    around = (-reach, reach, -reach, reach)
    axes.imshow(second, extent=around, origin="lower", cmap=colours, vmin=0, vmax=1, alpha=0.45)
    axes.contour(axis.numpy(), axis.numpy(), second, levels=[0.5], colors="#444444", linewidths=1.2)
    for arm, colour in enumerate((_BLUE, _RED)):
        x, y = points[labels == arm].T.numpy()
        axes.plot(x, y, ".", color=colour, markersize=3.5, label=f"arm {arm}")
    axes.legend(loc="upper right", markerscale=2.5, framealpha=0.9)
    axes.set(title="Decision boundary", xlabel="x", ylabel="y")
    return figure


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


_USUAL = {"epochs": 30, "batch_size": 32, "eval_batch_size": 256, "optimizer": "adam", "lr": 1e-3}

recipe = Recipe(
    model=model,
    data=data,
    options=SpiralOptions,
    read=read,
    pictures={"boundary": boundary},
    accepts=("dropout",),
    settings=_USUAL,
)
