#!/usr/bin/env bash
# torchmetrics decides in each update by itself whether predictions are logits, so a metric of
# logits depends on how the samples are cut into batches, and onto ranks.
#
# - A classification metric applies its sigmoid or softmax if any prediction of the update lies
#   outside [0, 1]. A batch of logits that all happen to lie within is taken for probabilities.
# - The logits 0.9, 0.1, 2 and 3 put the labels 0, 0, 1 and 1 in perfect order: in one update the
#   AUROC is 1. In two updates, 0.9 and 0.1 stay as they are, while 2 becomes 0.88, and the AUROC is
#   0.75. The accuracy goes from 0.5 to 0.75: 0.1 is below the threshold of 0.5, and its sigmoid,
#   0.52, is not.
# - Calling sigmoid before the update makes both the same.
#
# Seen: torchmetrics 1.9.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 torchmetrics==1.9.0
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

logits = torch.tensor([0.9, 0.1, 2.0, 3.0])
labels = torch.tensor([0, 0, 1, 1])


def measure(metric, predictions, batch):
    for at in range(0, len(labels), batch):
        metric.update(predictions[at : at + batch], labels[at : at + batch])
    return round(metric.compute().item(), 4)


seen = {}
for what, predictions in (("logits", logits), ("probabilities", logits.sigmoid())):
    for batch in (4, 2):
        seen[what, batch] = [measure(m(), predictions, batch) for m in (BinaryAUROC, BinaryAccuracy)]
        print(f"{what:14} batches of {batch}: AUROC, accuracy {seen[what, batch]}")

assert seen["probabilities", 4] == seen["probabilities", 2] == seen["logits", 4]
assert seen["logits", 4] == [1.0, 0.5]
assert seen["logits", 2] == [0.75, 0.75]
PYTHON
