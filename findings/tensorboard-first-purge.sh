#!/usr/bin/env bash
# TensorBoard's Python reader ignores the first `purge_step` of a resumed run.
#
# A resumed training opens its event files with SummaryWriter(folder, purge_step=n), so that what the
# killed run wrote from step n on disappears. The mark of a restart is a START event. TensorBoard's
# server with --load_fast=false, and where its data server is not to be had, takes the first START
# for the first start of the run: but PyTorch writes one only with purge_step. So the first resume
# purges nothing and the curve goes back, a second resume is purged. EventAccumulator, which
# scripts read event files with, purges each time.
# A SummaryWriter with purge_step=0 at the first start has every reader agree.
#
# Seen: tensorboard 2.21.0, torch 2.13.0 (CPU).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 tensorboard==2.21.0 "setuptools<81"
cd "$folder"
"$folder/venv/bin/python" -W ignore - 2>/dev/null <<'PYTHON'
import time

import tensorboard
import torch
from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
from torch.utils.tensorboard import SummaryWriter


def write(folder, starts):
    """Write a run: per start, the step to purge from, and the steps that follow."""
    for purge_step, steps in starts:
        writer = SummaryWriter(folder, purge_step=purge_step)
        for step in steps:
            writer.add_scalar("loss", 0.0, step)
        writer.close()
        time.sleep(1.1)  # the files' names, which give their order, have whole seconds


def steps(folder):
    """Return the steps that the server's Python reader shows, and those of EventAccumulator."""
    server = plugin_event_accumulator.EventAccumulator(folder)
    script = event_accumulator.EventAccumulator(folder)
    server.Reload(), script.Reload()
    return (
        [event.step for event in server.Tensors("loss")],
        [event.step for event in script.Scalars("loss")],
    )


print("tensorboard", tensorboard.__version__, "torch", torch.__version__)
once, again = [(None, range(4)), (2, range(2, 5))], [(3, range(3, 6))]
for name, starts, expected in (
    ("one resume", once, [0, 1, 2, 3, 2, 3, 4]),
    ("two resumes", once + again, [0, 1, 2, 2, 3, 4, 5]),
    ("purge_step=0 at first", [(0, range(4)), *once[1:]], [0, 1, 2, 3, 4]),
):
    write(name, starts)
    server, script = steps(name)
    print(f"{name}: the server's reader: {server}, EventAccumulator: {script}")
    assert server == expected and script == sorted(set(script)), (server, script)
PYTHON
# tensorboard 2.21.0 torch 2.13.0+cpu
# one resume: the server's reader: [0, 1, 2, 3, 2, 3, 4], EventAccumulator: [0, 1, 2, 3, 4]
# two resumes: the server's reader: [0, 1, 2, 2, 3, 4, 5], EventAccumulator: [0, 1, 2, 3, 4, 5]
# purge_step=0 at first: the server's reader: [0, 1, 2, 3, 4], EventAccumulator: [0, 1, 2, 3, 4]
