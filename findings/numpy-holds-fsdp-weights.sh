#!/usr/bin/env bash
# Looking at a weight through NumPy ends a training with FSDP2 at its next reshard.
#
# `tensor.numpy()` shares the memory, so PyTorch marks the tensor's storage as one that cannot be
# resized, for good, also after the array is gone. FSDP2 frees gathered weights by resizing their
# storage to nothing. With reshard_after_forward=False the gathered weights are the module's
# parameters until the next reshard: whoever hashes, plots or sums one by `weight.numpy()` there
# (a hook, a logger, a check) gets a RuntimeError later, at a place that names neither. A copy
# (`weight.clone().numpy()`) is harmless.
#
# Seen: torch 2.13.0 (CPU, Gloo, two ranks).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/look.py" <<'PYTHON'
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def rank_of(rank, port, how):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=False)
    with torch.no_grad():
        model(torch.ones(1, 4))
    for weight in model.parameters():  # whole now, until the next reshard
        how(weight.detach())
    said = "freed"
    try:
        model.reshard()
    except RuntimeError as error:
        said = str(error)
    if rank == 0:
        print(f"{how.__name__}: {said}", flush=True)
    expected = "freed" if how is copied else "Trying to resize storage that is not resizable"
    assert said == expected, said
    dist.destroy_process_group()


def read(weight):
    return weight.numpy().sum()


def copied(weight):
    return weight.clone().numpy().sum()


if __name__ == "__main__":
    print("torch", torch.__version__)
    for how in (copied, read):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(rank_of, (port, how), nprocs=2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/look.py"
# torch 2.13.0+cpu
# copied: freed
# read: Trying to resize storage that is not resizable
