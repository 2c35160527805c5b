#!/usr/bin/env bash
# A torch.distributed.checkpoint whose save failed loads without an error, as a mixture of two steps.
#
# `dcp.save` to a folder that holds a checkpoint writes its files under the same names, one per rank,
# and leaves the old `.metadata` until all ranks are done. If a rank cannot write (a full disk, a
# kill), the save fails on all ranks, and the folder has the new file of one rank, the old file of
# another, and an index that fits both, since layers and sizes are the same. `dcp.load` reads it
# without a word: some rows of each weight are those of one step, other rows those of another.
# This holds for each "last" checkpoint with one name. A folder per step that becomes the last one
# after the save is right: without `.metadata` a half checkpoint does not load.
#
# Seen: torch 2.13.0 (CPU, Gloo, two ranks). The full disk is played: rank 1's file cannot be opened.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/save.py" <<'PYTHON'
import errno
import os
import socket
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def no_space(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def state_at(step):
    """Return the state of a model of two rows, one per rank, whose weights are the step's number."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.constant_(model.weight, step)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model.state_dict()


def rank_of(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    dcp.save(state_at(100), checkpoint_id="last")
    said = "saved"
    with mock.patch.object(FileSystem, "create_stream", no_space if rank else FileSystem.create_stream):
        try:
            dcp.save(state_at(200), checkpoint_id="last")
        except dcp.api.CheckpointException as error:
            said = type(error).__name__
    loaded = state_at(0)
    dcp.load(loaded, checkpoint_id="last")
    weight = loaded["weight"].full_tensor().flatten().tolist()
    if rank == 0:
        print(f"step 100: saved, step 200: {said}; loaded afterwards: {weight}")
    assert (said, weight) == ("CheckpointException", [200.0, 100.0]), (said, weight)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_of, (port,), nprocs=2)
PYTHON
cd "$folder"
"$folder/venv/bin/python" -W ignore save.py
# torch 2.13.0+cpu
# step 100: saved, step 200: CheckpointException; loaded afterwards: [200.0, 100.0]
