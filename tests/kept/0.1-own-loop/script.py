"""The loop that made and continues the kept run `0.1-own-loop`: python own_loop.py RUN EPOCHS."""

import sys

import torch
from torch import nn

import samestep

with samestep.open_run(sys.argv[1], seed=0, resume=True) as run:
    inputs = torch.randn(240, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :1] * inputs[:, 1:2] + inputs[:, 2:3]
    model = run.place(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    for _ in run.epochs(int(sys.argv[2]), state=state):
        for batch in run.batches((inputs, targets), 32):
            x, y = batch.data
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            run.backward(loss, model)
            optimizer.step()
            run.log(loss=loss)
        schedule.step()
