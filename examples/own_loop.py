"""Your own training loop on samestep's process group: alone, under torchrun, srun or mpirun."""

import torch
from torch import nn

import samestep

SAMPLES = 64


def main() -> None:
    rank, _local_rank, world_size = samestep.setup_distributed(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(SAMPLES, 4)
    y = x.sum(dim=1, keepdim=True) + torch.randn(SAMPLES, 1)
    mine = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(50):
        optimizer.zero_grad()
        # Ranks may have unequal shares: add up sums over all of them, then divide once.
        loss_sum = (model(x[mine]) - y[mine]).square().sum()
        loss_sum.backward()
        for parameter in model.parameters():
            parameter.grad = samestep.reduce_tensor(parameter.grad, "sum") / SAMPLES
        optimizer.step()
    loss = samestep.reduce_tensor(loss_sum.detach(), "sum") / SAMPLES
    if samestep.is_main_process():
        print(f"{world_size} ranks, loss {loss:.6f}")
    samestep.cleanup()


if __name__ == "__main__":
    main()
