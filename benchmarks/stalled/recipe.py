"""A recipe of which one rank hangs: HOW and CULPRIT in the environment say how, and which."""

import atexit
import os
import re
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn

from samestep import Recipe, Splits

HOW, CULPRIT = os.environ.get("HOW", ""), os.environ.get("CULPRIT", "1")
RANK = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
AT_STEP = 30
FOREVER_S = 3600.0


def hang():
    Path(os.environ.get("HUNG", os.devnull)).write_text(str(time.time()))
    if HOW == "spins":
        any(number for number in iter(int, 1))  # spins
    elif HOW == "spins_in_c":
        re.match(r"(a+)+$", "a" * 60 + "b")  # spins_in_c
    elif HOW == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # stopped
    elif HOW == "locked":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # locked
    elif HOW == "fifo":
        fifo = f"{os.environ['HUNG']}.fifo"
        os.mkfifo(fifo)
        Path(fifo).read_bytes()  # fifo
    else:
        time.sleep(FOREVER_S)  # sleeps, worker, start, end, evaluation


class Samples(torch.utils.data.Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if HOW == "worker" and RANK == CULPRIT and index == 300:
            hang()
        return self.x[index], self.y[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.steps = nn.Linear(4, 2), 0

    def forward(self, x):
        self.steps += self.training
        where = HOW not in ("", "worker", "start", "end", "evaluation")
        due = self.training and self.steps == AT_STEP and where
        if RANK == CULPRIT and (due or (HOW == "evaluation" and not self.training and self.steps)):
            hang()
        return self.linear(x)


def data():
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(7))
    y = (x[:, 0] > 0).long()
    train = Samples(x, y) if HOW == "worker" else (x, y)
    return Splits(train=train, validation=(x[:20], y[:20]))


recipe = Recipe(model=Model, data=data, settings={"epochs": 2, "batch_size": 10})
if RANK == CULPRIT and HOW == "start":
    hang()
if RANK == CULPRIT and HOW == "end":
    atexit.register(hang)
