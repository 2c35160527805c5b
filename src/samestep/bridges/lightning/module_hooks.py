"""Hooks of a LightningModule during its training, and the modes that they leave its parts in.

Lightning's Trainer leaves a frozen backbone or a teacher in the mode that the module has put it in,
also over validations. samestep's training calls `train()` of the whole model after each of them, so
what is to stay in eval mode is kept with the module, by name: copies of a module have it, too.
"""

from contextlib import nullcontext
from typing import Any

from samestep.base.errors import UserError, blame, defined_at, listed
from samestep.core.learner.after_epoch import keeps_trained

_FIRST, _KEPT = "_samestep_first_in_eval", "_samestep_in_eval"


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


def call_callback(callback: Any, name: str, trainer: Any, module: Any) -> None:
    """Call a hook of a callback with what stands in for the Trainer, and the module.

    Raises:
        UserError: it fails, or freezes parameters as an epoch starts.
    """
    hook, subject = getattr(callback, name), f"{name} of the callback {type(callback).__name__}"
    within = name == "on_train_epoch_start"
    with keeps_trained(module, subject, hook) if within else nullcontext():
        try:
            hook(trainer, module, **({"stage": "fit"} if name == "setup" else {}))
        except Exception as error:
            blame(f"{subject} failed", error, hook)


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
