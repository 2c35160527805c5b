#!/usr/bin/env bash
# WebDataset shuffles its shards in the same order in every epoch.
#
# `shardshuffle=100` draws an order when an epoch begins, from a generator that is made anew with
# the same seed each time; without a seed, one is drawn when the dataset is made. So all epochs of
# a run have the same order. detshuffle=True counts epochs to draw another order in each, but
# counts in the copy of the dataset that a loader worker holds: a DataLoader that starts its workers
# anew in each epoch begins with epoch 0 each time. With detshuffle=True and persistent_workers=True
# (or no workers) the orders differ.
#
# Seen: webdataset 1.0.2, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 webdataset==1.0.2
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import webdataset
from torch.utils.data import DataLoader
from webdataset import TarWriter, WebDataset

urls = [f"{shard}.tar" for shard in range(6)]
for shard, url in enumerate(urls):
    with TarWriter(url) as writer:
        writer.write({"__key__": str(shard), "cls": shard})


def orders(seed, detshuffle, workers, persistent=False):
    dataset = WebDataset(urls, shardshuffle=100, detshuffle=detshuffle, seed=seed)
    loader = DataLoader(dataset, None, num_workers=workers, persistent_workers=persistent)
    return [[int(sample["cls"]) for sample in loader] for _ in range(3)]


print("webdataset", webdataset.__version__, "torch", torch.__version__)
for seed, detshuffle, workers, persistent, alike in (
    (0, False, 0, False, True),
    (None, False, 1, False, True),
    (0, True, 1, False, True),
    (0, True, 1, True, False),
    (0, True, 0, False, False),
):
    epochs = orders(seed, detshuffle, workers, persistent)
    same = epochs[0] == epochs[1] == epochs[2]
    print(f"{seed=} {detshuffle=} {workers=} {persistent=}: same order in 3 epochs: {same}")
    assert same == alike, epochs
PYTHON
# webdataset 1.0.2 torch 2.13.0+cpu
# seed=0 detshuffle=False workers=0 persistent=False: same order in 3 epochs: True
# seed=None detshuffle=False workers=1 persistent=False: same order in 3 epochs: True
# seed=0 detshuffle=True workers=1 persistent=False: same order in 3 epochs: True
# seed=0 detshuffle=True workers=1 persistent=True: same order in 3 epochs: False
# seed=0 detshuffle=True workers=0 persistent=False: same order in 3 epochs: False
