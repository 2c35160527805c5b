"""samestep's process group for your own training loop.

    rank, local_rank, world_size = samestep.dist.setup_distributed()
    …
    samestep.dist.cleanup()

The same script then runs as one process, under torchrun, under srun and under mpirun.
"""

from samestep.launch.ranks.process_group import (
    barrier,
    cleanup,
    current_world,
    is_main_process,
    reduce_tensor,
    setup_distributed,
)

__all__ = [
    "barrier",
    "cleanup",
    "current_world",
    "is_main_process",
    "reduce_tensor",
    "setup_distributed",
]
