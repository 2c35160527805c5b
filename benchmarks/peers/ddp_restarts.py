"""The usual way: DDP under `torchrun --max-restarts`, a checkpoint every 100 steps, by hand.

    torchrun … ddp_restarts.py RANKS FOLDER STEPS spiral|convnet

Each rank appends its number and the step to FOLDER/steps.txt after each step.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

EVERY = 100


def model_and_data(what: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, its inputs and its targets."""
    if what == "spiral":
        inputs = torch.randn(7000, 2)
        model: nn.Module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    else:
        inputs = torch.randn(4096, 1, 28, 28)
        model = nn.Sequential(
            *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 2)),
        )
    return model, inputs, (inputs.flatten(1)[:, 0] > 0).long()


def batch_of(inputs: Tensor, step: int, rank: int, size: int) -> Tensor:
    """Return the places of a rank's share of 32 samples."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(step))
    return order[rank * (32 // size) : (rank + 1) * (32 // size)]


def main() -> None:
    """Train, from the newest checkpoint if there is one."""
    folder, steps, what = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    model, inputs, targets = model_and_data(what)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters())
    file, step = folder / "checkpoint.pt", 0
    if file.exists():
        saved = torch.load(file)
        wrapped.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < steps:
        mine = batch_of(inputs, step, rank, size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs[mine]), targets[mine]).backward()
        optimizer.step()
        step += 1
        with (folder / "steps.txt").open("a") as lines:
            lines.write(f"{rank} {step}\n")
        if rank == 0 and step % EVERY == 0:
            state = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
