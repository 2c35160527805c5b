"""Small marks of large things: of each sample, to follow it over ranks; of each tensor's values."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from samestep.data.trees import tree_leaves

_VALUES = 1024
"""Values kept of a tensor: all of a small one, evenly spread ones of a large one."""


def sample_marks(*trees: Any) -> list[str]:
    """Return a mark for each sample of inputs and targets: equal for equal samples, bit by bit.

    They are tensors (batch, …), or trees of them.
    """
    leaves = [leaf.detach().cpu().contiguous() for tree in trees for leaf in tree_leaves(tree)]
    marks = []
    for row in range(len(leaves[0])):
        digest = hashlib.blake2b(digest_size=8)
        for leaf in leaves:
            digest.update(leaf[row].reshape(-1).view(torch.uint8).numpy().tobytes())
        marks.append(digest.hexdigest())
    return marks


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor with all its values, as few operations can do without of a sparse one."""
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def batch_mark(*trees: Any) -> str:
    """Return one mark for a batch of any form."""
    digest = hashlib.blake2b(digest_size=8)
    for leaf in (leaf for tree in trees for leaf in tree_leaves(tree)):
        if isinstance(leaf, Tensor):
            values = dense(leaf.detach()).cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(repr(tuple(leaf.shape)).encode() + values.numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def values_of(tensor: Tensor) -> Tensor:
    """Return a tensor's norm, followed by some or all of its values, in float64 on the CPU."""
    flat = dense(tensor.detach()).reshape(-1)
    dtype = None if flat.device.type == "mps" else torch.float64  # Apple GPUs have no float64
    norm = torch.linalg.vector_norm(flat, dtype=dtype)
    if len(flat) > _VALUES:
        flat = flat[torch.linspace(0, len(flat) - 1, _VALUES).long().to(flat.device)]
    return torch.cat([norm.reshape(1).cpu().double(), flat.cpu().double()])


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what `values_of` keeps of each parameter and floating-point buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: values_of(t) for name, t in named if t.is_floating_point() and t.numel()}


def bits_of(model: nn.Module) -> dict[str, str]:
    """Return a mark of each gradient, parameter and buffer: equal if all its bits are."""
    named = [(f"gradient {name}", p.grad) for name, p in model.named_parameters()]
    named += [(f"weight {name}", p) for name, p in model.named_parameters()]
    named += [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    return {name: batch_mark(tensor) for name, tensor in named if tensor is not None}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Return what `values_of` keeps of each parameter's gradient."""
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    return {name: values_of(g) for name, g in named if g.is_floating_point() and g.numel()}
