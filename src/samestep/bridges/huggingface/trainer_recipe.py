"""What `transformers.Trainer` takes as a recipe: its model, loss, optimizer, schedule and metrics.

Loss, groups of weight decay and schedules are made by transformers itself. Order, shares, seeds,
precision and checkpoints are samestep's.
"""

import copy
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from accelerate.state import PartialState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_scheduler,
)
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother
from transformers.utils import find_labels

from samestep.base.errors import UserError, defined_at, listed
from samestep.base.settings import Settings
from samestep.base.trees import num_rows, tree_leaves
from samestep.bridges.huggingface import trainer_methods as methods
from samestep.bridges.huggingface import training_arguments as arguments
from samestep.bridges.huggingface.callbacks import (
    LoggingCallbacks,
    called_around_steps,
    check_held,
    settings_of_callbacks,
)
from samestep.bridges.huggingface.predictions import Predictions, generated, predicted
from samestep.core.data.recipe_data import is_stream
from samestep.core.learner.after_epoch import keeps_trained
from samestep.core.learner.model_state import copied
from samestep.core.recipe import Recipe, Splits
from samestep.launch.ranks.world import in_process_group

arguments.leave_ranks_alone()

_IGNORED = -100  # the label of what no loss counts
_NO_FP16 = (
    "TrainingArguments(fp16=True) has no effect on a CPU, as in the Trainer: it trains in fp32."
)
_SMOOTHED_BY = inspect.signature(LabelSmoother.__call__).parameters


def recipe(
    model: Any,
    args: TrainingArguments,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    compute_metrics: Callable[[EvalPrediction], Mapping[str, float]] | None = None,
    optimizers: tuple[Any, Any] = (None, None),
    *,
    test_dataset: Any = None,
    processing_class: Any = None,
    compute_loss_func: Callable[..., Tensor] | None = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    callbacks: Sequence[Any] | None = None,
    **settings: Any,
) -> Recipe:
    """Return what `transformers.Trainer` takes as a recipe.

        recipe = samestep.huggingface.recipe(model, args, train_dataset, eval_dataset)

    A step takes `per_device_train_batch_size × gradient_accumulation_steps` samples, as the Trainer
    on one process, on any number of ranks; `batch_size=…` is another number. A loss of tokens is
    the mean over all tokens of the step.

    Args:
        model: a model, or better a function that makes one: samestep seeds before the call.
        args: its training arguments; what has no counterpart is refused by name.
        train_dataset: a data set or a stream: of `datasets`, of PyTorch, or a list of dicts.
        eval_dataset: the validation data, or a dict of several.
        data_collator: puts samples into a batch; by default as in the Trainer.
        compute_metrics: called with the predictions of all ranks.
        optimizers: an optimizer of the model's parameters, and its scheduler; or None.
        test_dataset: what the trained model is tested on.
        processing_class: a tokenizer, which pads where no `data_collator` is given.
        compute_loss_func: (outputs, labels, num_items_in_batch) → the loss.
        preprocess_logits_for_metrics: (logits, labels) → what is kept for `compute_metrics`.
        callbacks: early stopping, and those that only log; others are refused.
        settings: as of `Recipe(settings=…)`, instead of what the arguments say.

    Raises:
        UserError: an argument has no counterpart, or validation data is a stream.
    """
    arguments.check_arguments(args)
    if isinstance(getattr(args, "distributed_state", None), PartialState) and in_process_group():
        raise UserError(
            "TrainingArguments(…) connected the ranks before samestep could.",
            remedy="Import samestep.huggingface at the top of the file, and start the file with: "
            "samestep train FILE.",
        )
    for name, data in (("train", train_dataset), ("eval", eval_dataset), ("test", test_dataset)):
        arguments.check_data(name, data)
    stops, called, uncalled = settings_of_callbacks(callbacks or ())
    pads = isinstance(processing_class, PreTrainedTokenizerBase)
    padding = DataCollatorWithPadding(processing_class) if pads else default_data_collator
    given = _ForTrainer(
        model=model,
        args=args,
        datasets=(train_dataset, eval_dataset, test_dataset),
        collator=data_collator or padding,
        optimizers=optimizers,
        loss_func=compute_loss_func,
        predicts=compute_metrics is not None and not args.prediction_loss_only,
        notes=(*uncalled, *([_NO_FP16] if args.fp16 and not arguments.uses_fp16(args) else [])),
        preprocess=preprocess_logits_for_metrics,
        processing_class=processing_class,
    )
    if isinstance(model, nn.Module):
        given.look_at(model)
    functions = compute_metrics, compute_loss_func, preprocess_logits_for_metrics
    check_held("What a recipe is given", [*filter(None, functions)], {})
    derived = arguments.settings_of(args) | stops
    if is_stream(train_dataset):
        derived.pop("order", None)  # it comes as it comes, for the Trainer, too
    if "precision" not in settings:
        derived |= arguments.settings_of_weights(model)
    monitor = derived.get("monitor", "")  # of several, Trainer's eval_NAME_accuracy
    by_name = eval_dataset if isinstance(eval_dataset, Mapping) else ()
    if names := [name for name in by_name if monitor.startswith(f"{name}_")]:
        of_it = max(names, key=len)
        derived["monitor"] = f"{of_it}/{monitor[len(of_it) + 1 :].removeprefix('eval_')}"
    if {"batch_size", "batch_size_per_rank", "batch_tokens", "global_batch_size"} & settings.keys():
        del derived["batch_size"]
    if "accumulate" in settings:
        derived.pop("micro_batch_size", None)
    if optimizers[0] is not None:
        derived["lr"] = max(g.get("initial_lr", g["lr"]) for g in optimizers[0].param_groups)
    made = Recipe(
        model=given.build,
        data=given.data,
        collate=given.collate,
        forward=given.forward,
        loss=_loss,
        loss_terms=given.terms,
        lengths=given.lengths if arguments.groups_by_length(args) else None,
        optimizer=given.optimizer,
        schedule=given.schedule,
        metrics={"compute_metrics": Predictions(compute_metrics)} if given.predicts else {},
        on_record=LoggingCallbacks(called, args, processing_class) if called else None,
        settings=derived | settings,
    )
    return called_around_steps(made)


