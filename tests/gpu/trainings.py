"""Trainings that are built in this process, and recipes that show what a GPU does."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import pytest
import torch

from samestep.core.session.build import Built, build
from samestep.core.training.loop import rehearse
from samestep.launch.ranks.world import World
from samestep.shell.commands.train import parse
from tests import tiny
from tests.training.test_trajectory import CONVNET, LOADED

# It has no checkpoints between epochs, so that a compiled graph may hold several steps.
TINY = tiny.RECIPE.replace(tiny.SLEEP, "").replace('    "checkpoint_every_steps": 4,\n', "")

IN_MEMORY_PLAIN = CONVNET.replace("augment=flip, ", "")
IN_FILES = IN_MEMORY_PLAIN + LOADED


@dataclass(frozen=True)
class Steps:
    losses: torch.Tensor
    norms: torch.Tensor
    weights: torch.Tensor
    """All of them, one after the other, after the steps."""


@contextmanager
def built(device: torch.device, target: object, *flags: object) -> Iterator[Built]:
    """Build a training of one rank as `samestep train TARGET FLAGS` does."""
    _, request = parse([str(target), *map(str, flags), "--device", device.type])
    request = replace(request, options=request.recipe.complete_options(request.options))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    training = build(request, World(device=device))
    with closing(training.work):
        yield training


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Let every operation fail that makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def first_steps(device: torch.device, target: object, *flags: object, steps: int = 10) -> Steps:
    """Take the first steps of a training; `--log-every 1` asks for the norm of each.

    Convolutions add in one order: by default cuDNN's backward adds as its threads arrive, and not
    even two trainings from the same memory have the same bits.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "deterministic", True)
        with built(device, target, *flags, "--log-every", "1") as training:
            return take(training, steps)


def first_25_steps(device: torch.device, target: object, *flags: object) -> Steps:
    """Do the same for 25 steps; in a process of its own, say."""
    return first_steps(device, target, *flags, steps=25)


def take(training: Built, steps: int) -> Steps:
    """Take at least so many steps of a training, and return what the first of them gave."""
    losses: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for taken in rehearse(training.work.endless(), training.state):
        losses.extend(taken.result.losses)
        norms.extend(taken.result.grad_norms if taken.result.grad_norms is not None else ())
        if len(losses) >= steps:
            break
    return Steps(_read(losses[:steps]), _read(norms[:steps]), weights(training))


def weights(training: Built) -> torch.Tensor:
    parameters = training.work.learner.model.parameters()
    return torch.cat([p.detach().cpu().double().flatten() for p in parameters])


def blocks(training: Built, count: int) -> list:
    """Return single steps' blocks of the first epoch, read and on the device."""
    work = training.work
    epoch = work.train.blocks(
        0, 0, global_batch=work.plan.global_batch_size, drop_last=work.settings.drop_last
    )
    return list(islice((piece for block in epoch for piece in block.singles()), count))


def _read(values: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([v.detach().double().cpu() for v in values]) if values else torch.zeros(0)
