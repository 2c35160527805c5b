"""What ranks do in the tests of stalls: the user's script, as far as the verdict is concerned."""

import inspect
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.utils.data import DataLoader, Dataset

from samestep.launch.stall.collectives import watch_collectives
from samestep.launch.stall.pulse import Pulse

LONG_S = 600.0
RECONFIGURES = hasattr(dist, "_reconfigure")  # PyTorch 2.14


def line_of(mark: str) -> str:  # return FILE:LINE of the line with this comment
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{lines.index(next(x for x in lines if x.endswith('# ' + mark))) + 1}"


def run(folder: Path, how: str) -> None:
    rank = int(os.environ["RANK"])
    pulse = Pulse(folder, rank)
    with watch_collectives(pulse):
        anew = {"enable_reconfigure": True} if RECONFIGURES and how == "each" else {}
        dist.init_process_group("gloo", **anew)
        globals()[how](pulse, is_culprit=rank == 1)


def loop(pulse, is_culprit, hang=lambda: None, num_batches=9):
    for step in range(1, num_batches):
        if step == 4 and is_culprit:
            hang()
        dist.all_reduce(torch.ones(4))  # meet
        pulse.step(step)


def sleeps(pulse, *, is_culprit):
    loop(pulse, is_culprit, lambda: time.sleep(LONG_S))  # sleeps


def spins_in_c(pulse, *, is_culprit):
    loop(pulse, is_culprit, lambda: re.match(r"(a+)+$", "a" * 60 + "b"))  # spins_in_c


def stopped(pulse, *, is_culprit):
    loop(pulse, is_culprit, lambda: os.kill(os.getpid(), signal.SIGSTOP))  # stopped


def left(pulse, *, is_culprit):
    loop(pulse, is_culprit, num_batches=4 if is_culprit else 9)
    dist.barrier()  # left


def different(pulse, *, is_culprit):
    for step in range(1, 9):
        if step == 4 and is_culprit:
            dist.broadcast(torch.ones(4), src=0)  # different
        else:
            dist.all_reduce(torch.ones(4))  # alike
        pulse.step(step)


def peers(pulse, *, is_culprit):
    dist.recv(torch.ones(1), src=1 - dist.get_rank())  # peers


def unseen(pulse, *, is_culprit):
    if is_culprit:
        time.sleep(LONG_S)  # late
    all_reduce(torch.ones(1))  # unseen


all_reduce = dist.all_reduce  # before it could be noted


def waits_later(pulse, *, is_culprit):
    if is_culprit:
        time.sleep(LONG_S)  # never_began
    dist.all_reduce(torch.ones(1), async_op=True).wait()  # waits_later


class Samples(Dataset):
    def __init__(self, pulse, *, hang):
        self.pulse, self.hang = pulse, hang

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 9 and self.hang:
            any(self.pulse.alive() or time.sleep(0.05) for _ in iter(int, 1))  # worker
        return torch.ones(2)


def worker(pulse, *, is_culprit):
    for step, _ in enumerate(DataLoader(Samples(pulse, hang=is_culprit), num_workers=2)):
        dist.all_reduce(torch.ones(1))  # fed
        pulse.step(step)


def newest():
    """Yield each functional collective that this PyTorch has and `_reconfigure`, with its name."""
    if RECONFIGURES and dist.is_initialized():
        store, own = dist.distributed_c10d._get_default_store(), dist.get_rank()
        store.set(f"handle{own}", dist._get_reconfigure_handle())
        handles = [store.get(f"handle{rank}").decode() for rank in (0, 1)]
        yield "_reconfigure", lambda: dist._reconfigure(1, handles) and torch.ones(1)
    for name, function in inspect.getmembers(funcol, inspect.isfunction):
        asked, many = inspect.signature(function).parameters, name.endswith("_coalesced")
        tensor = next(iter(asked), "")
        if "group" in asked and tensor in ("self", "inputs") and name[0] != "_":
            x, dim = ([torch.ones(2)], [0]) if many else (torch.ones(2), 0)
            given = {"src": 0, "reduceOp": "sum", "gather_dim": 0, "src_dst": [1, 0], "tag": ""}
            given |= {tensor: x, "scatter_dim": dim, "group": dist.group.WORLD}
            yield name, partial(function, **{key: given.get(key) for key in asked})


def each(pulse, *, is_culprit):
    for name, call in newest():
        pulse.turn_to(name)
        goes = pulse.folder / name if is_culprit else pulse.folder
        any(iter(lambda file=goes: file.exists() or time.sleep(0.01), True))  # late_for_each
        call()[0].add(1)  # each
