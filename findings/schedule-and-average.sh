#!/usr/bin/env bash
# A schedule that is built after the optimizer was loaded, and averages of buffers.
#
# - A scheduler sets the optimizer's rate to that of its first step when it is built. Built after
#   `optimizer.load_state_dict`, it overwrites the loaded rate, and its own `load_state_dict` does
#   not put it back. Those that compute the next rate from the last one keep the mistake to the end.
#   Build model, optimizer and scheduler first, then load all three.
# - AveragedModel(use_buffers=True), meant for BatchNorm's statistics, averages every buffer. A mask
#   of -inf becomes NaN, since (-inf) - (-inf) is. An integer, such as num_batches_tracked, stays as
#   it was after the first update. A mask of booleans is an error.
#
# Seen: torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import copy

import torch
from torch import nn
from torch.optim import lr_scheduler as of
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SCHEDULES = {  # what it is, and of ten steps after a resume how many have a wrong rate
    "StepLR": (lambda o: of.StepLR(o, 3, 0.5), 0),
    "ExponentialLR": (lambda o: of.ExponentialLR(o, 0.9), 0),
    "CosineAnnealingLR": (lambda o: of.CosineAnnealingLR(o, 20), 0),
    "LambdaLR": (lambda o: of.LambdaLR(o, lambda step: 1 / (1 + step)), 1),
    "OneCycleLR": (lambda o: of.OneCycleLR(o, 1.0, total_steps=20), 1),
    "CosineAnnealingWarmRestarts": (lambda o: of.CosineAnnealingWarmRestarts(o, 5), 1),
    "LinearLR, a warm-up": (lambda o: of.LinearLR(o, 0.1, total_iters=4), 10),
    "SequentialLR, a warm-up and cosine": (
        lambda o: of.SequentialLR(
            o, [of.LinearLR(o, 0.1, total_iters=4), of.CosineAnnealingLR(o, 16)], [4]
        ),
        10,
    ),
}


def new():
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)


def rates(optimizer, scheduler, steps):
    taken = []
    for _ in range(steps):
        taken.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return taken


def after_resume(make, built_first):
    """Return the rates of ten steps after a resume at step 6, and what they should be."""
    optimizer = new()
    scheduler = make(optimizer)
    rates(optimizer, scheduler, 6)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    right = rates(optimizer, scheduler, 10)
    optimizer = new()
    if built_first:
        scheduler = make(optimizer)
    optimizer.load_state_dict(saved[0])
    if not built_first:
        scheduler = make(optimizer)
    scheduler.load_state_dict(saved[1])
    return rates(optimizer, scheduler, 10), right


print("torch", torch.__version__)
for name, (make, expected) in SCHEDULES.items():
    got, right = after_resume(make, built_first=True)
    assert got == right, name
    got, right = after_resume(make, built_first=False)
    wrong = [(a, b) for a, b in zip(got, right) if abs(a - b) > 1e-9]
    seen = f": {wrong[0][0]:.3g} instead of {wrong[0][1]:.3g} at first" if wrong else ""
    print(f"{name}: {len(wrong)} of 10 rates are wrong if built late{seen}")
    assert len(wrong) == expected, name


class Causal(nn.Module):
    def __init__(self, booleans=False):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        numbers = torch.zeros(3, 3).masked_fill(mask, -torch.inf)
        self.register_buffer("mask", mask if booleans else numbers)


for use_buffers in (True, False):
    model = Causal()
    average = AveragedModel(model, use_buffers=use_buffers, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(10):
        model.norm(torch.randn(8, 2))
        average.update_parameters(model)
    tracked, row = int(average.module.norm.num_batches_tracked), average.module.mask[0]
    print(f"{use_buffers=}: num_batches_tracked after 10 is {tracked}, a mask's row {row.tolist()}")
    assert (tracked, bool(row.isnan().any())) == ((1, True) if use_buffers else (10, False))
model = Causal(booleans=True)
average = AveragedModel(model, use_buffers=True)
average.update_parameters(model)
try:
    average.update_parameters(model)
    raise AssertionError("no error")
except RuntimeError as error:
    print(f"a mask of booleans: {type(error).__name__} in the second update")
PYTHON
# torch 2.13.0+cpu
# StepLR: 0 of 10 rates are wrong if built late
# ExponentialLR: 0 of 10 rates are wrong if built late
# CosineAnnealingLR: 0 of 10 rates are wrong if built late
# LambdaLR: 1 of 10 rates are wrong if built late: 1 instead of 0.143 at first
# OneCycleLR: 1 of 10 rates are wrong if built late: 0.04 instead of 0.987 at first
# CosineAnnealingWarmRestarts: 1 of 10 rates are wrong if built late: 1 instead of 0.905 at first
# LinearLR, a warm-up: 10 of 10 rates are wrong if built late: 0.1 instead of 1 at first
# SequentialLR, a warm-up and cosine: 10 of 10 rates are wrong if built late: 0.1 instead of 0.962 at first
# use_buffers=True: num_batches_tracked after 10 is 1, a mask's row [0.0, nan, nan]
# use_buffers=False: num_batches_tracked after 10 is 10, a mask's row [0.0, -inf, -inf]
# a mask of booleans: RuntimeError in the second update
