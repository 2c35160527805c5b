"""Train the example's GPT on Gloo ranks by a hand-written loop: DDP, or with --fsdp FSDP2."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from common import measure, options
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from char_gpt import GPT, Options, complete, data, loss

BATCH_SIZE = 16  # per rank


def main() -> None:
    sharded = "--fsdp" in sys.argv
    if sharded:
        sys.argv.remove("--fsdp")
    asked = options()
    chosen = complete(Options(dim=asked.width))
    dataset = TensorDataset(*data(chosen).train)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, sampler=sampler)
    model = GPT(chosen)
    if sharded:
        for block in model.blocks.layers:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = len(loader) * (asked.epochs + 1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def train_epoch(epoch: int) -> int:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        return len(dataset)

    measure(train_epoch, asked.epochs)


dist.init_process_group(backend="gloo")
main()
dist.barrier()
dist.destroy_process_group()
