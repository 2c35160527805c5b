"""Dropout inside whole compiled steps.

On the CPU, PyTorch 2.13's compiler may put what multiplies by a mask before what draws it, when the
mask comes from `bernoulli`, as in PyTorch's own dropout under `torch.func`. Every value is then
dropped. A mask that is compared with `rand` is drawn in its place.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Dropout = Callable[..., Tensor]


def dropped(
    input: Tensor,  # noqa: A002 - as torch.nn.functional.dropout
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001
) -> Tensor:
    """Return what `torch.nn.functional.dropout` does, never in place."""
    if not training or p == 0:
        return input
    if p == 1:
        return torch.zeros_like(input)
    kept = torch.rand_like(input, dtype=torch.float32) >= p
    return input * kept / (1 - p)


def not_dropped(
    input: Tensor,  # noqa: A002
    p: float = 0.5,  # noqa: ARG001
    training: bool = True,  # noqa: ARG001
    inplace: bool = False,  # noqa: ARG001
) -> Tensor:
    """Return the input: so what else draws random numbers shows."""
    return input


@contextlib.contextmanager
def dropout_by(function: Dropout) -> Iterator[None]:
    """Let modules call another function instead of `torch.nn.functional.dropout`."""
    usual, nn.functional.dropout = nn.functional.dropout, function
    try:
        yield
    finally:
        nn.functional.dropout = usual
