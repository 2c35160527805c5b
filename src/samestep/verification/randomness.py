"""Hold still what a model draws at random: what is left must be the same on all ranks.

Held still, batch normalisation and random numbers give every sample the same, whatever rank it is
on; what then still differs has another cause.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from samestep.settings import Precision
from samestep.training.side_effects import Draws, Kind, RandomDraws, batch_norms, outside, watched


def hold_model(
    model: nn.Module,
    seen: RandomDraws,
    held: frozenset[Kind],
    calibrate: Callable[[], Any] | None = None,
) -> None:
    """Let a built model note what it draws, and hold some of it still, in place.

    `calibrate` calls the model with some inputs, the same on every rank, for the statistics that
    batch normalisation is then held at; else they stay as they were built.
    """
    if "dropout" in held:
        for module in model.modules():
            if isinstance(module, _DropoutNd):
                module.p = 0.0
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
                module.dropout = 0.0
    norms = [*batch_norms(model).values()] if "batchnorm" in held else []
    if norms and calibrate is not None:
        _calibrate(model, norms, calibrate)
    for norm in norms:
        norm.eval()
        norm.train = partial(_stay, norm)  # type: ignore[method-assign]
        if norm.running_mean is None:  # it takes the batch's statistics in an evaluation too
            norm.forward = partial(_affine, norm)  # type: ignore[method-assign]
    model.forward = watched(model.forward, seen, held)


def nudge(model: nn.Module, precision: Precision) -> None:
    """Move each weight by one rounding of the arithmetic, up or down, always the same way."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        # Convolutions on GPUs round to 11 bits by default, as fp16 does.
        narrow = precision == "fp16" or parameter.device.type == "cuda"
        unit = 2.0**-8 if precision == "bf16" else 2.0**-11 if narrow else 2.0**-23
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        with torch.no_grad():
            parameter.mul_(1 + unit * signs.to(parameter))


def _calibrate(model: nn.Module, norms: list[_BatchNorm], forward: Callable[[], Any]) -> None:
    """Set the running statistics to those of one batch: as built they would normalise nothing."""
    was_training, momenta = model.training, [norm.momentum for norm in norms]
    model.train()
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad(), outside(RandomDraws(), hold=True), Draws(RandomDraws(), hold=True):
        forward()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.train(was_training)


def _stay(norm: _BatchNorm, mode: bool = True) -> _BatchNorm:  # noqa: ARG001 - as every train()
    return norm


def _affine(norm: _BatchNorm, inputs: Tensor) -> Tensor:
    zeros = inputs.new_zeros(inputs.shape[1])
    return nn.functional.batch_norm(inputs, zeros, zeros + 1, norm.weight, norm.bias, eps=norm.eps)
