#!/usr/bin/env bash
# Once a DDP model has taken a backward, destroy_process_group() leaves Gloo's connections open.
#
# Who regroups after a rank has died calls `destroy_process_group()`, perhaps the group's `abort()`
# before, and expects that the other ranks see it. After a plain all_reduce they do: the connections
# close. After one backward of a DistributedDataParallel model they stay open until the process ends,
# also if the model is deleted and collected first. Ranks whose collective waits for this rank, and
# not for the dead one, are then not told, and wait until their own timeout. Of two or three ranks
# all are neighbours, so it shows with four or more.
#
# Seen: torch 2.13.0 (CPU), Linux.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat > "$folder/sockets.py" <<'PYTHON'
import gc
import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def connections(store_port):
    """Return how many connections to other ranks this process has: not listeners, not the store."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                count += store_port not in (one.getpeername()[1], one.getsockname()[1])
        except (OSError, IndexError):
            pass
    return count


port, what = int(os.environ["MASTER_PORT"]), sys.argv[1]
before = connections(port)
dist.init_process_group("gloo")
rank, joined = dist.get_rank(), connections(port) - before
if what == "backward":
    model = DistributedDataParallel(nn.Linear(4, 1))
    model(torch.ones(2, 4)).sum().backward()
    del model
else:
    dist.all_reduce(torch.ones(1))
dist.barrier()
gc.collect()
dist.distributed_c10d._get_default_group().abort()
dist.destroy_process_group()
gc.collect()
left = connections(port) - before
if rank == 0:
    print(f"torch {torch.__version__}, {what}: {joined} connections, {left} after destroy")
    assert (joined, left) == (2, 2 if what == "backward" else 0)
PYTHON
for what in all_reduce backward; do
    "$folder/venv/bin/python" -W ignore -m torch.distributed.run --standalone --nproc-per-node 3 \
        "$folder/sockets.py" "$what" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
done
# torch 2.13.0+cpu, all_reduce: 2 connections, 0 after destroy
# torch 2.13.0+cpu, backward: 2 connections, 2 after destroy
