"""What a recipe's loss must return, and that it depends on every weight."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.trees import describe
from samestep.launch.ranks.mesh import any_sharded


def check_used(model: nn.Module) -> None:
    """Check, after the first backward, that each parameter has a gradient: DDP waits for it."""
    named = model.named_parameters()
    or_else = "" if any_sharded(model) else ", or, if other steps use them, add --find-unused"
    unused = [name for name, p in named if p.requires_grad and p.grad is None]
    if unused:
        raise UserError(
            f"The loss does not depend on {listed(unused)}, so ranks would wait for a gradient "
            "that never comes. Use these parameters in forward, or freeze them with "
            f"requires_grad_(False){or_else}."
        )


def check_loss(value: Any, loss: object) -> None:
    """Check that a recipe's loss returned a floating-point scalar."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
        return
    what, remedy = describe(value), ""
    if isinstance(value, Mapping):
        what = f"a dict of {', '.join(map(str, value))}"
        remedy = (
            " A dict of losses is tried before the first step, on copies of model and loss: let "
            "copy.deepcopy copy them, or return the sum."
        )
    raise UserError(
        f"The recipe's loss{defined_at(loss)} returned {what}; it must be a scalar tensor, the "
        f"mean over the samples of the batch.{remedy}"
    )


def check_trainable(value: Any, loss: object) -> None:
    """Check that a recipe's loss of training samples is a scalar with a gradient."""
    check_loss(value, loss)
    if not value.requires_grad:
        raise UserError(
            f"The recipe's loss{defined_at(loss)} has no gradient: it does not depend on any "
            "weight. Leave out .detach(), .item(), .argmax() and NumPy between the weights and the "
            "loss."
        )
