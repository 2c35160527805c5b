"""Hooks of a LightningModule during its training, and the modes that they leave its parts in.

Lightning's Trainer leaves a frozen backbone or a teacher in the mode that the module has put it in,
also over validations. samestep's training calls `train()` of the whole model after each of them, so
what is to stay in eval mode is kept with the module, by name: copies of a module have it, too.
"""

import inspect
from contextlib import nullcontext
from itertools import chain
from typing import Any

from torch import Tensor, nn

from samestep.base.errors import UserError, blame, defined_at, listed
from samestep.base.trees import tree_leaves
from samestep.core.learner.after_epoch import keeps_trained

_FIRST, _KEPT = "_samestep_first_in_eval", "_samestep_in_eval"

"""Places of a module's attributes."""
WITHIN = (
    *("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
)
"""Hooks of callbacks that may not freeze parameters."""
_COUNTING = set[int]()
"""Callbacks of which a hook around a step has changed a number, by their ids."""
_PLAIN = (int, float, str, type(None))
_LATE = ("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")


def call(module: Any, name: str, *arguments: Any) -> Any:
    """Call a hook of a module during its training; return what it returns.

    Raises:
        UserError: it fails, or freezes parameters.
    """
    hook = getattr(module, name)
    with keeps_trained(module, f"The LightningModule's {name}", hook):
        try:
            return hook(*arguments)
        except Exception as error:
            blame(f"The LightningModule's {name} failed", error, hook)


def call_callback(callback: Any, name: str, trainer: Any, module: Any, *given: Any) -> None:
    """Call a hook of a callback with what stands in for the Trainer, the module, and what is given.

    Raises:
        UserError: it fails, freezes parameters within an epoch, or keeps tensors at a step.
    """
    hook, subject = getattr(callback, name), f"{name} of the callback {type(callback).__name__}"
    before, counts = _attributes(callback), name in WITHIN[1:] and id(callback) in _COUNTING
    weights = _weights(module) if counts else None
    with keeps_trained(module, subject, hook) if name in WITHIN else nullcontext():
        try:
            hook(trainer, module, *given, **({"stage": "fit"} if name == "setup" else {}))
        except Exception as error:
            blame(f"{subject} failed", error, hook)
    if name not in WITHIN[1:]:
        return
    functions = (inspect.unwrap(getattr(type(callback), hook)) for hook in _LATE)
    late = [f.__code__.co_names for f in functions if hasattr(f, "__code__")]
    held = [n for n, marks in _attributes(callback).items() if before.get(n) != marks]
    # A number may be a clock's, or count for the hook itself, if that does not change the weights.
    if held:
        _COUNTING.add(id(callback))
    trains = counts and weights != _weights(module)
    held = [
        n for n in held if trains or not isinstance(vars(callback)[n], _PLAIN) or n in chain(*late)
    ]
    if held:
        raise UserError(
            f"{subject}{defined_at(type(callback))} changes {listed(sorted(held))} of the "
            "callback, which would be that of one rank, and no checkpoint holds it.",
            remedy="Keep it in a buffer or a part of the module, and change it in the module's own "
            f"{name}, or compute it from trainer.global_step. For an average of the weights use "
            "--ema.",
        )


def _weights(module: Any) -> list[tuple[int, int]]:
    """Return marks of a module's weights and buffers."""
    return [(t.data_ptr(), t._version) for t in (*module.parameters(), *module.buffers())]  # noqa: SLF001


def _attributes(callback: Any) -> dict[str, list[Any]]:
    """Return marks of what a callback keeps: numbers, tensors, and lists, dicts and modules."""

    def mark(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.data_ptr(), leaf._version  # noqa: SLF001
        return leaf if isinstance(leaf, _PLAIN) else id(leaf)

    held = {n: v.state_dict() if isinstance(v, nn.Module) else v for n, v in vars(callback).items()}
    return {name: [mark(leaf) for leaf in tree_leaves(value)] for name, value in held.items()}


def keep_modes(module: Any) -> None:
    """Keep the modes of a module's parts, as it is made and as an epoch starts.

    Raises:
        UserError: a part was in eval mode only until this epoch; a resumed run cannot know that.
    """
    kept = [name for name, part in module.named_modules() if name and not part.training]
    own = vars(module)
    own.setdefault(_FIRST, kept)
    if gone := sorted({*own.get(_KEPT, ())} - {*kept}):
        hook = type(module).on_train_epoch_start
        raise UserError(
            f"on_train_epoch_start{defined_at(hook)} put {listed(gone)} into eval mode in one "
            "epoch but not in the next. A run that resumes there would start in another mode.",
            remedy="Set the mode in each epoch, for example after: if self.current_epoch >= 3.",
        )
    own[_KEPT] = kept


def in_first_modes(module: Any) -> None:
    """Put a module's parts into the modes that it was made with."""
    _put(module, vars(module).get(_FIRST, ()))


def in_kept_modes(module: Any) -> None:
    """Put a module's parts into the modes of this epoch, if an evaluation came between."""
    kept = vars(module).get(_KEPT, ())
    if kept and module.get_submodule(kept[-1]).training:
        _put(module, kept)


def _put(module: Any, in_eval: Any) -> None:
    for name in in_eval:
        module.get_submodule(name).training = False
