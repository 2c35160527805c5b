#!/usr/bin/env bash
# torch.distributed.checkpoint: of what is not sharded, each tensor is the one of some rank.
#
# - Each rank has BatchNorm's statistics of its own samples. `dcp.save` takes a tensor that several
#   ranks have from the rank with the fewest bytes to write so far, so a mean and its variance can
#   come from different ranks. (DDP sends rank 0's buffers to all before each forward, not after it,
#   so a checkpoint after a step finds different ones.) With the planner
#   `dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)`, all of them come from rank 0.
# - `dcp.load` casts to the type of the tensor that it fills, without a word: float64 to bfloat16,
#   and integers to smaller ones, which wrap around.
# - `get_optimizer_state_dict` of an optimizer without state takes a step with gradients of zero.
#   Adam counts it as the first one (pytorch/pytorch#164929), and SGD with dampening then begins
#   with a momentum of zero.
#
# Seen: torch 2.13.0 (CPU, Gloo, two ranks).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/save.py" <<'PYTHON'
import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict


def rank_of(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    widths = [4] + [8] * 7
    blocks = [nn.Sequential(nn.Linear(n, 8), nn.BatchNorm1d(8), nn.ReLU()) for n in widths]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*blocks))
    own_samples = torch.Generator().manual_seed(rank)
    for _ in range(3):
        model(torch.randn(16, 4, generator=own_samples)).sum().backward()
    state = get_model_state_dict(model)
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, {name: tensor.clone() for name, tensor in state.items()})
    for lowest in (False, True):
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
        dcp.save({"model": state}, checkpoint_id=f"of-{lowest}", planner=planner)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        dcp.load({"model": loaded}, checkpoint_id=f"of-{lowest}")
        origins = [
            tuple(
                next(r for r in (0, 1) if torch.equal(of_ranks[r][name], loaded[name]))
                for name in (f"{block}.1.running_mean", f"{block}.1.running_var")
            )
            for block in range(8)
        ]
        mixed = sum(mean != variance for mean, variance in origins)
        if rank == 0:
            print(f"dedup_save_to_lowest_rank={lowest}: mean and variance of 8 layers are of rank")
            print(f"{origins}; mixed: {mixed}", flush=True)
        assert bool(mixed) != lowest and (not lowest or {*origins} == {(0, 0)})
    dist.barrier()
    os._exit(0)  # Gloo can hang or abort if it is destroyed while a DDP model lives


def trained(make, asks, steps=16):
    """Return the weights after each step; with `asks`, after a look at the optimizer's state."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer, weights = make(model.parameters()), []
    if asks:
        get_optimizer_state_dict(model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)) - 1).square().sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
    return weights


if __name__ == "__main__":
    print("torch", torch.__version__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_of, (port,), nprocs=2)

    dcp.save({"w": torch.tensor(1.001).double(), "n": torch.tensor(300)}, checkpoint_id="types")
    into = {"w": torch.tensor(0.0).bfloat16(), "n": torch.tensor(0, dtype=torch.int8)}
    dcp.load(into, checkpoint_id="types")
    weight, number = into["w"].item(), into["n"].item()
    print(f"1.001 loaded as bfloat16: {weight}, 300 loaded as int8: {number}")
    assert (weight, number) == (1.0, 44)

    for name, make, changes in (
        ("Adam", lambda p: torch.optim.Adam(p, 0.1), True),
        ("AdamW", lambda p: torch.optim.AdamW(p, 0.1), True),
        ("SGD, momentum, dampening", lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5), True),
        ("SGD, momentum", lambda p: torch.optim.SGD(p, 0.1, 0.9), False),
        ("RMSprop", lambda p: torch.optim.RMSprop(p, 0.1), False),
    ):
        plain, asked = trained(make, False), trained(make, True)
        off = [(a - b).abs().max().item() for a, b in zip(plain, asked)]
        print(f"{name}, asked for its state at first: weights are off by ", end="")
        print(f"{off[0]:.4f} after 1 step, {off[15]:.4f} after 16")
        assert (off[15] > 0) == changes
PYTHON
cd "$folder"
"$folder/venv/bin/python" -W ignore save.py
# torch 2.13.0+cpu
# dedup_save_to_lowest_rank=False: mean and variance of 8 layers are of rank
# [(1, 0), (0, 0), (1, 1), (0, 0), (1, 1), (0, 0), (1, 1), (0, 0)]; mixed: 1
# dedup_save_to_lowest_rank=True: mean and variance of 8 layers are of rank
# [(0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)]; mixed: 0
# 1.001 loaded as bfloat16: 1.0, 300 loaded as int8: 44
# Adam, asked for its state at first: weights are off by 0.0256 after 1 step, 0.0398 after 16
# AdamW, asked for its state at first: weights are off by 0.0256 after 1 step, 0.0396 after 16
# SGD, momentum, dampening, asked for its state at first: weights are off by 0.1996 after 1 step, 0.1332 after 16
# SGD, momentum, asked for its state at first: weights are off by 0.0000 after 1 step, 0.0000 after 16
# RMSprop, asked for its state at first: weights are off by 0.0000 after 1 step, 0.0000 after 16
