#!/usr/bin/env bash
# persistent_workers=True changes the order of the samples from the second epoch on.
#
# It is advised for speed only: workers live on between epochs. But a DataLoader that starts its
# workers anew also draws a base seed for them in each epoch, from the loader's generator if it has
# one. The RandomSampler that shuffle=True makes draws its seeds from the same generator. Without
# the draws in between, the same generator with the same seed shuffles the second epoch otherwise:
# a comparison "with and without persistent workers" trains on other orders, and a run that is
# resumed with the other setting reads other samples. A sampler with a generator of its own, or
# one with set_epoch, keeps its order.
#
# Seen: torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from torch.utils.data import DataLoader, RandomSampler


def orders(persistent, own_sampler):
    generator, samples = torch.Generator().manual_seed(0), list(range(8))
    sampler = RandomSampler(samples, generator=torch.Generator().manual_seed(1))
    how = {"sampler": sampler} if own_sampler else {"shuffle": True}
    loader = DataLoader(
        samples, 8, num_workers=1, persistent_workers=persistent, generator=generator, **how
    )
    return [batch.tolist() for _ in range(3) for batch in loader]


print("torch", torch.__version__)
for own_sampler in (False, True):
    same = [a == b for a, b in zip(orders(True, own_sampler), orders(False, own_sampler))]
    what = "a sampler with its own generator" if own_sampler else "shuffle=True, generator=…"
    print(f"{what}: epochs with the same order: {same}")
    assert same == [True, own_sampler, own_sampler]
PYTHON
# torch 2.13.0+cpu
# shuffle=True, generator=…: epochs with the same order: [True, False, False]
# a sampler with its own generator: epochs with the same order: [True, True, True]
