"""Put a model on all ranks. The model knows nothing of them; wrapping takes the built model."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.settings import Settings


class _Counted(nn.Module):
    """A model with one more weight, whose gradient is all-reduced with the others."""

    def __init__(self, inner: nn.Module, counter: nn.Parameter) -> None:
        super().__init__()
        self.inner, self.counter = inner, counter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs."""
        return self.inner(*args, **kwargs)


Wrap = Callable[[nn.Module, World, Settings, nn.Parameter | None], nn.Module]
"""As `wrap`: (model, world, settings, counter) → the model on all ranks."""


def make_counter(model: nn.Module, world: World, settings: Settings) -> nn.Parameter | None:
    """Return a weight, 0 for ever, whose gradient ranks add up with the model's; none alone."""
    if world.world_size == 1 or settings.allows_unused or settings.virtual_ranks is not None:
        return None  # DDP then follows the forward, in which it does not appear
    like = next(p for p in model.parameters() if p.requires_grad)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return nn.Parameter(torch.zeros(1, dtype=dtype, device=like.device))


def wrap(
    model: nn.Module, world: World, settings: Settings, counter: nn.Parameter | None = None
) -> nn.Module:
    """Return the model that averages its gradients over all ranks; alone, the model itself.

    Args:
        model: what to put on all ranks.
        world: this rank among the others.
        settings: what to tell DDP of the model.
        counter: a weight of no effect whose gradient is to be averaged, too.
    """
    if not world.connected:
        return model
    if settings.virtual_ranks is not None:
        _start_alike(model, world)
        return model
    return DistributedDataParallel(
        model if counter is None else _Counted(model, counter),
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=True,  # spares a copy of the gradients
        find_unused_parameters=settings.find_unused,
        static_graph=settings.static_graph,
    )


def _start_alike(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's weights and buffers, as DDP does when it takes a model.

    Raises:
        UserError: on every rank, that the ranks have built different models.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in tensors.items()]
    found = world.gather(shapes)
    for rank, other in enumerate(found):
        if other != found[0]:
            name = next(one[0] for one in {*other} ^ {*found[0]})
            raise UserError(
                f"Ranks 0 and {rank} have built different models: {name} is not in both, or of "
                "another shape or type. Build the same model on every rank.",
                on_all_ranks=True,
            )
    for tensor in tensors.values():
        world.take_from_main(tensor.detach())


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
