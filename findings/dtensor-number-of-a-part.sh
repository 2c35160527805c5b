#!/usr/bin/env bash
# A number that is read from a norm of an FSDP2 weight is this rank's part of it.
#
# Under FSDP2 a weight is a DTensor, and `weight.norm()` is one too, whose ranks still have to be
# added up. As a tensor it is treated as the whole norm. `.item()` and `float()` give the rank's own
# summand: another number on each rank, without an error. `weight.norm() > 0.9` is decided for the
# whole, `weight.norm().item() > 0.9` for the part. So an optimizer that scales its step by
# `norm.item()`, as many layer-wise ones do, takes other steps on each rank, and logged norms are
# too small. `norm.full_tensor().item()` is the whole number.
#
# Seen: torch 2.13.0 (CPU, Gloo, two ranks).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/norm.py" <<'PYTHON'
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


@torch.no_grad()
def rank_of(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 4)
    whole = layer.weight.norm().item()
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    norm = layer.weight.norm()
    read, as_tensor, added_up = norm.item(), bool(norm > 0.9), norm.full_tensor().item()
    for turn in range(2):
        dist.barrier()
        if turn == rank:
            print(f"rank {rank}: whole {whole:.4f}, item() {read:.4f}, ", end="")
            print(f"full_tensor() {added_up:.4f}; above 0.9: {as_tensor}, {read > 0.9}", flush=True)
    assert abs(added_up - whole) < 1e-6 and as_tensor and read < 0.9
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_of, (port,), nprocs=2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/norm.py"
# torch 2.13.0+cpu
# rank 0: whole 1.0548, item() 0.6537, full_tensor() 1.0548; above 0.9: True, False
# rank 1: whole 1.0548, item() 0.8278, full_tensor() 1.0548; above 0.9: True, False
