#!/usr/bin/env bash
# Two ways in which PyTorch's own training gives other numbers on more ranks.
#
# - DDP lays its buckets out anew after the first backward. A sum of three ranks depends on where a
#   gradient lies in its bucket, so the first gradient of a process has other bits than the same
#   gradient in the second step. A resume begins with a first step, so it is not bit for bit the run
#   that was not stopped. On two ranks, where a + b is b + a, all bits are equal.
# - torch.optim.Muon under FSDP2 orthogonalises in bfloat16 and adds up what the ranks compute of
#   their rows. That rounds differently from one product, and later steps make the difference
#   larger. AdamW gives the numbers of one process.
#
# Seen: torch 2.13.0 (CPU, Gloo).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/ranks.py" <<'PYTHON'
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def first_gradient(rank, world):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(200, 200) for _ in range(4)))
    model = nn.parallel.DistributedDataParallel(layers)
    samples = torch.randn(16, 200, generator=torch.Generator().manual_seed(rank))
    seen = []
    for _ in range(3):
        model.zero_grad()
        model(samples).square().mean().backward()
        seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    differ = (seen[0] != seen[1]).sum().item()
    largest = ((seen[0] - seen[1]).abs().max() / seen[1].abs().max()).item()
    if rank == 0:
        print(f"DDP, {world} ranks: {differ} of {len(seen[0])} elements of the first ", end="")
        print(f"gradient differ from the second step's, by {largest:.1e}", flush=True)
    assert torch.equal(seen[1], seen[2]) and bool(differ) == (world == 3)


def trained(make, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = make(model.parameters())
    samples = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(20):
        optimizer.zero_grad()
        model(samples).square().mean().backward()
        optimizer.step()
    weights = [p.full_tensor() if sharded else p for p in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in weights])


def rank_of(rank, world, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    first_gradient(rank, world)
    for name in ("Muon", "AdamW") if world == 2 else ():

        def make(parameters):
            return getattr(torch.optim, name)(parameters, lr=0.02)

        off = (trained(make, False) - trained(make, True)).abs().max().item()
        if rank == 0:
            print(f"FSDP2, {name}: weights are off by {off:.1e} after 20 steps", flush=True)
        assert (off > 1e-4) == (name == "Muon")
    dist.barrier()
    os._exit(0)  # Gloo can hang or abort if it is destroyed while a DDP model lives


if __name__ == "__main__":
    print("torch", torch.__version__)
    for world in (2, 3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(rank_of, (world, port), nprocs=world)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/ranks.py"
# torch 2.13.0+cpu
# DDP, 2 ranks: 0 of 160800 elements of the first gradient differ from the second step's, by 0.0e+00
# FSDP2, Muon: weights are off by 3.2e-03 after 20 steps
# FSDP2, AdamW: weights are off by 0.0e+00 after 20 steps
# DDP, 3 ranks: 37306 of 160800 elements of the first gradient differ from the second step's, by 9.1e-08
