#!/usr/bin/env bash
# Validation by `take` and training by `skip` of a stream of datasets share samples.
#
# The pages of datasets split a stream by `shuffled.take(n)` and `shuffled.skip(n)`. Two settings of
# the loaders decide which samples these are:
# - `set_epoch`, which the pages ask for in each epoch, shuffles anew *below* take and skip. From
#   the second epoch on, the training reads samples of the validation set.
# - Loader workers divide the shards, and n as well: take(6) with two workers is the first three
#   samples of the first shards of each. A training with two workers and a validation with none
#   (or an evaluation later, with other workers) overlap, and some samples are in neither.
# `split_dataset_by_node` divides n among ranks in the same way. Shards chosen by hand, or a split
# by a key of the sample in `filter`, stay the same.
#
# Seen: datasets 5.2.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import datasets
import torch
from datasets import Dataset
from torch.utils.data import DataLoader


def stream():
    return Dataset.from_dict({"id": list(range(40))}).to_iterable_dataset(num_shards=4)


def read(samples, workers=0):
    return {int(sample["id"]) for sample in DataLoader(samples, None, num_workers=workers)}


print("datasets", datasets.__version__, "torch", torch.__version__)
shuffled = stream().shuffle(seed=0, buffer_size=8)
validation, train = shuffled.take(10), shuffled.skip(10)
kept_out = read(validation)  # once, before the training
for epoch in (0, 1):
    train.set_epoch(epoch)
    shared = kept_out & read(train)
    print(f"epoch {epoch}: {len(shared)} of 10 validation samples are trained on")
    assert bool(shared) == (epoch == 1)
for workers in (0, 2):
    validation, train = read(stream().take(6), workers), read(stream().skip(6))
    print(f"take(6) with {workers} workers: {sorted(validation)}; ", end="")
    print(f"also in skip(6) with none: {sorted(validation & train)}")
    assert bool(validation & train) == (workers == 2)
PYTHON
# datasets 5.2.0 torch 2.13.0+cpu
# epoch 0: 0 of 10 validation samples are trained on
# epoch 1: 3 of 10 validation samples are trained on
# take(6) with 0 workers: [0, 1, 2, 3, 4, 5]; also in skip(6) with none: []
# take(6) with 2 workers: [0, 1, 2, 10, 11, 12]; also in skip(6) with none: [10, 11, 12]
