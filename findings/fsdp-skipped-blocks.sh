#!/usr/bin/env bash
# FSDP2 computes with a mixture of two blocks' weights if the ranks skip different blocks.
#
# Stochastic depth and LayerDrop skip blocks at random. Each rank draws for itself, as it does for
# dropout, and under DDP with find_unused_parameters that is right. FSDP2 gathers the weights of a
# block when it is called, and nothing says which block a gather is for: rank 0 brings its part of
# block 2, rank 1 its part of block 1, and both compute with a matrix that no block has. The
# backward adds gradients of different blocks in the same way. Blocks of a transformer have equal
# shapes, so where the ranks skip the same number of blocks no size differs, and nothing is raised.
# Draw the skipped blocks from a generator with the same seed on all ranks, or call all blocks.
#
# Seen: torch 2.13.0 (CPU, Gloo, two ranks).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/skip.py" <<'PYTHON'
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, skipped):
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + torch.tanh(block(x))
        return x


def rank_of(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for skipped in ((1, 1), (1, 2)):  # the block that rank 0 skips, the one that rank 1 skips
        plain, sharded = Blocks(), Blocks()
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        x = torch.ones(2, 4)
        out = sharded(x, skipped[rank])
        off = (out - plain(x, skipped[rank])).abs().max().item()
        out.square().mean().backward()
        if rank == 0:
            print(f"rank 0 skips block {skipped[0]}, rank 1 block {skipped[1]}: ", end="")
            print(f"outputs are off by {off:.4f}", flush=True)
        assert (off < 1e-6) == (skipped == (1, 1)), off
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_of, (port,), nprocs=2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/skip.py"
# torch 2.13.0+cpu
# rank 0 skips block 1, rank 1 block 1: outputs are off by 0.0000
# rank 0 skips block 1, rank 1 block 2: outputs are off by 0.9105
