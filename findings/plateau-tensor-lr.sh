#!/usr/bin/env bash
# ReduceLROnPlateau cuts a learning rate that is a tensor once per parameter group.
#
# Optimizers take `lr` as a tensor, so that a compiled or captured step need not be built again when
# the rate changes. Groups without a rate of their own all get the same tensor object, and schedules
# write new rates into it. ReduceLROnPlateau reads, multiplies and writes group by group: with two
# groups, as weights with and without decay, a factor of 0.5 becomes 0.25, with three 0.125.
# StepLR, CosineAnnealingLR and others compute all rates before they write, and are right.
# With a tensor of its own in each group, the rate is right, too.
#
# Seen: torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR


def rates(schedule, lr, own=False):
    """Return the rate after each of three steps in which the loss does not fall."""
    layer = nn.Linear(2, 2)
    groups = [{"params": [layer.weight]}, {"params": [layer.bias], "weight_decay": 0.0}]
    if own:
        groups = [group | {"lr": torch.tensor(lr)} for group in groups]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(lr) if own else lr, foreach=False)
    if schedule == "StepLR":
        scheduler = StepLR(optimizer, 1, 0.5)
    else:
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    seen = []
    for _ in range(3):
        optimizer.step()
        scheduler.step(1.0) if schedule != "StepLR" else scheduler.step()
        seen.append(round(float(optimizer.param_groups[0]["lr"]), 5))
    return seen


print("torch", torch.__version__)
right, cut_twice = [0.8, 0.4, 0.2], [0.8, 0.2, 0.05]
for name, got, expected in (
    ("a number", rates("plateau", 0.8), right),
    ("one tensor for both groups", rates("plateau", torch.tensor(0.8)), cut_twice),
    ("a tensor in each group", rates("plateau", 0.8, own=True), right),
    ("one tensor, StepLR", rates("StepLR", torch.tensor(0.8)), [0.4, 0.2, 0.1]),
):
    print(f"{name}: {got}")
    assert got == expected, got
PYTHON
# torch 2.13.0+cpu
# a number: [0.8, 0.4, 0.2]
# one tensor for both groups: [0.8, 0.2, 0.05]
# a tensor in each group: [0.8, 0.4, 0.2]
# one tensor, StepLR: [0.4, 0.2, 0.1]
