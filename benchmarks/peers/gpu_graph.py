"""Train a small model by hand with a CUDA graph: eight whole steps are captured once and replayed.

The data stays on the GPU, a gather fills the graph's inputs, Adam is fused and counts its steps on
the device. Without a GPU the same steps run, and nothing is captured.
"""

from collections.abc import Callable

import torch
from common import BATCH_SIZE, DEVICE, LEARNING_RATE, measure, options
from gpu_small import problem
from torch import Tensor
from torch.nn.functional import cross_entropy

STEPS_PER_GRAPH = 8
ROWS = STEPS_PER_GRAPH * BATCH_SIZE

asked = options()
inputs, targets, model = problem(asked.data_dir)
inputs, targets, model = inputs.to(DEVICE), targets.to(DEVICE), model.to(DEVICE).train()
on_gpu = DEVICE.type == "cuda"
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True, capturable=on_gpu)
held_inputs, held_targets = inputs[:ROWS].clone(), targets[:ROWS].clone()


def train_steps(x: Tensor, y: Tensor) -> None:
    for rows, classes in zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True):
        optimizer.zero_grad()
        cross_entropy(model(rows), classes).backward()
        optimizer.step()


def captured() -> Callable[[], None]:
    """Return a call that takes the steps of the held samples."""
    if not on_gpu:
        return lambda: train_steps(held_inputs, held_targets)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # what is allocated and chosen once, before the capture
        for _ in range(3):
            train_steps(held_inputs, held_targets)
    torch.cuda.current_stream().wait_stream(beside)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_steps(held_inputs, held_targets)
    return graph.replay


take_steps = captured()


def train_epoch(_epoch: int) -> int:
    order = torch.randperm(len(inputs), device=DEVICE)
    full = len(order) // ROWS * ROWS
    for rows in order[:full].split(ROWS):
        torch.index_select(inputs, 0, rows, out=held_inputs)
        torch.index_select(targets, 0, rows, out=held_targets)
        take_steps()
    rest = order[full:]
    if len(rest):  # fewer than eight steps, the last of them short
        train_steps(inputs[rest], targets[rest])
    return len(inputs)


measure(train_epoch, asked.epochs)
