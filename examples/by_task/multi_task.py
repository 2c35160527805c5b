"""Two tasks on one trunk: which shape a wave has, and how fast it is."""

import torch
from torch import Tensor, nn

from samestep import Recipe, Splits

Targets = dict[str, Tensor]


def waves(number: int, seed: int) -> list[tuple[Tensor, Targets]]:
    """Return noisy waves (64,) of one of three shapes, each with its shape and its frequency."""
    generator = torch.Generator().manual_seed(seed)
    shape = torch.randint(3, (number,), generator=generator)
    frequency = 2 + 4 * torch.rand(number, generator=generator)
    phase = torch.rand(number, 1, generator=generator)
    turns = frequency[:, None] * torch.linspace(0, 1, 64) + phase
    sine = (2 * torch.pi * turns).sin()
    shapes = torch.stack([sine, sine.sign(), 2 * (turns % 1) - 1])
    noise = 0.3 * torch.randn(number, 64, generator=generator)
    samples = zip(shapes[shape, torch.arange(number)] + noise, shape, frequency, strict=True)
    return [(wave, {"shape": kind, "frequency": rate}) for wave, kind, rate in samples]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            *(nn.Unflatten(1, (1, 64)), nn.Conv1d(1, 16, 9, 2, 4), nn.ReLU()),
            *(nn.Conv1d(16, 16, 9, 2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), nn.ReLU()),
        )
        self.shape, self.frequency = nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, wave: Tensor) -> Targets:
        hidden = self.trunk(wave)
        return {"shape": self.shape(hidden), "frequency": self.frequency(hidden).squeeze(1)}


def loss(outputs: Targets, targets: Targets) -> Targets:
    return {
        "shape_loss": nn.functional.cross_entropy(outputs["shape"], targets["shape"]),
        "frequency_loss": nn.functional.mse_loss(outputs["frequency"], targets["frequency"]),
    }


recipe = Recipe(
    model=TwoHeads,
    data=lambda: Splits(train=waves(1500, 0), validation=waves(200, 1)),
    loss=loss,
    loss_weights={"frequency_loss": 0.5},
    metrics={
        "accuracy": lambda outputs, targets: outputs["shape"].argmax(1) == targets["shape"],
        "error": lambda outputs, targets: (outputs["frequency"] - targets["frequency"]).abs(),
    },
    lower_is_better=("error",),
    settings={"epochs": 5, "batch_size": 32, "lr": 3e-3},
)
