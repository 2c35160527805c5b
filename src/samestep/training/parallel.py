"""Put a model on all ranks. The model knows nothing of them; wrapping takes the built model."""

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from samestep.ranks.world import World


def wrap(model: nn.Module, world: World, bucket_cap_mb: int | None = None) -> nn.Module:
    """Return the model that averages its gradients over all ranks; alone, the model itself.

    `bucket_cap_mb`: MiB of gradients that are reduced at once, while backward computes the next.
    """
    if not world.connected:
        return model
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,  # spares a copy of the gradients
    )


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers, as DDP does before each forward.

    BatchNorm's statistics are those of each rank's samples; without this an evaluation would be of
    as many models as there are ranks.
    """
    for buffer in model.buffers():
        world.take_from_main(buffer)


def tell_end_of_autograd(loss: Tensor, tell: Callable[[], None]) -> None:
    """Have `tell` called within loss.backward(), once all gradients are computed and sent off.

    The engine calls back in the order in which it was asked to. DDP asks, to wait for its
    all-reduces, when the last gradient is there; this asks when backward begins.
    """
    engine = Variable._execution_engine  # noqa: SLF001 - PyTorch's own DDP has no other way

    def ask(_gradient: Tensor) -> None:
        engine.queue_callback(tell)

    loss.register_hook(ask)  # type: ignore[no-untyped-call]


def without_sync(wrapped: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a micro-step that is not the last of its step: gradients add up."""
    if isinstance(wrapped, DistributedDataParallel):
        return wrapped.no_sync()
    return contextlib.nullcontext()
