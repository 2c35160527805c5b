"""Your own training loop on samestep's process group: alone, under torchrun, srun or mpirun."""

import torch
from torch import nn

import samestep


def main() -> None:
    rank, _local_rank, world_size = samestep.setup_distributed(device="cpu")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    x = torch.randn(64, 4)
    y = x.sum(dim=1, keepdim=True)
    mine = slice(rank * 64 // world_size, (rank + 1) * 64 // world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _step in range(50):
        optimizer.zero_grad()
        loss = (model(x[mine]) - y[mine]).square().mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = samestep.reduce_tensor(parameter.grad, "mean")
        optimizer.step()
    shown = samestep.reduce_tensor(loss.detach(), "mean")
    if samestep.is_main_process():
        print(f"{world_size} ranks, loss {shown:.6f}")
    samestep.cleanup()


if __name__ == "__main__":
    main()
