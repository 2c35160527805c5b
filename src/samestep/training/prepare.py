"""Change how a built model computes, not what: SyncBatchNorm, channels-last, activations again.

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
from torch.utils.checkpoint import checkpoint

from samestep.errors import UserError
from samestep.ranks.world import World
from samestep.settings import Settings


def prepare(model: nn.Module, settings: Settings, world: World, dtype: torch.dtype) -> nn.Module:
    """Return a newly built model on its device, and as these settings want it to compute.

    Raises:
        UserError: a setting cannot be had here, or finds nothing in this model to apply to.
    """
    check_dense(model, "The recipe's model has")
    model.to(device=world.device, dtype=dtype)
    hold_parameters(model, settings)
    if settings.sync_batchnorm:
        model = _synchronise(model, world)
    if settings.virtual_ranks is not None:
        _refuse_synchronised(model)
    if settings.channels_last:
        to_channels_last(model)
    if settings.checkpoint_activations:
        _checkpoint_activations(model, settings)
    return model


def check_dense(model: nn.Module, owner: str) -> None:
    """Check that ranks can exchange all of a model, and checkpoints hold it.

    Raises:
        UserError: a buffer or a parameter is sparse; `owner` begins the message.
    """
    for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
        if tensor.layout != torch.strided:
            raise UserError(
                f"{owner} a sparse tensor, {name}, which ranks cannot exchange. Register its "
                "indices and values as two buffers and put them together in forward: "
                "torch.sparse_coo_tensor(self.indices, self.values, size)."
            )


Loss = TypeVar("Loss", bound=Callable[..., Any])


def place_loss(loss: Loss, device: torch.device, dtype: torch.dtype) -> Loss:
    """Return a loss whose tensors, such as class weights, are where and what the model's are.

    A loss that is a module is copied, so that the recipe's own stays as it is; a function holds
    nothing that could be moved.
    """
    if not isinstance(loss, nn.Module):
        return loss
    return copy.deepcopy(loss).to(device=device, dtype=dtype)


def hold_parameters(model: nn.Module, settings: Settings) -> None:
    """Convert the parameters to the type of the settings, if they name one of its own.

    Batch normalisation stays as it is: its running statistics move by less than bfloat16 can tell,
    and their kernels want the weights in the same type.
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
    """Lay the weights of convolutions out channel by channel within a pixel, and so their maps.

    Convolutions follow the layout of their weights, whatever layout their input has.
    """
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def match_layouts(optimizer: torch.optim.Optimizer) -> None:
    """Lay each parameter's optimizer state out as the parameter is.

    Fused kernels take them as plain vectors, so a state that was saved in another layout than the
    parameter has now would be applied to the wrong weights.
    """
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _synchronise(model: nn.Module, world: World) -> nn.Module:
    if not any(isinstance(module, _BatchNorm) for module in model.modules()):
        raise UserError("--sync-batchnorm: the model has no batch normalisation. Leave it out.")
    if world.world_size == 1:
        return model  # one rank sees the whole batch already
    if world.device.type != "cuda":
        raise UserError(
            f"--sync-batchnorm: PyTorch synchronises batch normalisation on NVIDIA GPUs alone, "
            f"and these {world.world_size} ranks are on {world.device.type}. Leave it out, or "
            "train on one rank."
        )
    synchronised: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    return synchronised


def _refuse_synchronised(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"--virtual-ranks: the model's {name or 'own class'} is a SyncBatchNorm, which "
                "normalises over whatever the ranks compute at a time. Use BatchNorm, which "
                "normalises over the samples of a virtual rank, or leave --virtual-ranks out."
            )


def _checkpoint_activations(model: nn.Module, settings: Settings) -> None:
    """Let marked blocks keep their inputs alone, and compute the rest again in the backward."""
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
        forward, *args, use_reentrant=False, context_fn=partial(_contexts, module), **kwargs
    )


def _contexts(
    module: nn.Module,
) -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the contexts of the first and of the second computation."""
    return contextlib.nullcontext(), _unmoved_statistics(module)


@contextlib.contextmanager
def _unmoved_statistics(module: nn.Module) -> Iterator[None]:
    """Keep batch normalisation from counting a batch into its running statistics twice."""
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm, (_, count) in zip(norms, kept, strict=True):
        # A step of zero leaves them as they are, bit by bit. SyncBatchNorm insists on a count.
        norm.momentum = 0.0
        norm.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
