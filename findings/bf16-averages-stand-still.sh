#!/usr/bin/env bash
# torch's average of the weights (EMA) of a bfloat16 model never moves.
#
# - AveragedModel keeps the average in the type of the weights, and each update adds (1 - decay)
#   times the difference. Between 1 and 2, bfloat16 has steps of 1/128; what is less than half of
#   one is lost in rounding, at each update anew. With a decay of 0.999 that is every difference
#   below 3.9. The average stays at the initial weights, with no message.
# - Weights that go from 1 to 2 and stay there for 10,000 updates leave the average at 1. In float32
#   it is then 1.9999.
# - A copy in float32, AveragedModel(copy.deepcopy(model).float(), avg_fn=get_ema_avg_fn(…)), goes to
#   1.9989, as 0.001 of a weight is still rounded. get_ema_multi_avg_fn(…) refuses two types.
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
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

DECAY, UPDATES = 0.999, 10_000


class Layer(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000, dtype=dtype))


def average(model, averaged):
    """The average, after the weights went from 1 to 2 and stayed there."""
    with torch.no_grad():
        model.weight.fill_(1)
        averaged.update_parameters(model)  # the first update copies the weights
        model.weight.fill_(2)
    for _ in range(UPDATES):
        averaged.update_parameters(model)
    return round(averaged.module.weight[0].item(), 4)


multi = {"multi_avg_fn": get_ema_multi_avg_fn(DECAY)}
brief, full = Layer(torch.bfloat16), Layer(torch.float32)
seen = {
    "bfloat16": average(brief, AveragedModel(brief, **multi)),
    "bfloat16, average in float32": average(
        brief, AveragedModel(copy.deepcopy(brief).float(), avg_fn=get_ema_avg_fn(DECAY))
    ),
    "float32": average(full, AveragedModel(full, **multi)),
}
print(seen)
assert seen == {"bfloat16": 1.0, "bfloat16, average in float32": 1.9989, "float32": 1.9999}
try:
    mixed = AveragedModel(copy.deepcopy(brief).float(), **multi)
    mixed.update_parameters(brief)
    mixed.update_parameters(brief)
except RuntimeError as error:
    print("multi_avg_fn:", error)
else:
    raise SystemExit("two types are taken")
PYTHON
