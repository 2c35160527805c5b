"""torchft's way: each rank is a replica, a lighthouse says who takes part in a step.

    python ddp_torchft.py RANKS FOLDER STEPS spiral|convnet

Starts the lighthouse and the replicas, and one that died again. Each replica appends its number and
the step to FOLDER/steps.txt after each step that was taken. As in torchft's examples:
`min_replicas` 1, `quorum_tick_ms` 100, `join_timeout_ms` 10000; heartbeats by default.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from ddp_restarts import batch_of, model_and_data
from torch import distributed, nn


def main() -> None:
    """Start a lighthouse and the replicas, or be one of them."""
    if "REPLICA" in os.environ:
        replica(int(os.environ["REPLICA"]), int(sys.argv[1]))
        return
    from torchft.coordination import LighthouseServer

    options = {"min_replicas": 1, "quorum_tick_ms": 100, "join_timeout_ms": 10_000}
    lighthouse = LighthouseServer(bind="[::]:0", **options)
    address = lighthouse.address().replace(os.uname().nodename, "localhost")
    always = os.environ | {"TORCHFT_LIGHTHOUSE": address}

    def started(number: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *sys.argv], env=always | {"REPLICA": str(number)})

    replicas = [started(number) for number in range(int(sys.argv[1]))]
    while any(one.poll() is None for one in replicas):
        replicas = [r if r.poll() is None else started(n) for n, r in enumerate(replicas)]
        time.sleep(0.1)


def replica(number: int, size: int) -> None:
    """Train as one replica of one rank."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    folder, steps, what = Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model, inputs, targets = model_and_data(what)
    inner = torch.optim.Adam(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(), min_replica_size=1, replica_id=f"replica_{number}",
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        load_state_dict=load, rank=0, world_size=1, hostname="localhost",
        store_addr="localhost", store_port=store.port,
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while (step := manager.current_step()) < steps:
        mine = batch_of(inputs, step, number, size)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(inputs[mine]), targets[mine]).backward()
        optimizer.step()
        if manager.current_step() > step:
            with (folder / "steps.txt").open("a") as lines:
                lines.write(f"{number} {manager.current_step()}\n")


if __name__ == "__main__":
    main()
