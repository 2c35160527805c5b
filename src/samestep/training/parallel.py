"""Put a model on all ranks. The model knows nothing of them; wrapping takes the built model."""

import contextlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from samestep.world import World


def wrap(model: nn.Module, world: World) -> nn.Module:
    """Return the model that averages its gradients over all ranks; alone, the model itself."""
    if world.world_size == 1:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,  # spares a copy of the gradients
    )


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers, as DDP does before each forward.

    BatchNorm's statistics are those of each rank's samples; without this an evaluation would be of
    as many models as there are ranks.
    """
    for buffer in model.buffers():
        world.take_from_main(buffer)


def without_sync(wrapped: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a micro-step that is not the last of its step: gradients add up."""
    if isinstance(wrapped, DistributedDataParallel):
        return wrapped.no_sync()
    return contextlib.nullcontext()
