#!/usr/bin/env bash
# A strided slice in a channels-last network makes gradients channels-first.
#
# x[..., ::2, ::2] picks every other pixel, as a 1x1 convolution with a stride of 2 would. In the
# forward all stays channels-last. In the backward PyTorch fills a new, contiguous tensor for each
# slice. Where the paths of a residual block meet, the sum takes the layout of the gradient that came
# first, which is the slice's if its path was computed last, as a shortcut often is: channels-first,
# though weights, inputs and outputs are channels-last.
# Kernels that expect channels-last then copy, or read memory in the wrong order; nothing says so.
# avg_pool2d(x, 1, stride=2) picks the same pixels, to the last bit, and keeps the layout.
#
# Seen: torch 2.13.0, CPU. In a ResNet-18 on an H200 (torch 2.11.0+cu130, bf16, batch 512) the kernels
# of a step took 9.0 ms with three such slices and 8.1 ms without.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.nn.functional import avg_pool2d


def gradient_of(pick):
    x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    # Two paths, as in a residual block: one picks pixels, the other keeps them all.
    loss = (x.relu() ** 2).sum() + (pick(x) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, [x])
    (alone,) = torch.autograd.grad((pick(x) ** 2).sum(), [x])
    return pick(x), alone, gradient


def layout(tensor):
    return "channels-last" if tensor.is_contiguous(memory_format=torch.channels_last) else "channels-first"


sliced = gradient_of(lambda x: x[..., ::2, ::2])
pooled = gradient_of(lambda x: avg_pool2d(x, 1, 2))
print("torch", torch.__version__)
for name, (picked, alone, both) in (("slice", sliced), ("avg_pool2d", pooled)):
    print(f"{name}: its gradient is {layout(alone)}, the sum with another path's {layout(both)}")
assert all(torch.equal(one, other) for one, other in zip(sliced, pooled)), "the numbers differ"
assert [layout(t) for t in sliced[1:]] == ["channels-first", "channels-first"], "slice"
assert [layout(t) for t in pooled[1:]] == ["channels-last", "channels-last"], "avg_pool2d"
print("equal to the last bit")
PYTHON
# torch 2.13.0+cpu
# slice: its gradient is channels-first, the sum with another path's channels-first
# avg_pool2d: its gradient is channels-last, the sum with another path's channels-last
# equal to the last bit
