"""Prepare a built model: its device and layout, and wrap it for all ranks.

Names and shapes of weights stay as they are, so checkpoints fit with or without any of it.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from samestep.base.errors import UserError
from samestep.base.settings import Settings
from samestep.base.trees import map_tensors
from samestep.core.learner.device import data_dtype
from samestep.core.learner.optimizer_state import members_of
from samestep.launch.ranks.mesh import any_sharded
from samestep.launch.ranks.world import World


def is_fsdp(settings: Settings, world: World) -> bool:
    """Whether the model is shared out: a single rank holds all of it anyway."""
    return settings.strategy == "fsdp" and world.connected


def prepare(model: nn.Module, settings: Settings, world: World, dtype: torch.dtype) -> nn.Module:
    """Put a newly built model on its device, and apply the settings of how it computes."""
    check_dense(model, "The recipe's model has")
    # One that the ranks share out goes there block by block.
    place(model, None if is_fsdp(settings, world) else world.device, dtype)
    hold_parameters(model, settings)
    if settings.sync_batchnorm or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        model = _synchronise(model, world, convert=settings.sync_batchnorm)
    for name, module in model.named_modules() if settings.virtual_ranks is not None else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"--virtual-ranks: the model's {name or 'own class'} is a SyncBatchNorm, which "
                "normalises over whatever the ranks compute at a time. Use BatchNorm, which "
                "normalises over the samples of a virtual rank, or leave --virtual-ranks out."
            )
    if settings.channels_last:
        to_channels_last(model)
    if settings.checkpoint_activations:
        _checkpoint_activations(model, settings)
    return model


def place(model: nn.Module, device: torch.device | None, dtype: torch.dtype) -> None:
    """Move a model, and convert its floats; `Module.to` would leave the real part of a complex."""
    if not any(t.is_complex() for t in (*model.parameters(), *model.buffers())):
        model.to(device=device, dtype=dtype)
        return
    model.to(device=device)
    wanted = {True: torch.complex128 if dtype == torch.float64 else torch.complex64, False: dtype}
    convert: Any = model._apply  # noqa: SLF001 - as `Module.to` does
    convert(
        lambda t: t.to(wanted[t.is_complex()]) if t.is_complex() or t.is_floating_point() else t
    )


def check_dense(model: nn.Module, owner: str) -> None:
    """Check that no tensor is sparse: ranks cannot exchange those. `owner` begins the message."""
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if tensor.layout != torch.strided:
            raise UserError(
                f"{owner} a sparse tensor, {name}, which ranks cannot exchange. Register its "
                "indices and values as two buffers and put them together in forward: "
                "torch.sparse_coo_tensor(self.indices, self.values, size)."
            )


Loss = TypeVar("Loss", bound=Callable[..., Any])


def place_loss(loss: Loss, device: torch.device, dtype: torch.dtype) -> Loss:
    """Return a loss with its tensors, such as class weights, on the model's device and type.

    A loss that is a module is copied, so that the recipe's own stays as it is.
    """
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss).to(device=device, dtype=dtype)


def hold_parameters(model: nn.Module, settings: Settings) -> None:
    """Convert the parameters to `--param-dtype`, if given.

    Not those of batch normalisation: its statistics move by less than bfloat16 resolves, and its
    kernels want the weights in the same type.
    """
    if settings.param_dtype != "bf16":
        return

    def convert(tensor: Tensor) -> Tensor:
        held = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to(torch.bfloat16) if held else tensor

    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            # As .to() does, module by module.
            module._apply(convert, recurse=False)  # type: ignore[no-untyped-call]  # noqa: SLF001


def to_channels_last(model: nn.Module) -> None:
    """Lay out convolution weights channels-last; their inputs and outputs follow."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def match_layouts(optimizer: torch.optim.Optimizer, *, owned: bool = False) -> None:
    """Lay out each parameter's optimizer state as the parameter is.

    Fused kernels treat both as plain vectors, so another layout would mix up the weights. State
    that may lie in a file, which is not `owned`, is copied in any case.
    """
    for member in members_of(optimizer):
        for parameter, state in member.state.items():
            if not isinstance(parameter, torch.Tensor):  # such as MADGRAD's count of steps
                member.state[parameter] = state if owned else map_tensors(torch.clone, state)
                continue
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if value.shape != parameter.shape:
                    state[name] = value if owned else value.clone()
                elif not (owned and value.stride() == parameter.stride()):
                    state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _synchronise(model: nn.Module, world: World, *, convert: bool) -> nn.Module:
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("--sync-batchnorm: the model has no batch normalisation. Leave it out.")
    if world.world_size == 1:
        return model  # one rank sees the whole batch already
    if world.device.type != "cuda":
        raise UserError(
            "PyTorch synchronises batch normalisation (--sync-batchnorm, SyncBatchNorm) only on "
            f"NVIDIA GPUs, and these {world.world_size} ranks are on {world.device.type}. Leave it "
            "out, or train on one rank."
        )
    if convert:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return model


