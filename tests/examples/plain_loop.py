"""examples/own_loop.py as it is on one device, without samestep."""

import sys

import torch
from torch import nn

SAMPLES = 1000


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else None
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 8)
    y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    for epoch in range(5):
        total = 0.0
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
        schedule.step()
        print(f"epoch {epoch + 1}  loss {total / SAMPLES:.6f}")
    if path is not None:
        torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main()
