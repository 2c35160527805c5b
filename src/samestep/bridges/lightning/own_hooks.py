"""Which hooks a LightningModule and its data may have: those that are called, and remedies."""

import dis
from functools import cache
from typing import Any

from samestep.base.errors import UserError, defined_at, listed
from samestep.bridges.lightning.stand_in import AFTER_STEP, BEFORE_STEP
from samestep.bridges.lightning.whole import AT_END

LOADERS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}
_OF_BATCHES = {"on_before_batch_transfer", "on_after_batch_transfer"}
_OF_DATA = {"setup", "prepare_data", *_OF_BATCHES, *LOADERS.values()}
_OF_STEPS = {"training_step", "validation_step", "test_step", "configure_optimizers", "forward"}
BEFORE_EVALUATION = ("on_validation_start", "on_validation_epoch_start")
BEFORE_BATCH = "on_train_batch_start"
_OF_EPOCHS = {"on_train_epoch_start", "on_train_epoch_end", *AT_END.values(), *BEFORE_EVALUATION}
AT_START = ("on_fit_start", "on_train_start")
AROUND_STEP = {*BEFORE_STEP, AFTER_STEP}
_CALLED = _OF_DATA | _OF_STEPS | _OF_EPOCHS | AROUND_STEP
_CALLED |= {"configure_model", BEFORE_BATCH, *AT_START}
_LEFT_ALONE = {"teardown", "predict_dataloader", "predict_step"}  # they change no training
_REMEDIES = {
    "configure_callbacks": "Use --patience to stop early, --keep-top-k for checkpoints.",
    "configure_gradient_clipping": "Use --clip-norm.",
    "optimizer_zero_grad": "Leave it out: gradients are None before each step.",
    "lr_scheduler_step": "Leave it out: a scheduler steps after each epoch, or at its “interval”.",
    "on_load_checkpoint": "Keep the state in a buffer, or return it from get_extra_state.",
    "transfer_batch_to_device": "Leave it out: samestep moves all tensors of a batch.",
    "state_dict": "Leave it out: checkpoints hold the position in the data.",
    "optimizer_step": "For a warm-up, use a scheduler with the interval “step”.",
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
