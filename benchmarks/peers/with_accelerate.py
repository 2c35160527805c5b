"""Hold the training loop of Accelerate's quicktour, on one process or on many."""

import torch
from accelerate import Accelerator
from common import LEARNING_RATE, measure
from torch import nn
from torch.utils.data import DataLoader


def train(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    """Train as Accelerate's quicktour does."""
    accelerator = Accelerator(cpu=True)
    samples = len(loader.dataset)
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def train_epoch(_epoch: int) -> int:
        model.train()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = loss_function(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
        return samples

    measure(train_epoch, epochs)
    accelerator.end_training()
