"""A plain script whose ranks do not meet: HOW and CULPRIT in the environment say how."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

HOW, CULPRIT = os.environ["HOW"], int(os.environ.get("CULPRIT", "1"))


def train(weight, optimizer, steps):
    for step in range(1, steps + 1):
        weight.grad = None
        (weight * 2).sum().backward()
        if step == 30:
            Path(os.environ["HUNG"]).write_text(str(time.time()))
        if step == 30 and HOW == "different" and dist.get_rank() == CULPRIT:
            dist.broadcast(weight.grad, src=0)  # different
        elif step == 30 and HOW == "shapes" and dist.get_rank() == CULPRIT:
            dist.all_gather([torch.ones(7), torch.ones(7)], torch.ones(7))  # shapes
        elif step == 30 and HOW == "shapes":
            dist.all_gather([torch.ones(4), torch.ones(4)], torch.ones(4))
        elif step == 30 and HOW == "sleeps" and dist.get_rank() == CULPRIT:
            time.sleep(3600)  # script_sleeps
        else:
            dist.all_reduce(weight.grad)
        optimizer.step()


dist.init_process_group("gloo")
weight = torch.zeros(3, requires_grad=True)
is_short = HOW == "left" and dist.get_rank() == CULPRIT
train(weight, torch.optim.SGD([weight], lr=0.1), 29 if is_short else 60)
print("trained", flush=True)
if HOW == "left":
    dist.broadcast(weight.detach(), src=0)  # left
dist.destroy_process_group()
