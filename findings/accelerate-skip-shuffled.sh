#!/usr/bin/env bash
# Accelerate's load_state with skip_first_batches trains other samples than the run that was killed.
#
# Its pages resume within an epoch by `load_state` and `skip_first_batches(loader, n)`. With
# shuffle=True and the sampler that `prepare` leaves by default, the order of an epoch is drawn when
# its iteration begins. `load_state` brings back the random numbers of the middle of the epoch; from
# these the resumed epoch draws a new order, and skips the first n batches of that one: some samples
# are trained twice, others not at all. With DataLoaderConfiguration(use_seedable_sampler=True) and
# set_epoch, the order depends on the epoch, and the rest of the epoch is the right one.
#
# Seen: accelerate 1.15.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader


def epoch(seedable, resume):
    """Return the samples of an epoch of 12 batches; saved, or resumed, after 5 of them."""
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable)
    )
    set_seed(0)
    loader = accelerator.prepare(DataLoader(range(96), batch_size=8, shuffle=True))
    loader.set_epoch(0)
    if resume:
        accelerator.load_state(f"state-{seedable}")
        return [batch.tolist() for batch in accelerator.skip_first_batches(loader, 5)]
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 5:
            accelerator.save_state(f"state-{seedable}")
    return batches


print("accelerate", accelerate.__version__, "torch", torch.__version__)
for seedable in (False, True):
    whole, rest = epoch(seedable, False), epoch(seedable, True)
    twice = {n for batch in whole[:5] for n in batch} & {n for batch in rest for n in batch}
    print(f"use_seedable_sampler={seedable}: trained twice: {len(twice)} of 96")
    assert (rest == whole[5:]) == seedable and bool(twice) != seedable
PYTHON
# accelerate 1.15.0 torch 2.13.0+cpu
