#!/usr/bin/env bash
# Batches that do not divide evenly: Accelerate repeats or drops them, PyG's sampler repeats graphs.
#
# - By default (even_batches=True) `prepare` gives every rank as many full batches: it repeats the
#   first samples of the epoch, up to a whole batch per rank.
# - It takes batches of any size as they come if the batch sampler has no `batch_size`. If it has
#   one, as a sampler that groups by length may, a round of batches is dropped if its last batch is
#   smaller than that, also in the middle of the epoch. No warning says so.
# - DynamicBatchSampler(skip_too_big=True) of PyTorch Geometric takes the number of graphs given so
#   far for its place in the order, and so goes back one graph for each that it has skipped.
#
# Seen: accelerate 1.15.0, torch-geometric 2.8.1, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
"$folder/venv/bin/pip" install --quiet torch-geometric==2.8.1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from collections import Counter

import accelerate
import torch
import torch_geometric
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import DynamicBatchSampler


def given(ranks, loader, **options):
    """Return how often each sample is given to a rank, and the number of batches of each rank."""
    options |= {"num_processes": ranks, "put_on_device": False}
    shares = [[*prepare_data_loader(loader(), process_index=n, **options)] for n in range(ranks)]
    samples = Counter(n for share in shares for batch in share for n in batch.tolist())
    return samples, [len(share) for share in shares]


class ByLength:
    """Batches of at most 4 samples of one length: 10 of one, 9 of another, 13 of a third."""

    def __iter__(self):
        for first, last in ((0, 10), (10, 19), (19, 32)):
            for start in range(first, last, 4):
                yield [*range(start, min(start + 4, last))]

    def __len__(self):
        return 10


class Named(ByLength):
    batch_size, drop_last = 4, False


print("accelerate", accelerate.__version__, "torch-geometric", torch_geometric.__version__)
print("torch", torch.__version__)
for number, ranks, even, repeated, batches in (
    (13, 2, True, 3, [2, 2]),
    (13, 3, True, 11, [2, 2, 2]),
    (13, 3, False, 0, [2, 1, 1]),
    (1000, 3, True, 8, [84, 84, 84]),
):
    samples, counts = given(ranks, lambda: DataLoader(range(number), 4), even_batches=even)
    more = samples.total() - len(samples)
    print(f"{number} samples by 4, {ranks} ranks, even_batches={even}: ", end="")
    print(f"batches {counts}, {more} samples repeated")
    assert (more, counts, len(samples)) == (repeated, batches, number)
for kind, never in ((ByLength, 0), (Named, 5)):
    samples, counts = given(2, lambda: DataLoader(range(32), batch_sampler=kind()))
    size = getattr(kind, "batch_size", None)
    print(f"by length, the sampler's batch_size is {size}: batches {counts}, ", end="")
    print(f"{32 - len(samples)} of 32 samples dropped")
    assert 32 - len(samples) == never

sizes = torch.randint(5, 60, (200,), generator=torch.Generator().manual_seed(0)).tolist()
graphs = [Data(x=torch.zeros(size, 1)) for size in sizes]
for skip in (False, True):
    sampler = DynamicBatchSampler(graphs, 50, shuffle=True, skip_too_big=skip)
    torch.manual_seed(0)
    counts = Counter(n for batch in sampler.__iter__() for n in batch)
    fit = sum(size <= 50 for size in sizes) if skip else 200
    again = counts.total() - len(counts)
    print(f"DynamicBatchSampler, skip_too_big={skip}: {fit} graphs fit, ", end="")
    print(f"{counts.total()} are given, {again} of these again")
    assert len(counts) == fit and again == (29 if skip else 0)
PYTHON
# accelerate 1.15.0 torch-geometric 2.8.1
# torch 2.13.0+cpu
# 13 samples by 4, 2 ranks, even_batches=True: batches [2, 2], 3 samples repeated
# 13 samples by 4, 3 ranks, even_batches=True: batches [2, 2, 2], 11 samples repeated
# 13 samples by 4, 3 ranks, even_batches=False: batches [2, 1, 1], 0 samples repeated
# 1000 samples by 4, 3 ranks, even_batches=True: batches [84, 84, 84], 8 samples repeated
# by length, the sampler's batch_size is None: batches [5, 5], 0 of 32 samples dropped
# by length, the sampler's batch_size is 4: batches [4, 4], 5 of 32 samples dropped
# DynamicBatchSampler, skip_too_big=False: 200 graphs fit, 200 are given, 0 of these again
# DynamicBatchSampler, skip_too_big=True: 170 graphs fit, 199 are given, 29 of these again
