"""Train a small model on the GPU as PyTorch's quickstart does: a DataLoader over tensors, Adam.

The images were normalised once, so that the loader only picks and stacks them.
"""

import torch
from common import BATCH_SIZE, DEVICE, LEARNING_RATE, measure, options
from gpu_small import problem
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

asked = options()
inputs, targets, model = problem(asked.data_dir)
model = model.to(DEVICE).train()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
loss_function = nn.CrossEntropyLoss()
loader = DataLoader(
    TensorDataset(inputs, targets),
    batch_size=BATCH_SIZE,
    shuffle=True,
    pin_memory=DEVICE.type == "cuda",
)


def train_epoch(_epoch: int) -> int:
    for x, y in loader:
        outputs = model(x.to(DEVICE, non_blocking=True))
        loss = loss_function(outputs, y.to(DEVICE, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(inputs)


measure(train_epoch, asked.epochs)
