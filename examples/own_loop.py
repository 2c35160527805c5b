"""Your own training loop: the same training alone, under torchrun, srun or mpirun, and resumed.

tests/examples/plain_loop.py is the same loop on one device, without samestep.
"""

import sys

import torch
from torch import nn

import samestep

SAMPLES = 1000


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else None
    with samestep.open_run(path, seed=0, resume=True) as run:
        x = torch.randn(SAMPLES, 8)
        y = x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1)
        model = run.place(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        for epoch in run.epochs(5, state=state):
            for batch in run.batches((x, y), 64):
                inputs, targets = batch.data
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                run.backward(loss, model)
                optimizer.step()
                run.log(loss=loss)
            schedule.step()
            print(f"epoch {epoch + 1}  loss {run.means['loss']:.6f}")


if __name__ == "__main__":
    main()
