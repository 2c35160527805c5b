"""Train the spiral by hand with eight whole steps (forward, backward, Adam) in one graph."""

import torch
from common import BATCH_SIZE, LEARNING_RATE, measure, mlp, options, spiral
from torch import Tensor
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

STEPS_PER_GRAPH = 8
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

points, labels = spiral()
model = mlp().train()
shapes = {name: weight.shape for name, weight in model.named_parameters()}
sizes = [shape.numel() for shape in shapes.values()]
weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
first, second, step = torch.zeros_like(weights), torch.zeros_like(weights), torch.zeros(())


def loss_function(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    pieces = zip(shapes.items(), weights.split(sizes), strict=True)
    by_name = {name: piece.view(shape) for (name, shape), piece in pieces}
    return cross_entropy(functional_call(model, by_name, (inputs,)), targets)


@torch.compile(dynamic=False)
def train_steps(inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> None:
    for x, y in zip(inputs, targets, strict=True):
        gradient = grad(loss_function)(weights, x, y)
        step.add_(1)
        first.lerp_(gradient, 1 - BETA1)
        second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        spread = (second / (1 - BETA2**step)).sqrt() + EPSILON
        weights.sub_(LEARNING_RATE / (1 - BETA1**step) * first / spread)


def train_epoch(_epoch: int) -> int:
    order = torch.randperm(len(points))
    inputs, targets = points[order].split(BATCH_SIZE), labels[order].split(BATCH_SIZE)
    full = len(points) // BATCH_SIZE // STEPS_PER_GRAPH * STEPS_PER_GRAPH
    for at in range(0, full, STEPS_PER_GRAPH):
        train_steps(inputs[at : at + STEPS_PER_GRAPH], targets[at : at + STEPS_PER_GRAPH])
    train_steps(inputs[full:], targets[full:])  # the rest, with its short last batch
    return len(points)


if __name__ == "__main__":
    measure(train_epoch, options().epochs)
