#!/usr/bin/env bash
# Streams and loaders that keep their place: what is left out after a resume, and what is refused.
#
# - A stream of datasets begins every later epoch where it was resumed, too, unless `set_epoch` is
#   called before each epoch. Nothing says so; the epochs are only shorter.
# - What its shuffle buffer holds is not in its state, so half of a buffer of 8 is not read here. A
#   line in the log says that the buffer is filled anew.
# - A StatefulDataLoader does not take its state with another number of workers: an AssertionError,
#   without a message between two numbers of workers.
# - WebDataset with resampled=True draws shards with replacement, from the clock and the process
#   number, too: one epoch has some samples several times and others not at all, two starts with one
#   seed differ, and each worker counts an epoch of its own, so that two make it twice as long.
#
# Seen: datasets 5.2.0, torchdata 0.11.0, webdataset 1.0.2, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 webdataset==1.0.2
"$folder/venv/bin/pip" install --quiet --no-deps torchdata==0.11.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - 2>/dev/null <<'PYTHON'
import datasets
import torch
import torchdata
import webdataset
from datasets import Dataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from webdataset import TarWriter, WebDataset


def stream(buffer):
    samples = Dataset.from_dict({"id": range(24)}).to_iterable_dataset(num_shards=4)
    return samples.shuffle(seed=0, buffer_size=buffer) if buffer else samples


def resumed_stream(buffer, calls_set_epoch):
    """Return the samples before a checkpoint, and those of three epochs after it."""
    samples, before = stream(buffer), []
    samples.set_epoch(0)
    for sample in samples:
        before.append(sample["id"])
        if len(before) == 10:
            break
    resumed = stream(buffer)
    resumed.load_state_dict(samples.state_dict())
    after = []
    for epoch in range(3):
        if calls_set_epoch:
            resumed.set_epoch(epoch)
        after.append([sample["id"] for sample in resumed])
    return before, after


def resumed_loader(saved, restored):
    """Return the error of a state that was saved with some workers and is restored with others."""
    loader = StatefulDataLoader(range(24), 2, num_workers=saved)
    for batch, _ in enumerate(loader):
        if batch == 4:
            break
    again = StatefulDataLoader(range(24), 2, num_workers=restored)
    again.load_state_dict(loader.state_dict())
    try:
        return "the rest" if sum(len(batch) for batch in again) == 14 else "others"
    except AssertionError as error:
        return f"AssertionError: {str(error) or 'no message'}"


def resampled(workers):
    samples = WebDataset(urls, resampled=True, shardshuffle=False, seed=0).with_epoch(24)
    return [int(sample["cls"]) for sample in DataLoader(samples, None, num_workers=workers)]


print("datasets", datasets.__version__, "torchdata", torchdata.__version__, end=" ")
print("webdataset", webdataset.__version__, "torch", torch.__version__)
for buffer, calls, expected in (
    (0, False, [14, 14, 14]),
    (0, True, [14, 24, 24]),
    (8, False, [10, 10, 10]),
    (8, True, [10, 24, 24]),
):
    before, after = resumed_stream(buffer, calls)
    lengths, never = [len(epoch) for epoch in after], 24 - len({*before, *after[0]})
    call = "set_epoch" if calls else "no set_epoch"
    print(f"stream of 24, resumed after 10, buffer {buffer}, {call}: ", end="")
    print(f"epochs of {lengths}, {never} samples of the first never")
    assert lengths == expected and never == (4 if buffer else 0)
for saved, restored in ((2, 2), (2, 3), (2, 0), (0, 2)):
    said = resumed_loader(saved, restored)
    print(f"StatefulDataLoader, {saved} workers, restored with {restored}: {said}")
    assert (said == "the rest") == (saved == restored)
urls = [f"{shard}.tar" for shard in range(12)]
for shard, url in enumerate(urls):
    with TarWriter(url) as writer:
        for number in (2 * shard, 2 * shard + 1):
            writer.write({"__key__": str(number), "cls": number})
for workers in (0, 2):
    starts = [resampled(workers) for _ in range(9)]
    assert {len(start) for start in starts} == {48 if workers else 24} and starts[0] != starts[1]
    distinct = sorted(len({*start}) for start in starts)[4]
    print(f"WebDataset, resampled, epoch of 24, {workers} workers: {len(starts[0])} ", end="")
    print(f"samples, {distinct} different ones (median of 9 starts, which differ)")
PYTHON
# datasets 5.2.0 torchdata 0.11.0+cpu webdataset 1.0.2 torch 2.13.0+cpu
# stream of 24, resumed after 10, buffer 0, no set_epoch: epochs of [14, 14, 14], 0 samples of the first never
# stream of 24, resumed after 10, buffer 0, set_epoch: epochs of [14, 24, 24], 0 samples of the first never
# stream of 24, resumed after 10, buffer 8, no set_epoch: epochs of [10, 10, 10], 4 samples of the first never
# stream of 24, resumed after 10, buffer 8, set_epoch: epochs of [10, 24, 24], 4 samples of the first never
# StatefulDataLoader, 2 workers, restored with 2: the rest
# StatefulDataLoader, 2 workers, restored with 3: AssertionError: no message
# StatefulDataLoader, 2 workers, restored with 0: AssertionError: State doesn't contain key '_num_yielded' expected for single process dataloader
# StatefulDataLoader, 0 workers, restored with 2: AssertionError: State doesn't contain key '_snapshot' expected for multiprocess dataloader
# WebDataset, resampled, epoch of 24, 0 workers: 24 samples, 16 different ones (median of 9 starts, which differ)
# WebDataset, resampled, epoch of 24, 2 workers: 48 samples, 22 different ones (median of 9 starts, which differ)
