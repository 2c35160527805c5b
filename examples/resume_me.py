"""A training whose resume looks right and is not: `samestep check --resume` says why."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--resume-from")
    args = parser.parse_args()
    torch.manual_seed(0)
    points = torch.randn(256, 2)
    labels = (points.square().sum(1) > 1.4).long()
    loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, args.epochs * len(loader))
    first = 0
    if args.resume_from:
        checkpoint = torch.load(args.resume_from)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["epoch"]
    Path("out").mkdir(exist_ok=True)
    for epoch in range(first, args.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "epoch": epoch + 1}, "out/last.pt")


if __name__ == "__main__":
    main()
