#!/usr/bin/env bash
# A StatefulDataLoader that is saved after the last batch of an epoch skips the next epoch.
#
# torchdata's loader keeps its place, and a training saves it with its checkpoint. Between the last
# batch and the end of the `for` loop that place is "no batch left in this epoch": a resume that
# counts this epoch as done begins the next one with the loader's first pass, which is empty. A
# checkpoint "every N steps", taken inside the loop, falls on a last batch as soon as N divides the
# steps of an epoch: one epoch in the log trained nothing, and no error is raised. Saved after the
# loop, the next pass is a whole one.
#
# Seen: torchdata 0.11.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/pip" install --quiet --no-deps torchdata==0.11.0
"$folder/venv/bin/pip" install --quiet requests==2.32.5
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torchdata
from torchdata.stateful_dataloader import StatefulDataLoader


def passes(saved_after_the_loop):
    loader, state = StatefulDataLoader(range(6), batch_size=2), None
    for step, _ in enumerate(loader, 1):
        if step % 3 == 0:  # as a checkpoint every 3 steps
            state = loader.state_dict()
    resumed = StatefulDataLoader(range(6), batch_size=2)
    resumed.load_state_dict(loader.state_dict() if saved_after_the_loop else state)
    return [[batch.tolist() for batch in resumed] for _ in range(2)]


print("torchdata", torchdata.__version__)
whole = [[0, 1], [2, 3], [4, 5]]
for after in (False, True):
    first, second = passes(after)
    when = "after the loop" if after else "after the last batch, in the loop"
    print(f"saved {when}: the resumed loader's passes: {first}, {second}")
    assert (first, second) == (whole if after else [], whole)
PYTHON
# torchdata 0.11.0+cpu
# saved after the last batch, in the loop: the resumed loader's passes: [], [[0, 1], [2, 3], [4, 5]]
# saved after the loop: the resumed loader's passes: [[0, 1], [2, 3], [4, 5]], [[0, 1], [2, 3], [4, 5]]