def from_trainer(trainer: Trainer, *, test_dataset: Any = None, **settings: Any) -> Recipe:
    """Return a Trainer as a recipe: its model, arguments, data sets, collator and metrics.

        recipe = samestep.huggingface.from_trainer(trainer)

    Raises:
        UserError: as of `recipe`; or the Trainer's class has methods that would not be called.
    """
    kind = type(trainer)
    methods.check_methods(trainer)
    methods.check_of_trl(trainer)
    seen = methods.evaluates(kind)
    init = getattr(trainer, "model_init", None)
    base = recipe(
        init if init is not None else trainer.model,
        trainer.args,
        trainer.train_dataset,
        trainer.eval_dataset if seen else None,
        trainer.data_collator,
        trainer.compute_metrics if seen else None,
        (trainer.optimizer, trainer.lr_scheduler),
        test_dataset=test_dataset,
        processing_class=getattr(trainer, "processing_class", None),
        compute_loss_func=getattr(trainer, "compute_loss_func", None),
        preprocess_logits_for_metrics=trainer.preprocess_logits_for_metrics,
        callbacks=trainer.callback_handler.callbacks,
        **settings,
    )
    given: _ForTrainer = cast("Any", base.model).__self__
    parts: dict[str, Any] = {"data": functools.partial(methods.noting_uncalled, trainer, base.data)}
    if methods.has_own(kind, "_set_signature_columns_if_needed"):
        trainer._set_signature_columns_if_needed()  # noqa: SLF001 - the user's method
        given.about.kept = frozenset(trainer._signature_columns or ())  # noqa: SLF001
    if methods.has_own(kind, "compute_loss"):
        parts["forward"] = given.computed_by(trainer)
    for name, of in methods.ORDERED.items():
        if methods.has_own(kind, name):
            parts["data"] = functools.partial(of, trainer, parts["data"])
            not_its = {"order", "group_by_length"} - settings.keys()
            parts["settings"] = {n: v for n, v in base.settings.items() if n not in not_its}
    chosen = getattr(trainer, "optimizer_cls_and_kwargs", None)
    if chosen or any(methods.has_own(kind, name) for name in methods.OF_OPTIMIZER):
        parts["optimizer"] = functools.partial(methods.optimizer_of, trainer)
    if methods.has_own(kind, "create_scheduler"):
        parts["schedule"] = functools.partial(methods.schedule_of, trainer)
    if "forward" in parts:  # which may ask the Trainer's state how long the training is
        trainer.state.max_steps = max(1, trainer.args.max_steps)
        schedule = parts.get("schedule", base.schedule)
        parts["schedule"] = functools.partial(methods.with_length, trainer, given.about, schedule)
    return called_around_steps(replace(base, **parts))


