"""What a step does eagerly and a compiled graph of whole steps would not do."""

import copy
from typing import Any

import torch
from torch import nn

from samestep.settings import Precision
from samestep.training.apply import call, takes_keywords
from samestep.training.dropout import dropout_by, not_dropped
from samestep.training.hidden_state import Prints, closure_prints, differing, model_prints
from samestep.training.precision import autocast
from samestep.training.step import Trainee, check_loss


def why_only_eager(trainee: Trainee, inputs: Any, targets: Any, precision: Precision) -> str:
    """Return what a forward and backward do that a graph of whole steps cannot, or nothing.

    The graph gives every weight a gradient, also one that the loss does not depend on, which an
    optimizer with weight decay or momentum then changes. It keeps what is written into a buffer,
    not what is put in its place. And on the CPU, PyTorch's compiler may use what is drawn before it
    is drawn (`samestep.training.dropout`), unless it is an ordinary dropout.

    They are tried on a copy of the model that shares its weights, so nothing changes.
    """
    if isinstance(inputs, dict) and takes_keywords(trainee.model, inputs):
        return "the model takes keyword arguments"
    weights = dict(trainee.model.named_parameters())
    trained = {name: p for name, p in weights.items() if p.requires_grad}
    try:
        shared = {id(p): p for p in weights.values()}
        model, loss_of = copy.deepcopy((trainee.model, trainee.loss), shared)
    except Exception:
        return "the model cannot be copied to try a step"
    before, state = _held(model), torch.get_rng_state()
    prints = _prints(model, loss_of)
    device = next(iter(trained.values())).device
    with autocast(precision, device), dropout_by(not_dropped):
        loss = loss_of(call(model, inputs), targets)
    check_loss(loss, trainee.loss)
    if device.type == "cpu" and not torch.equal(state, torch.get_rng_state()):
        return "the model draws random numbers beside nn.Dropout, maybe used before they are drawn"
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    unused = [name for name, g in zip(trained, gradients, strict=True) if g is None]
    if unused:
        return f"the loss does not depend on {unused[0]}"
    after = _held(model)
    changed = [name for name in before | after if before.get(name) is not after.get(name)]
    if changed:
        return f"forward assigns {changed[0]} anew"
    written = differing(prints, _prints(model, loss_of))
    return f"a step changes {written[0]}" if written else ""


def _prints(model: nn.Module, loss: object) -> Prints:
    """Return the fingerprints of what model and loss keep and no graph would: counters, lists."""
    return model_prints(model, loss) | closure_prints(loss)


def _held(model: nn.Module) -> dict[str, object]:
    """Return what modules hold beside weights: buffers and attributes of their own."""
    held: dict[str, object] = dict(model.named_buffers())
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        held |= {f"{start}{name}": value for name, value in vars(module).items()}
    return held
