"""Steps taken by hand on made-up blocks: by the eager loop, and by whole steps."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samestep import Settings
from samestep.base.phases import make_phases
from samestep.core.data.order import Block
from samestep.core.learner.optimizer import make_optimizer
from samestep.core.plan import make_plan
from samestep.core.training.compiled import WholeStep
from samestep.core.training.step import EagerStep
from samestep.core.training.work import Learner
from samestep.launch.ranks.world import World

BATCH, IN_A_GRAPH = 6, 2
CPU = torch.device("cpu")

OPTIMIZERS = {
    "adam": {"weight_decay": 0.1},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.2, "clip_norm": 0.3},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "micro_batch_size": 4},
    "plain sgd": {"optimizer": "sgd"},
}


def settings_of(**told) -> Settings:
    """Return the settings of a run in float64, with batches of `BATCH` samples."""
    return Settings(batch_size=BATCH, epochs=9, precision="fp64", compile="on", **told)


def model(*, large: bool = False, dropout: float = 0.0) -> nn.Module:
    """Return a network with buffers and a frozen layer; `large`: one with convolutions."""
    torch.manual_seed(3)
    frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
    layers = [frozen, nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)]
    if large:
        images = [
            nn.Unflatten(1, (2, 2, 2)),
            nn.Conv2d(2, 2, 3, padding=1),
            nn.Tanh(),
            nn.Flatten(),
        ]
        layers = [*images, *layers]
    return nn.Sequential(*layers).double()


def learner(net: nn.Module, settings: Settings, device: torch.device = CPU) -> Learner:
    """Return what steps change: the model on a device, and an optimizer of its own."""
    net = net.to(device)
    return Learner(
        model=net,
        applied=net,
        wrapped=net,
        optimizer=make_optimizer(net.parameters(), settings, settings.lr, device),
        scaler=None,
        loss=nn.functional.cross_entropy,
    )


def blocks(settings: Settings, device: torch.device = CPU, *, together: int) -> list[Block]:
    """Return three groups of steps, two single ones, an incomplete batch, and a group again."""
    torch.manual_seed(5)
    made, first, rows = [], 0, BATCH
    shapes = [(together, rows)] * 3 + [(1, rows)] * 2 + [(1, rows - 2), (together, rows)]
    for steps, size in shapes:
        x = torch.randn(steps * size, 8, dtype=torch.float64)
        y = (x[:, 0] > 0).long()
        made.append(Block(first, steps, x.to(device), y.to(device), size, 1.0, size))
        first += steps
    return made


def eager(trained: Learner, settings: Settings, device: torch.device = CPU) -> EagerStep:
    most = settings.micro_batch_size or BATCH
    return EagerStep(trained, settings, World(device=device), most, make_phases(device))


def whole(trained: Learner, settings: Settings, device: torch.device = CPU) -> WholeStep:
    """Return what takes whole steps, several at once where the model is small."""
    plan = make_plan(settings, 600, 1)
    world, phases = World(device=device), make_phases(device)
    return WholeStep(trained, settings, world, plan, IN_A_GRAPH, phases)


@dataclass(frozen=True)
class Ran:
    losses: Tensor
    norms: Tensor
    notes: list


def run(step: EagerStep, some: list[Block], start: int = 0, lr: float = 0.05) -> Ran:
    """Take the steps of blocks, each with another learning rate."""
    losses, norms, notes = [], [], []
    for block in some:
        pieces = [block] if step.steps_per_call == block.num_steps else list(block.singles())
        for piece in pieces:
            lrs = [lr / (1 + start + number) for number in range(piece.num_steps)]
            result = step(piece, start, lrs, want_norm=True)
            start += piece.num_steps
            losses.extend(result.losses)
            norms.extend(result.grad_norms)
            notes.extend(result.notes)
    return Ran(torch.stack(losses), torch.stack(norms), notes)


def assert_same(one: Learner, other: Learner, tolerance: float = 1e-12) -> None:
    ours, its = one.model.state_dict(), other.model.state_dict()
    for name, value in its.items():
        torch.testing.assert_close(ours[name], value, rtol=tolerance, atol=tolerance)
    mine, theirs = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys()
    for number, state in theirs.items():
        for key, value in state.items():
            if value is not None:
                torch.testing.assert_close(mine[number][key], value, rtol=tolerance, atol=tolerance)
