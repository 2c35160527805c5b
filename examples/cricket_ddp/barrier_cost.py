"""Measure what a barrier costs, and see that it makes every rank wait for the slowest.

torchrun --nproc_per_node=2 barrier_cost.py
"""

import statistics
import time

import torch.distributed as dist


def seconds_in_barrier() -> float:
    """Return how long this rank is in one barrier."""
    begun = time.perf_counter()
    dist.barrier()
    return time.perf_counter() - begun


dist.init_process_group("gloo")
spent = [seconds_in_barrier() for _ in range(1000)]
if dist.get_rank() > 0:
    time.sleep(0.5)  # the other ranks come late to the next one
late = seconds_in_barrier()
if dist.get_rank() == 0:
    print(f"a barrier: {statistics.median(spent) * 1e6:.0f} µs, the median of {len(spent)}")
    print(f"a barrier to which the others come 0.5 s late: {late:.2f} s")
dist.barrier()  # no rank leaves while another still talks to it
dist.destroy_process_group()