def _checkpoint_activations(model: nn.Module, settings: Settings) -> None:
    """Recompute activations of marked blocks in the backward: less memory, more time."""
    if settings.compile == "on":
        raise UserError(
            "--checkpoint-activations does not go with --compile on: a compiled graph chooses for "
            "itself what to keep. Leave one of them out."
        )
    marked = [m for m in model.modules() if getattr(m, "checkpoint_activations", False)]
    if not marked:
        raise UserError(
            "--checkpoint-activations: the model marks no block. Give the class of its repeated "
            "block the attribute checkpoint_activations = True, or leave the setting out."
        )
    for module in marked:
        module.forward = partial(_again, module, module.forward)


def _again(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _unmoved_statistics(module)),
        **kwargs,
    )


@contextlib.contextmanager
def _unmoved_statistics(module: nn.Module) -> Iterator[None]:
    """Keep batch normalisation from counting a batch into its running statistics twice."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    statistics = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, (_, count) in zip(norms, statistics, strict=True):
        # A step of zero leaves them as they are, bit by bit. SyncBatchNorm insists on a count.
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, statistics, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


class _Counted(nn.Module):
    """A model with one more weight, whose gradient is all-reduced with the others."""

    def __init__(self, inner: nn.Module, counter: nn.Parameter) -> None:
        super().__init__()
        self.inner, self.counter = inner, counter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


Wrap = Callable[[nn.Module, World, Settings, nn.Parameter | None], nn.Module]
"""As `wrap`: (model, world, settings, counter) → the model on all ranks."""


def make_counter(world: World, settings: Settings, size: int) -> nn.Parameter | None:
    """Return a weight (size,), always 0, whose gradient ranks add up with the model's.

    None if it is not needed: nothing is to be added up, or there is one rank.
    """
    if not size or world.world_size == 1 or settings.virtual_ranks is not None:
        return None
    if settings.allows_unused:
        return None  # DDP then follows the forward, in which it does not appear
    if settings.strategy == "fsdp":
        return None  # gradients are not added up in one place
    dtype = data_dtype(settings.precision)
    return nn.Parameter(torch.zeros(size, dtype=dtype, device=world.device))


def wrap(
    model: nn.Module, world: World, settings: Settings, counter: nn.Parameter | None = None
) -> nn.Module:
    """Wrap a model so that it averages its gradients, and the counter's, over all ranks."""
    if not world.connected or any_sharded(model):
        return model
    if settings.virtual_ranks is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            world.take_from_main(tensor.detach())  # as DDP does when it takes a model
        return model
    return OneLayout(
        model if counter is None else _Counted(model, counter),
        device_ids=[world.device] if world.device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_cap_mb,
        gradient_as_bucket_view=True,  # spares a copy of the gradients
        find_unused_parameters=settings.find_unused,
        static_graph=settings.static_graph,
    )


class OneLayout(DistributedDataParallel):
    """DDP whose gradients lie in the same buckets from the first step of every start.

    DDP lays its buckets out in the order in which the first backward makes the gradients. Where a
    gradient lies decides how Gloo rounds its sum over three ranks or more, so a resumed run would
    take its first step with other bits. The order here is that of the parameters, from the last to
    the first, which is the order of the backward in a model that uses them as it lists them.
    """

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, **settings)
        self.reducer._push_all_rebuilt_params()  # noqa: SLF001 - PyTorch has no public way
        self.reducer._rebuild_buckets()  # noqa: SLF001

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, are_sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if self.find_unused_parameters:
            return parameters, are_sparse  # DDP keeps the layout of the start, which is reversed
        return parameters[::-1], are_sparse[::-1]


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers, as DDP does before each forward.

    BatchNorm's statistics are of each rank's own samples, so evaluations would differ by rank.
    """
    for buffer in model.buffers():
        world.take_from_main(buffer)


def without_sync(wrapped: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a micro-step before the last: gradients add up locally.

    With FSDP they are reduced every time, since a rank may have no room for whole gradients.
    """
    if isinstance(wrapped, DistributedDataParallel):
        return wrapped.no_sync()
    return contextlib.nullcontext()
