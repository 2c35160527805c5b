#!/usr/bin/env bash
# Gloo's all_reduce of a view with gaps adds up other elements than those of the view.
#
# `x[::2]` and a column `x[:, 1]` leave gaps in memory. Gloo is given the address of the view and its
# number of elements, and no strides: it sums as many neighbours as the view has elements. Half of
# the view stays what this rank had, and what lies in the gaps is changed in the caller's tensor.
# `broadcast` and `reduce` do the same (pytorch #192920); `all_gather` copies first and is right, and
# `send` refuses, as NCCL does.
# Views whose memory has no gaps (a transposed matrix) are summed in the order of memory: right if
# all ranks have the same layout, and mixed up without a word if one rank's layout is another one.
# `x[::2].contiguous()`, reduced and copied back, is right.
#
# Seen: torch 2.13.0 (CPU, Gloo, two ranks).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/views.py" <<'PYTHON'
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def rank_of(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ones = torch.ones(8)
    dist.all_reduce(ones[::2])  # each element of the view should become 2
    same = torch.arange(6.0).reshape(2, 3)
    if rank == 1:  # the same numbers, column by column in memory
        same = same.t().contiguous().t()
    dist.all_reduce(same)  # should be 2 * [[0, 1, 2], [3, 4, 5]]
    if rank == 0:
        print("all_reduce(ones(8)[::2]):", ones[::2].tolist(), "in the gaps:", ones[1::2].tolist())
        print("one row-major, one column-major:", same.tolist())
    assert ones.tolist() == [2, 2, 2, 2, 1, 1, 1, 1], ones
    assert same.flatten().tolist() == ([0, 4, 3, 7, 6, 10] if rank == 0 else [0, 3, 6, 4, 7, 10])
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_of, (port,), nprocs=2)
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/views.py"
# torch 2.13.0+cpu
# all_reduce(ones(8)[::2]): [2.0, 2.0, 1.0, 1.0] in the gaps: [2.0, 2.0, 1.0, 1.0]
# one row-major, one column-major: [[0.0, 4.0, 3.0], [7.0, 6.0, 10.0]]
