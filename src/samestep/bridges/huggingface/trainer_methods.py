"""Methods that a Trainer's class has of its own: which are called, and how, and which refused."""

import inspect
import re
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
from samestep.core.data.recipe_data import Unpacked, without_loaders
from samestep.core.recipe import Splits

_OVERRIDES = """
    training_step create_optimizer_and_scheduler get_batch_samples _inner_training_loop
    compute_loss_context_manager _prepare_inputs _clip_grad_norm _maybe_log_save_evaluate
    _get_num_items_in_batch _remove_unused_columns _prepare_input _get_dataloader
    _get_collator_with_removed_columns autocast_smart_context_manager
"""
"""Methods of a Trainer that would not be called."""
_EVALUATE = "prediction_step get_eval_dataloader _get_eval_sampler evaluation_loop evaluate"
"""Those that change its evaluations only."""
_OF_TRL = re.compile(
    r"trl\.trainer\.(sft_trainer\.SFT|dpo_trainer\.DPO|reward_trainer\.Reward)Trainer\."
    r"(training_step|prediction_step|evaluate)"
)
"""Methods that offload activations, call `compute_loss` or tokenize what is given to them."""
_REFUSED_OF_TRL = {
    "activation_offloading": "Use gradient_checkpointing=True to save memory.",
    "sync_ref_model": "Leave it out: the reference model stays as it is.",
    "padding_free": "Use padding, and pack with packing_strategy='wrapped'.",
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


def _own(kind: type, names: str) -> list[str]:
    own = {name: getattr(kind, name) for name in names.split() if has_own(kind, name)}
    full = {name: f"{of.__module__}.{of.__qualname__}" for name, of in own.items()}
    return [name for name in own if not _OF_TRL.fullmatch(full[name])]


def evaluates(kind: type) -> bool:
    """Whether a Trainer's class evaluates as that of transformers."""
    return not _own(kind, _EVALUATE)


def check_methods(trainer: Trainer) -> None:
    """Refuse a Trainer whose class has methods that would not be called in its training.

    Raises:
        UserError: names them.
    """
    kind, plain = type(trainer), trainer.args.eval_strategy == "no"
    own, remedy = _own(kind, _OVERRIDES), "Write a Recipe, or your own loop with samestep.open_run."
    if kind.get_train_dataloader.__module__.startswith("sentence_transformers."):
        own.append("get_train_dataloader")  # of columns that no forward names
    if not own and not plain:
        own, remedy = (
            _own(kind, _EVALUATE),
            f"Train without evaluations: eval_strategy='no'. {remedy}",
        )
    if own:
        raise UserError(
            f"{kind.__name__}{defined_at(kind)} has its own {listed(own)}, which samestep would "
            "not call.",
            remedy=remedy,
        )


def check_of_trl(trainer: Trainer) -> None:
    """Refuse arguments of TRL's Trainers that would have no effect, or not the same on ranks.

    Raises:
        UserError: names the argument and what to do instead.
    """
    for name, remedy in _REFUSED_OF_TRL.items():
        if getattr(trainer, name, getattr(trainer.args, name, False)):
            refuse(name, True, remedy)
    for name in sorted(_OVER_A_BATCH.intersection(getattr(trainer, "loss_types", ()))):
        refuse("loss_type", name, "Use a loss that is a mean over pairs, such as 'sigmoid'.")


def take_model(trainer: Trainer, model: nn.Module) -> None:
    """Let a Trainer's own methods use a model, and its reference (of DPO) be on the same device."""
    trainer.model = trainer.model_wrapped = model
    vars(trainer)["log"] = lambda *_, **__: None  # of `compute_loss`: its trackers would begin
    reference, device = getattr(trainer, "ref_model", None), next(model.parameters()).device
    if isinstance(reference, nn.Module) and next(reference.parameters()).device != device:
        reference.to(device)


def noting_uncalled(trainer: Trainer, data: Callable[[], Splits]) -> Splits:
    """Return the data, and notes of a Trainer's own methods and script that are not called."""
    splits, shown = data(), "log save_model _save _save_checkpoint _load_best_model"
    kind, notes = type(trainer), list(vars(trainer).get("_not_run", ()))
    named = f"{kind.__name__}{defined_at(kind)}"
    if own := _own(kind, f"{shown} {_EVALUATE}"):
        without = "" if evaluates(kind) else ", so nothing is evaluated"
        notes.append(f"{named} has its own {listed(own)}: not called{without}.")
    code = getattr(inspect.unwrap(kind.compute_loss), "__code__", None)
    if has_own(kind, "compute_loss") and "log" in getattr(code, "co_names", ()):
        notes.append(f"What compute_loss of {named} logs is not recorded.")
    return replace(splits, notes=(*splits.notes, *notes))


def ordered_by(trainer: Trainer, data: Callable[[], Splits]) -> Splits:
    """Return the data in the order of a Trainer's own sampler."""
    splits, sampler = data(), trainer._get_train_sampler()  # noqa: SLF001 - the user's method
    return replace(splits, train=Unpacked(cast("Any", splits.train), default_collate, sampler))


def loaded_by(trainer: Trainer, data: Callable[[], Splits]) -> Splits:
    """Return the data in the order of a Trainer's own training loader.

    Raises:
        UserError: it puts samples together in another way than the Trainer.
    """
    splits, prepared = data(), vars(trainer.accelerator)
    prepared["prepare"] = lambda *given, **_: given[0] if len(given) == 1 else given
    try:
        loader: Any = trainer.get_train_dataloader()
    finally:
        del prepared["prepare"]
    collate = getattr(loader, "collate_fn", None)
    if getattr(collate, "data_collator", collate) not in (trainer.data_collator, default_collate):
        raise UserError(
            f"The loader of {type(trainer).__name__}.get_train_dataloader has a collate_fn that "
            f"is not the Trainer's data_collator{defined_at(collate)}.",
            remedy="Pass it to the Trainer as data_collator.",
        )
    train: Any = without_loaders(Splits(train=loader), None).train
    if isinstance(train, Unpacked):
        size = None if train.batch_size == trainer.args.train_batch_size else train.batch_size
        train = replace(train, collate=default_collate, batch_size=size)
    return replace(splits, train=train)


def optimizer_of(trainer: Trainer, model: nn.Module, _: Settings) -> torch.optim.Optimizer:
    """Return the optimizer that a Trainer's own methods make for a model."""
    trainer.model, trainer.optimizer = model, None
    optimizer: torch.optim.Optimizer = trainer.create_optimizer() or trainer.optimizer
    return optimizer


def schedule_of(trainer: Trainer, optimizer: torch.optim.Optimizer, plan: Any) -> Any:
    """Return the scheduler that a Trainer's own `create_scheduler` makes."""
    trainer.lr_scheduler = None
    return trainer.create_scheduler(plan.total_steps, optimizer) or trainer.lr_scheduler


ORDERED = {"_get_train_sampler": ordered_by, "get_train_dataloader": loaded_by}
"""What takes the order from a Trainer's own method; its own loader decides last."""
