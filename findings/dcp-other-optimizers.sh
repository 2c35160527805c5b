#!/usr/bin/env bash
# torch.distributed.checkpoint and optimizers that are not PyTorch's: those of pytorch_optimizer.
#
# 120 of its 128 optimizers take their parameters, and go on to the last bit from their own
# `state_dict`, saved after 4 steps and loaded into a new optimizer. Through
# `get_optimizer_state_dict` and `set_optimizer_state_dict`, which fill in a new optimizer's state by
# a step with a rate of 0 and gradients of 0, and know state by its parameter alone:
#
# - 104 go on to the last bit;
# - 5 go on with other weights, and nothing is said: Ranger21 and SRMM, which count in their groups;
#   StableSPAM, whose count is beside both in its `state_dict`; FTRL, which divides by the rate, with
#   NaN; Nero, by a rounding;
# - 11 raise an error: KeyError for state under a name of its own (MADGRAD, SPAM) and for others,
#   ZeroDivisionError where the rate is a divisor (Gravity, ASGD), RuntimeError.
#
# Seen: torch 2.13.0 (CPU), pytorch_optimizer 4.1.0, one process, an MLP with a LayerNorm.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/pip" install --quiet --no-deps pytorch_optimizer==4.1.0
cat >"$folder/resume.py" <<'PYTHON'
import copy
import random

import numpy as np
import pytorch_optimizer
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

INPUTS = torch.randn(8, 12, 8, generator=torch.Generator().manual_seed(1))
MUONS = ("adago", "adamuon", "muon", "muonclip", "normuon")


def made(name):
    torch.manual_seed(0)
    norm = nn.LayerNorm(16)
    layers = (nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 16, bias=False), nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    kind, weights = pytorch_optimizer.load_optimizer(name), [*model.parameters()]
    if name in MUONS:
        weights = [
            {"params": [p for p in weights if (p.ndim == 2) is use], "use_muon": use}
            for use in (True, False)
        ]
    if name == "adammini":
        return model, kind(model, lr=1e-3)
    if name == "ranger21":
        return model, kind(weights, num_iterations=16, lr=1e-3)
    try:
        return model, kind(weights, lr=1e-3)
    except TypeError:
        return model, kind(weights)


def take(steps, name, model, optimizer):
    for step in steps:
        torch.manual_seed(step)
        random.seed(step)
        np.random.seed(step)
        model.zero_grad()
        outputs = model(INPUTS[step])
        loss = nn.functional.cross_entropy(outputs, (INPUTS[step, :, 0] > 0).long())
        loss.backward(create_graph=name in ("adahessian", "sophiah"))
        optimizer.step()


def by_itself(before, optimizer, after, new):
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def by_dcp(before, optimizer, after, new):
    set_optimizer_state_dict(after, new, copy.deepcopy(get_optimizer_state_dict(before, optimizer)))


def resumed(name, load):
    """Return how far the weights are from those of 8 steps in a row, after 4 and 4."""
    whole, optimizer = made(name)
    take(range(8), name, whole, optimizer)
    before, optimizer = made(name)
    take(range(4), name, before, optimizer)
    after, new = made(name)
    after.load_state_dict(before.state_dict())
    load(before, optimizer, after, new)
    take(range(4, 8), name, after, new)
    pairs = zip(whole.parameters(), after.parameters())
    return max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)


torch.set_num_threads(1)
print("torch", torch.__version__)
same, apart, errors = [], {}, {}
for name in pytorch_optimizer.get_supported_optimizers():
    try:
        alone = resumed(name, by_itself)
    except Exception:  # it takes more than parameters
        continue
    assert alone == 0, name
    try:
        far = resumed(name, by_dcp)
    except Exception as error:
        errors[name] = type(error).__name__
        continue
    if far == 0:
        same.append(name)
    else:
        apart[name] = far
print(f"{len(same)} go on to the last bit")
print("other weights, relative:", {name: f"{far:.1g}" for name, far in sorted(apart.items())})
print("errors:", dict(sorted(errors.items())))
assert len(same) == 104
assert sorted(apart) == ["ftrl", "nero", "ranger21", "srmm", "stablespam"]
assert len(errors) == 11
PYTHON
cd "$folder"
"$folder/venv/bin/python" -W ignore resume.py