def _map_style(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {name: _MapStyle(of_it) for name, of_it in data.items()}
    return data if data is None or is_stream(data) else _MapStyle(data)


def _loss(outputs: dict[str, Any], _batch: Any) -> Any:
    return outputs["loss"]


@dataclass(frozen=True)
class _MapStyle(Dataset[Any]):
    """A map-style data set of any kind."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


@dataclass
class _About:
    """What a model's class says of its batches."""

    columns: frozenset[str] = frozenset()
    """What its forward takes."""
    kept: frozenset[str] = frozenset()
    """The columns that a Trainer's own method names instead."""
    labels: tuple[str, ...] = ("labels",)
    shifts: bool = False
    """Whether position i predicts label i + 1."""
    takes_items: bool = False
    """Whether its forward takes `num_items_in_batch`."""
    by_sample: bool = False
    """Whether its loss is a mean over samples, whose labels are texts (CTC)."""
    smoother: LabelSmoother | None = None
    not_predicted: frozenset[str] = frozenset({"loss", "past_key_values"})
    steps_per_epoch: int = 1


@dataclass(frozen=True)
class _ForTrainer:
    """What a Trainer is given, as the functions of a recipe."""

    model: Any
    args: TrainingArguments
    datasets: tuple[Any, Any, Any]
    collator: Callable[[list[Any]], Any]
    optimizers: tuple[Any, Any]
    loss_func: Callable[..., Tensor] | None
    predicts: bool
    notes: tuple[str, ...]
    preprocess: Callable[[Any, Any], Any] | None
    processing_class: Any = None
    about: _About = field(default_factory=_About)

    def build(self) -> nn.Module:
        """Make the model, or copy it."""
        given, args = self.model, self.args
        model: Any = copied(given) if isinstance(given, nn.Module) else None
        if model is None:
            model = given(None) if "trial" in inspect.signature(given).parameters else given()
        if args.gradient_checkpointing:
            options = {"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})}
            # Transformers 6 will know only the newer name.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)(options)
        if hasattr(model, "config"):
            model.config.use_cache = getattr(args, "use_cache", False)
        self.look_at(model)
        return model  # type: ignore[no-any-return]

    def look_at(self, model: Any) -> None:
        """Learn what the model takes; refuse a loss that compares the samples of a batch."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        kind, config = type(base), getattr(base, "config", None)
        labels = self.args.label_names
        labels = find_labels(kind) if labels is None else labels
        takes = inspect.signature(base.forward).parameters
        if not labels and "return_loss" in takes and self.loss_func is None:
            raise UserError(
                f"The loss of {kind.__name__} compares the samples of a batch with each other.",
                remedy='Write a Recipe with loss_over="batch", which gets the whole batch.',
            )
        if not labels and self.predicts:  # the Trainer would not call it, and not say so
            raise UserError(
                "compute_metrics needs labels, and samestep cannot tell which arguments of "
                f"{kind.__name__}.forward{defined_at(kind)} are labels.",
                remedy='Name them: TrainingArguments(…, label_names=["labels"]).',
            )
        variable = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        about, eps = self.about, self.args.label_smoothing_factor
        about.columns = frozenset({*takes, "label", "label_ids", *labels})
        about.labels = tuple(labels)
        causal = kind.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        by_type = LOSS_MAPPING.get(getattr(base, "loss_type", None)) is ForCausalLMLoss
        about.shifts = causal or (by_type and not getattr(config, "is_encoder_decoder", False))
        about.takes_items = getattr(base, "accepts_loss_kwargs", variable)
        about.by_sample = getattr(config, "ctc_loss_reduction", "") == "mean"
        many = getattr(config, "problem_type", None) == "multi_label_classification"
        about.smoother = LabelSmoother(epsilon=eps) if eps and not many else None
        ignored = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        about.not_predicted = frozenset({"loss", *ignored})

    def data(self) -> Splits:
        """Return the data sets."""
        train, held_out, test = map(_map_style, self.datasets)
        return Splits(train=train, validation=held_out, test=test, notes=self.notes)

    def collate(self, samples: list[Any]) -> Any:
        """Put samples into a batch, without columns that the model does not take."""
        if self.args.remove_unused_columns and isinstance(samples[0], Mapping):
            kept = self.about.kept or self.about.columns
            samples = [{n: value for n, value in sample.items() if n in kept} for sample in samples]
            if not samples[0]:
                raise UserError(
                    f"No column of the data is an argument of the model, which takes "
                    f"{listed(sorted(kept), 8)}.",
                    remedy="Tokenize the data, or set remove_unused_columns=False.",
                )
        return self.collator(samples)

    def lengths(self, data: _MapStyle) -> list[int]:
        """Return the length of each sample: its column of that name, or its tokens."""
        name = self.args.length_column_name
        if name in getattr(data.dataset, "column_names", ()):
            return list(data.dataset[name])
        return [len(data[place]["input_ids"]) for place in range(len(data))]

    def terms(self, batch: Any) -> Any:
        """Return how many labels a batch has, -100 left out; without them its samples."""
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.is_floating_point() or self.about.by_sample:
            tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
            # None: of pairs that are put one below the other, with scores.
            return num_rows(batch) or min((len(t) for t in tensors if t.ndim), default=1)
        if self.about.shifts and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(_IGNORED).sum()

    def forward(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the loss, and in evaluations what `compute_metrics` is given."""
        if (tokens := self.generated(model, batch)) is not None:
            return tokens
        return self.found(model, batch, *self._computed(model, dict(batch), self._items(batch)))

    def _items(self, batch: Any) -> dict[str, Tensor]:
        # A share without labels has a loss of 0 by this; its mean would be NaN.
        return {"num_items_in_batch": torch.as_tensor(self.terms(batch)).clamp(min=1)}

    def computed_by(self, trainer: Trainer) -> Callable[..., dict[str, Any]]:
        """Return the forward in which a Trainer's own `compute_loss` is called."""
        takes = inspect.signature(trainer.compute_loss).parameters

        def forward(model: nn.Module, batch: Any, *, step: int) -> dict[str, Any]:
            taken, state = step + (not model.training), trainer.state  # an evaluation follows it
            state.global_step, state.epoch = taken, taken / self.about.steps_per_epoch
            methods.take_model(trainer, model)
            if (tokens := self.generated(model, batch)) is not None:
                return tokens
            items = self._items(batch) if "num_items_in_batch" in takes else {}
            predicts = self.predicts and not model.training
            with keeps_trained(model, "compute_loss", trainer.compute_loss):
                given = trainer.compute_loss(model, dict(batch), return_outputs=predicts, **items)
            return self.found(model, batch, *(given if predicts else (given, None)))

        return forward

    def _computed(self, model: nn.Module, inputs: dict[str, Any], items: Any) -> tuple[Any, Any]:
        about, labels, more = self.about, None, {}
        if (self.loss_func or about.smoother) and "labels" in inputs:
            labels = inputs.pop("labels")
        elif about.takes_items and "labels" in inputs:
            more = items
        outputs = model(**inputs, **more)
        named = isinstance(outputs, Mapping)
        if self.loss_func is not None:
            loss = self.loss_func(outputs, labels, **items)
        elif about.smoother is not None and labels is not None:
            known = items if "num_items_in_batch" in _SMOOTHED_BY else {}
            loss = about.smoother(outputs, labels, shift_labels=about.shifts, **known)
        elif named and outputs.get("loss") is None:
            raise UserError(
                f"The model returned no loss, only {listed([*outputs], 8)}. Its inputs were "
                f"{listed([*inputs], 8)}.",
                remedy="Call the column of the labels “labels”, or pass compute_loss_func=….",
            )
        else:
            loss = outputs["loss"] if named else outputs[0]
        return loss, outputs

    def generated(self, model: nn.Module, batch: Any) -> dict[str, Any] | None:
        """Return the loss and what the model generates, if `compute_metrics` is given that."""
        wanted = getattr(self.args, "predict_with_generate", False)
        if model.training or not (wanted and self.predicts):
            return None
        how = self.about.smoother, self.processing_class, self.preprocess
        return generated(model, batch, self.args, *how)

    def found(self, model: nn.Module, batch: Any, loss: Any, outputs: Any) -> dict[str, Any]:
        """Return the loss of a batch, and in evaluations what `compute_metrics` is given."""
        if not self.predicts or model.training:
            return {"loss": loss}
        labels = tuple(batch.get(name) for name in self.about.labels)
        kept = self.about.not_predicted
        return {"loss": loss, **predicted(outputs, labels, kept, self.preprocess)}

    def optimizer(self, model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
        """Make the optimizer as the Trainer does, or the given one for this copy of the model."""
        if self.optimizers[0] is not None:
            return self._copied(self.optimizers[0], model)
        decayed = {*Trainer.get_decay_parameter_names(None, model)}
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if (n in decayed) is which], "weight_decay": decay}
            for which, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        kind, options = Trainer.get_optimizer_cls_and_kwargs(self.args, model)
        optimizer: torch.optim.Optimizer = kind(groups, **options | {"lr": settings.lr})
        return optimizer

    def _copied(self, given: Any, model: nn.Module) -> torch.optim.Optimizer:
        if not isinstance(self.model, nn.Module):
            raise UserError(
                "optimizers=(…) has an optimizer, but the model is given as a function.",
                remedy="Pass the model itself, the one whose parameters the optimizer has.",
            )
        names = {id(p): n for n, p in self.model.named_parameters()}
        own = dict(model.named_parameters())
        copied: torch.optim.Optimizer = copy.copy(given)
        groups = [dict(group) for group in given.param_groups]
        for group in groups:
            group["params"] = [own[names[id(p)]] for p in group["params"]]
            group["lr"] = group.get("initial_lr", group["lr"])
        state: dict[str, Any] = {"defaults": given.defaults, "state": defaultdict(dict)}
        copied.__setstate__(state | {"param_groups": groups})
        return copied

    def schedule(self, optimizer: torch.optim.Optimizer, plan: Any) -> Any:
        """Make the schedule as the Trainer does, or the given one for this optimizer."""
        given, total = self.optimizers[1], plan.total_steps
        if given is None:
            return get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=self.args.get_warmup_steps(total),
                num_training_steps=total,
                scheduler_specific_kwargs=self.args.lr_scheduler_kwargs,
            )
        if hasattr(given, "_schedulers"):
            raise UserError(
                f"optimizers=(…) has a {type(given).__name__}, which combines several schedulers.",
                remedy="Set it in the recipe: dataclasses.replace(recipe, schedule=lambda "
                "optimizer: …).",
            )
        LambdaLR(optimizer, lambda _: 1.0)  # a new scheduler lets its optimizer count its steps
        for group, own in zip(optimizer.param_groups, given.optimizer.param_groups, strict=True):
            group.update({n: own[n] for n in ("lr", "initial_lr") if n in own})
        copied = copy.copy(given)
        copied.optimizer = optimizer
        return copied
