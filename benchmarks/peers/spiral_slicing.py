"""Train the spiral by hand at its least: shuffle the tensors, cut slices, fused Adam."""

import torch
from common import BATCH_SIZE, LEARNING_RATE, measure, mlp, options, spiral
from torch.nn.functional import cross_entropy

points, labels = spiral()
model = mlp().train()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)


def train_epoch(_epoch: int) -> int:
    order = torch.randperm(len(points))
    batches = zip(points[order].split(BATCH_SIZE), labels[order].split(BATCH_SIZE), strict=True)
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(points)


if __name__ == "__main__":
    measure(train_epoch, options().epochs)
