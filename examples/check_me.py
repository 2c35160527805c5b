"""A training on several ranks with seven mistakes in it: what does `samestep check` find?

samestep check examples/check_me.py
torchrun --nproc_per_node=2 examples/check_me.py    # it trains all the same
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH_SIZE, ACCUMULATE = 4, 32, 4


def make_data(samples: int, seed: int) -> TensorDataset:
    """Return points in the plane, and whether each is closer to the centre than 1."""
    points = torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, (points.norm(dim=1) < 1).long())


def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy."""
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for points, labels in loader:
            right += (model(points).argmax(1) == labels).sum().item()
            seen += len(labels)
    return right / seen


def main() -> None:
    """Train, and keep the best model."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, val_set = make_data(2000, seed=1), make_data(402, seed=2)
    train_loader = DataLoader(train_set, BATCH_SIZE, sampler=DistributedSampler(train_set))
    val_sampler = DistributedSampler(val_set, shuffle=False)
    val_loader = DataLoader(val_set, BATCH_SIZE, sampler=val_sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()
    best = 0.0
    for epoch in range(EPOCHS):
        model.train()
        for number, (points, labels) in enumerate(train_loader):
            loss = loss_of(model(points), labels) / ACCUMULATE
            loss.backward()
            if (number + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad()
        accuracy = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), "best.pt")


if __name__ == "__main__":
    main()
