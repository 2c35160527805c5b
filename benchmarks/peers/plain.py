"""Hold the loop of PyTorch's quickstart, for the peers that differ only in their data."""

import torch
from common import LEARNING_RATE, measure
from torch import nn
from torch.utils.data import DataLoader


def train(model: nn.Module, loader: DataLoader, epochs: int) -> None:
    """Train as PyTorch's quickstart does: default Adam, one batch after the other."""
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def train_epoch(_epoch: int) -> int:
        model.train()
        for inputs, targets in loader:
            loss = loss_function(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return len(loader.dataset)

    measure(train_epoch, epochs)
