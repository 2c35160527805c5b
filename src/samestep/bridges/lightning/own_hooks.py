"""Which hooks a LightningModule and its data may have: those that are called, and remedies."""

import dis
from collections.abc import Iterable
from functools import cache
from typing import Any

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.settings import Settings
from samestep.bridges.lightning.stand_in import (
    AFTER_STEP,
    AFTER_VALIDATION,
    AT_START,
    BEFORE_STEP,
    OPTIMIZER_STEP,
)
from samestep.bridges.lightning.whole import AT_END

LOADERS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}
_OF_BATCHES = {"on_before_batch_transfer", "on_after_batch_transfer"}
_OF_DATA = {"setup", "prepare_data", *_OF_BATCHES, *LOADERS.values()}
_OF_STEPS = {"training_step", "validation_step", "test_step", "configure_optimizers", "forward"}
BEFORE_EVALUATION = ("on_validation_start", "on_validation_epoch_start")
BEFORE_BATCH = "on_train_batch_start"
SCHEDULER_STEP = "lr_scheduler_step"
_OF_EPOCHS = {"on_train_epoch_start", "on_train_epoch_end", *AT_END.values(), *BEFORE_EVALUATION}
AROUND_STEP = {*BEFORE_STEP, AFTER_STEP}
OF_CALLBACKS = {"setup", *AT_START, "on_train_epoch_start", *AFTER_VALIDATION}
OF_CALLBACKS |= {"on_train_epoch_end", BEFORE_BATCH, *AROUND_STEP}
"""Hooks of the Trainer's callbacks that are called: with what stands in for it, and the module."""
_MISSED = {"on_train_end", "on_fit_end", "teardown", "on_exception", "state_dict"}
_MISSED |= {"load_state_dict", "on_save_checkpoint", "on_load_checkpoint"}
_OF_OTHERS = ("on_test", "on_predict", "on_sanity")
"""Those that are not called, and change no training: a note says so."""
_CALLED = _OF_DATA | _OF_STEPS | _OF_EPOCHS | AROUND_STEP
_CALLED |= {"configure_model", BEFORE_BATCH, *AT_START, OPTIMIZER_STEP, SCHEDULER_STEP}
_LEFT_ALONE = {"teardown", "predict_dataloader", "predict_step"}  # they change no training
_REMEDIES = {
    "configure_callbacks": "Use --patience to stop early, --keep-top-k for checkpoints.",
    "configure_gradient_clipping": "Use --clip-norm.",
    "optimizer_zero_grad": "Leave it out: gradients are None before each step.",
    "on_load_checkpoint": "Keep the state in a buffer, or return it from get_extra_state.",
    "transfer_batch_to_device": "Leave it out: samestep moves all tensors of a batch.",
    "state_dict": "Leave it out: checkpoints hold the position in the data.",
}
"""What to do about hooks that are not called."""


def base_of(module: Any, name: str) -> type:
    """Return Lightning's class, of `lightning` or of `pytorch_lightning`."""
    for base in type(module).__mro__:
        if base.__name__ == name and "lightning" in base.__module__:
            return base
    raise UserError(
        f"samestep.lightning.recipe(…) takes a {name}, or a function that returns one, not "
        f"{type(module).__name__}{defined_at(type(module))}."
    )


def has_own(module: Any, base: type, name: str) -> bool:
    """Whether a module or its data has a method of its own, not that of Lightning's class."""
    own = vars(module).get(name, getattr(type(module), name, None))  # as from_datasets sets it
    return own is not getattr(base, name, None)


def hooks_of_callback(callback: Any) -> tuple[list[str], list[str]]:
    """Return which own hooks of a callback are called, and which are left out with a note.

    Raises:
        UserError: it has others.
    """
    kind, base = type(callback), base_of(callback, "Callback")
    hooks = [n for n in dir(base) if n.startswith("on_")]
    own = [n for n in (*hooks, "setup", *_MISSED - {*hooks}) if has_own(callback, base, n)]
    missed = [n for n in own if n in _MISSED or n.startswith(_OF_OTHERS)]
    if others := [n for n in own if n not in OF_CALLBACKS and n not in missed]:
        raise UserError(
            f"The Trainer's callback {kind.__name__}{defined_at(kind)} has its own "
            f"{listed(others)}, which samestep does not call.",
            remedy="Move its code into hooks of the module, or leave it out. samestep calls these "
            f"hooks of a callback: {listed(sorted(OF_CALLBACKS), 9)}.",
        )
    return [n for n in own if n in OF_CALLBACKS], missed


def check_validations(hooks_of: Iterable[tuple[Any, list[str]]], settings: Settings) -> None:
    """Refuse callbacks' hooks after validations where these come within an epoch."""
    for callback, hooks in hooks_of:
        late = [name for name in hooks if name in AFTER_VALIDATION]
        if late and settings.eval_every_steps:
            raise UserError(
                f"The callback {type(callback).__name__}{defined_at(type(callback))} has its own "
                f"{listed(late)}, which samestep calls after the validation at the end of an "
                f"epoch. This run validates every {settings.eval_every_steps} steps.",
                remedy="Give --eval-every 1epoch, or leave the hook out.",
            )


def check_hooks(module: Any, base: type) -> None:
    """Refuse hooks that would not be called; empty ones need not be."""
    hooks = [n for n in dir(base) if n.startswith(("on_", "configure_", "optimizer_"))]
    hooks += ["lr_scheduler_step", "backward", "transfer_batch_to_device"]
    if base.__name__ == "LightningDataModule":
        hooks += ["state_dict", "load_state_dict"]
    own = [n for n in hooks if n not in _CALLED | _LEFT_ALONE and has_own(module, base, n)]
    own = [n for n in own if not is_empty(getattr(type(module), n))]
    if own:
        remedy = _REMEDIES.get(
            own[0], "If the training needs it, write your own loop with samestep.open_run."
        )
        raise UserError(
            f"{type(module).__name__}{defined_at(type(module))} has {listed(own)}, which samestep "
            f"does not call. {remedy}"
        )


@cache
def is_empty(function: Any) -> bool:
    """Whether a hook does nothing, as those of templates."""
    code = getattr(function, "__code__", None)
    does = [] if code is None else list(dis.get_instructions(code))
    return 0 < len(does) <= 3 and {one.argval for one in does} <= {None, 0}
