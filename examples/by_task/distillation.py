"""A small network learns from a large one that stays as it is (Hinton et al., 2015)."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from samestep import Recipe, Splits

TEMPERATURE = 3.0


def points(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points (number, 10), and one of eight classes that six of the ten numbers make."""
    x = torch.randn(number, 10, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :6].view(-1, 3, 2).prod(dim=2) > 0).long() @ torch.tensor([1, 2, 4])


def network(width: int) -> nn.Module:
    hidden = (nn.Linear(10, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
    return nn.Sequential(*hidden, nn.Linear(width, 8))


def trained_teacher() -> nn.Module:
    """Return the large network: here it is trained at once, yours comes from a file."""
    teacher, (x, y) = network(256), points(4000, 2)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for rows in torch.arange(4000).repeat(3).split(100):
        optimizer.zero_grad()
        cross_entropy(teacher(x[rows]), y[rows]).backward()
        optimizer.step()
    return teacher


class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student = network(24)
        self.teacher = trained_teacher().requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher.eval()(x)  # no dropout in what is learned from


def loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    student, teacher = ((one / TEMPERATURE).log_softmax(dim=1) for one in outputs)
    soft = kl_div(student, teacher, reduction="batchmean", log_target=True)
    return 0.9 * TEMPERATURE**2 * soft + 0.1 * cross_entropy(outputs[0], labels)


recipe = Recipe(
    model=Distilled,
    data=lambda: Splits(train=points(2000, 0), validation=points(500, 1)),
    loss=loss,
    metrics={
        "accuracy": lambda outputs, labels: outputs[0].argmax(dim=1) == labels,
        "teacher": lambda outputs, labels: outputs[1].argmax(dim=1) == labels,
    },
    settings={"epochs": 6, "batch_size": 32, "lr": 5e-3},
)
