"""Which GPU is whose: a rank that sees one alone may have it for itself, or share it unawares."""

import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from samestep.errors import UserError
from samestep.ranks.launch import Launch, binds_gpus
from samestep.ranks.startup import PARENT

FEWER_RANKS = (
    "Start as many ranks as GPUs (--nproc, --ntasks-per-node), use --device cpu, or let ranks "
    "share a GPU with --oversubscribe."
)


def one_gpu_each(
    launch: Launch, environment: Mapping[str, str], *, oversubscribe: bool = False
) -> bool:
    """Return whether a rank that sees one GPU has it for itself, as far as its variables tell.

    Slurm says so. Under other launchers CUDA_VISIBLE_DEVICES may have been set for each rank, or
    once for all of them: `check_gpus` asks the ranks. Ranks that samestep starts itself all see
    what it sees.
    """
    if launch.launcher == "srun" and binds_gpus(environment):
        return True
    chosen = environment.get("CUDA_VISIBLE_DEVICES") and not environment.get(PARENT)
    return bool(chosen) and not oversubscribe


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a CUDA device; nothing for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def check_gpus(launch: Launch, uuid: str, store: Any) -> None:
    """Check that no two ranks compute on one GPU. All ranks call it, before they join.

    Args:
        launch: this rank's place among the others.
        uuid: of this rank's GPU.
        store: what `open_store` returned.

    Raises:
        UserError: on every rank, two ranks do.
    """
    size = launch.world_size
    store.set(f"gpu/{launch.rank}", f"{uuid} of node {launch.node} ({socket.gethostname()})")
    told = [store.get(f"gpu/{rank}").decode() for rank in range(size)]
    ranks: dict[str, list[int]] = {}
    for rank, gpu in enumerate(told):
        ranks.setdefault(gpu.partition(" (")[0], []).append(rank)
    sharing = max(ranks.values(), key=len)
    if len(sharing) == 1:
        return
    store.set(f"gpu/{launch.rank}/told", "1")
    if launch.rank == 0:  # whose process may serve the store, and ends now
        store.wait([f"gpu/{rank}/told" for rank in range(size)])
    several = ", ".join(map(str, sharing[:4])) + (", …" if len(sharing) > 4 else "")
    raise UserError(
        f"Ranks {several} have one GPU between them: {told[sharing[0]]}. CUDA_VISIBLE_DEVICES is "
        f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')} here. {FEWER_RANKS}",
        on_all_ranks=True,
    )
