"""Methods that a Trainer's class has of its own: which are called, and how, and which refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import default_collate
from transformers import Seq2SeqTrainer, Trainer

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.settings import Settings
from samestep.bridges.huggingface.training_arguments import refuse
from samestep.core.data.recipe_data import Unpacked
from samestep.core.recipe import Splits

_OVERRIDES = (
    *("training_step", "create_optimizer_and_scheduler", "get_batch_samples", "prediction_step"),
    *("get_train_dataloader", "get_eval_dataloader", "_get_eval_sampler", "evaluation_loop"),
    *("evaluate", "_inner_training_loop", "compute_loss_context_manager", "_prepare_inputs"),
    *("_clip_grad_norm", "_maybe_log_save_evaluate", "_get_num_items_in_batch"),
    *("_remove_unused_columns", "_prepare_input", "_get_dataloader"),
    *("_get_collator_with_removed_columns", "autocast_smart_context_manager"),
)
"""Methods of a Trainer that would not be called."""
_OF_TRL = {
    f"trl.trainer.{module}.{kind}.{name}"
    for module, kind in (
        ("sft_trainer", "SFTTrainer"),
        ("dpo_trainer", "DPOTrainer"),
        ("reward_trainer", "RewardTrainer"),
    )
    for name in ("training_step", "prediction_step", "evaluate")
}
"""Methods that offload activations, call `compute_loss` or tokenize what is given to them."""
_REFUSED_OF_TRL = {
    "activation_offloading": "gradient_checkpointing=True saves memory.",
    "sync_ref_model": "Leave the reference model as it is.",
    "padding_free": "Let samples be padded, and packed with packing_strategy='wrapped'.",
}
_OVER_A_BATCH = {"aot", "aot_unpaired", "sft"}  # losses of DPO that compare pairs
OF_OPTIMIZER = ("create_optimizer", "get_decay_parameter_names", "get_optimizer_cls_and_kwargs")


def with_length(trainer: Trainer, about: Any, schedule: Any, optimizer: Any, plan: Any) -> Any:
    """Tell a Trainer with methods of its own how long the training is; return its scheduler."""
    state, about.steps_per_epoch = trainer.state, plan.steps_per_epoch
    state.max_steps, state.num_train_epochs = plan.total_steps, plan.epochs
    trainer.optimizer, trainer.lr_scheduler = optimizer, schedule(optimizer, plan)
    return trainer.lr_scheduler


def has_own(kind: type, name: str) -> bool:
    """Return whether a Trainer's class has another method of that name than transformers."""
    known = (getattr(one, name, None) for one in (Trainer, Seq2SeqTrainer))
    return getattr(kind, name, None) not in known


def check_methods(kind: type) -> None:
    """Refuse a Trainer's class with methods that would not be called.

    Raises:
        UserError: names them.
    """
    own = [name for name in _OVERRIDES if has_own(kind, name)]
    if own := [name for name in own if _full_name(getattr(kind, name)) not in _OF_TRL]:
        raise UserError(
            f"{kind.__name__}{defined_at(kind)} has its own {listed(own)}, which samestep would "
            "not call.",
            remedy="Write a Recipe, or keep the loop: samestep.open_run.",
        )


def _full_name(method: Any) -> str:
    return f"{method.__module__}.{method.__qualname__}"


def check_of_trl(trainer: Trainer) -> None:
    """Refuse arguments of TRL's Trainers that would have no effect, or not the same on ranks.

    Raises:
        UserError: names the argument and what to do instead.
    """
    for name, remedy in _REFUSED_OF_TRL.items():
        if getattr(trainer, name, getattr(trainer.args, name, False)):
            refuse(name, True, remedy)
    for name in sorted(_OVER_A_BATCH.intersection(getattr(trainer, "loss_types", ()))):
        refuse("loss_type", name, "Take one that is a mean over pairs, such as 'sigmoid'.")


def take_model(trainer: Trainer, model: nn.Module) -> None:
    """Let a Trainer's own methods use a model, and its reference (of DPO) be on the same device."""
    trainer.model = trainer.model_wrapped = model
    reference, device = getattr(trainer, "ref_model", None), next(model.parameters()).device
    if isinstance(reference, nn.Module) and next(reference.parameters()).device != device:
        reference.to(device)


def noting_uncalled(trainer: Trainer, data: Callable[[], Splits]) -> Splits:
    """Return the data, and notes of a Trainer's own methods and script that are not called."""
    splits, shown = data(), ("log", "save_model", "_save", "_save_checkpoint", "_load_best_model")
    own, kind = [name for name in shown if has_own(type(trainer), name)], type(trainer)
    note = f"{kind.__name__}{defined_at(kind)} has its own {listed(own)}: not called here."
    notes = *([note] if own else []), *vars(trainer).get("_not_run", ())
    return replace(splits, notes=(*splits.notes, *notes))


def ordered_by(trainer: Trainer, data: Callable[[], Splits]) -> Splits:
    """Return the data in the order of a Trainer's own sampler."""
    splits, sampler = data(), trainer._get_train_sampler()  # noqa: SLF001 - the user's method
    return replace(splits, train=Unpacked(cast("Any", splits.train), default_collate, sampler))


def optimizer_of(trainer: Trainer, model: nn.Module, _: Settings) -> torch.optim.Optimizer:
    """Return the optimizer that a Trainer's own methods make for a model."""
    trainer.model, trainer.optimizer = model, None
    optimizer: torch.optim.Optimizer = trainer.create_optimizer() or trainer.optimizer
    return optimizer


def schedule_of(trainer: Trainer, optimizer: torch.optim.Optimizer, plan: Any) -> Any:
    """Return the scheduler that a Trainer's own `create_scheduler` makes."""
    trainer.lr_scheduler = None
    return trainer.create_scheduler(plan.total_steps, optimizer) or trainer.lr_scheduler
