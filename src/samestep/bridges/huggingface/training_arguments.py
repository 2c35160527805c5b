"""What becomes of each of `transformers.TrainingArguments`: a setting, nothing, or a refusal."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import DistributedType, PartialState
from transformers import TrainingArguments

from samestep.base.errors import UserError, defined_at
from samestep.core.recipe import being_read

_TAKEN = """
    per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps max_steps
    num_train_epochs learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio
    optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm bf16 fp16 tf32
    label_smoothing_factor label_names seed data_seed full_determinism use_cpu no_cuda use_cache
    activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing
    gradient_checkpointing_kwargs logging_strategy logging_steps eval_strategy eval_steps
    save_strategy save_steps save_total_limit load_best_model_at_end metric_for_best_model
    greater_is_better dataloader_drop_last dataloader_num_workers remove_unused_columns
    train_sampling_strategy group_by_length length_column_name prediction_loss_only
    ddp_find_unused_parameters ddp_bucket_cap_mb ddp_static_graph accelerator_config
    predict_with_generate generation_max_length generation_num_beams
"""
_WITHOUT_EFFECT = """
    output_dir overwrite_output_dir do_train do_eval do_predict average_tokens_across_devices
    torch_empty_cache_steps logging_dir logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen include_tokens_per_second log_level log_level_replica disable_tqdm
    report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
    eval_on_start eval_use_gather_object eval_accumulation_steps save_only_model save_on_each_node
    save_safetensors enable_jit_checkpoint hub_token hub_private_repo hub_model_id hub_strategy
    hub_always_push hub_revision ignore_data_skip resume_from_checkpoint debug skip_memory_metrics
    restore_callback_states_from_checkpoint dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order local_rank
    ddp_broadcast_buffers ddp_backend ddp_timeout fsdp_config fp16_backend half_precision_backend
"""
"""They change where a training writes, what it shows or how fast it is, or nothing here."""
_KNOWN = frozenset(f"{_TAKEN}{_WITHOUT_EFFECT}".split())
_COMPILES = ("torch_compile", "torch_compile_backend", "torch_compile_mode")
_ALL_AT_ONCE = "compute_metrics gets the predictions and labels of all samples at once."
_REFUSED = {
    "deepspeed": "Use --strategy fsdp: it shards weights, gradients and optimizer state.",
    "fsdp": "Leave it out and add --strategy fsdp.",
    "parallelism_config": "Use --strategy fsdp to shard the model.",
    **dict.fromkeys(_COMPILES, "Leave it out and add --compile on."),
    "neftune_noise_alpha": "Add the noise in the forward pass of the model's embedding layer.",
    "use_liger_kernel": "Apply the kernels to the model before you pass it on.",
    "push_to_hub": "Leave it out, and call samestep.load(run).push_to_hub(…) later.",
    "auto_find_batch_size": "Use a smaller --micro-batch-size: the training stays the same.",
    "batch_eval_metrics": _ALL_AT_ONCE,
    "include_for_metrics": _ALL_AT_ONCE,
    "include_inputs_for_metrics": _ALL_AT_ONCE,
    "eval_do_concat_batches": _ALL_AT_ONCE,
    **dict.fromkeys(
        ("bf16_full_eval", "fp16_full_eval"),
        "Leave it out: evaluations have the precision of the training.",
    ),
    "generation_config": "Leave it out, and set model.generation_config.",
    "sortish_sampler": "Use group_by_length instead.",
    "eval_delay": "Set the interval with --eval-every.",
}
"""Arguments that change a training and are refused, and what to do instead."""
_OWN_OPTIMIZER = "Create it yourself: optimizers=(optimizer, None)."
_OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adamw_hf", "sgd", "adagrad", "rmsprop", "adafactor"),
    *("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
)


def check_arguments(args: TrainingArguments) -> None:
    """Refuse arguments that would change the training and have no counterpart.

    Raises:
        UserError: names the argument, its value, and what to do instead.
    """
    unknown = "samestep does not know this argument. Leave it out."
    for name, value in _unlike_default(args):
        refuse(name, value, _REFUSED.get(name, unknown))
    if args.optim not in _OPTIMIZERS:
        refuse("optim", str(args.optim.value), _OWN_OPTIMIZER)
    if args.data_seed not in (None, args.seed):
        refuse("data_seed", args.data_seed, "Leave it out: --seed seeds the data, too.")
    if args.accelerator_config.split_batches:
        refuse("accelerator_config", "split_batches", "Set batch_size=….")
    if args.max_steps <= 0 and args.num_train_epochs != int(args.num_train_epochs):
        refuse("num_train_epochs", args.num_train_epochs, "Set max_steps=….")
    for name in ("eval", "save"):
        every = getattr(args, f"{name}_steps")
        if getattr(args, f"{name}_strategy") == "steps" and every != int(every):
            refuse(f"{name}_steps", every, "Set a whole number of steps.")
    if args.lr_scheduler_type == "greedy":
        refuse("lr_scheduler_type", "greedy", "Use reduce_lr_on_plateau, which follows --monitor.")
    if getattr(args, "train_sampling_strategy", "") == "batch_rebalance":
        refuse("train_sampling_strategy", "batch_rebalance", "Use group_by_length instead.")


def _unlike_default(args: TrainingArguments) -> Iterator[tuple[str, Any]]:
    # What a class of the user's or of TRL's adds is read by its own Trainer only.
    of_transformers = (k for k in type(args).__mro__ if k.__module__.startswith("transformers."))
    for f in (field for field in fields(next(of_transformers)) if field.init):
        value, default = getattr(args, f.name, None), f.default
        if default is MISSING:
            default = f.default_factory() if f.default_factory is not MISSING else None
        if f.name not in _KNOWN and value != default and (value or default):
            yield f.name, value


def refuse(name: str, value: Any, remedy: str) -> None:
    """Refuse an argument of a Trainer."""
    what = f"samestep.huggingface.recipe(…) does not take TrainingArguments({name}={value!r:.80})."
    raise UserError(what, remedy=remedy)


def groups_by_length(args: TrainingArguments) -> bool:
    """Whether samples of similar length share a batch."""
    chosen = getattr(args, "train_sampling_strategy", "")
    return chosen == "group_by_length" or bool(getattr(args, "group_by_length", False))


def uses_fp16(args: TrainingArguments) -> bool:
    """Whether a Trainer would compute in fp16: it ignores that on a CPU."""
    return args.fp16 and not args.use_cpu and torch.accelerator.is_available()


def settings_of(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings that arguments stand for, those of one process."""
    samples, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    by_steps = {n: getattr(args, f"{n}_strategy") == "steps" for n in ("logging", "eval", "save")}
    best, mixed = args.metric_for_best_model, args.bf16 or uses_fp16(args)
    sequential = getattr(args, "train_sampling_strategy", "") == "sequential"
    all_epochs = args.max_steps if args.max_steps > 0 else int(args.num_train_epochs)
    settings: dict[str, Any] = {
        "batch_size": samples * accumulated,
        "micro_batch_size": samples if accumulated > 1 else None,
        "eval_batch_size": args.per_device_eval_batch_size,
        "drop_last": args.dataloader_drop_last,
        "order": "sequential" if sequential else None,
        "group_by_length": groups_by_length(args),
        "max_steps": args.max_steps if args.max_steps > 0 else None,
        "epochs": None if args.max_steps > 0 else all_epochs,
        "lr": args.learning_rate,
        "weight_decay": args.weight_decay,
        "clip_norm": args.max_grad_norm or None,
        "precision": ("bf16" if args.bf16 else "fp16") if mixed else None,
        "matmul_precision": {None: None, True: "high", False: "highest"}[args.tf32],
        "seed": args.seed,
        "deterministic": args.full_determinism,
        "device": "cpu" if args.use_cpu else None,
        "num_workers": args.dataloader_num_workers,
        "find_unused": bool(args.ddp_find_unused_parameters),
        "static_graph": bool(getattr(args, "ddp_static_graph", False)),
        "bucket_cap_mb": args.ddp_bucket_cap_mb,
        "log_every": (by_steps["logging"] and int(args.logging_steps)) or None,
        "eval_every_steps": int(args.eval_steps) if by_steps["eval"] else None,
        # Early stopping and plateaus count evaluations: there are none after epochs then.
        "eval_every_epochs": all_epochs if by_steps["eval"] else None,
        "checkpoint_every_steps": int(args.save_steps) if by_steps["save"] else None,
        "keep_top_k": 1 if args.save_strategy == "best" else None,
        "keep_newest": args.save_total_limit or None,
        "monitor": best and best.removeprefix("eval_"),
        "mode": ("max" if args.greater_is_better else "min") if best else None,
    }
    return {name: value for name, value in settings.items() if value is not None}


def check_data(name: str, data: Any) -> None:
    """Refuse data that a recipe could not train or evaluate on.

    Raises:
        UserError: names the data set, and what to give instead.
    """
    if name == "eval" and isinstance(data, Mapping):
        for of_it in data.values():
            check_data("", of_it)
        return
    if isinstance(data, Mapping):
        raise UserError(
            f"{name}_dataset is a dict of {len(data)} data sets; a recipe takes one.",
            remedy="Give one of them, or join them with torch.utils.data.ConcatDataset.",
        )
    known = data is None or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))
    if name != "train" and not known:
        raise UserError(
            f"{name}_dataset is a stream, a {type(data).__name__}{defined_at(type(data))}.",
            remedy="Evaluate on a map-style data set: load_dataset(…, streaming=False).",
        )
    if name == "train" and data is None:
        raise UserError("samestep.huggingface.recipe(…) needs a train_dataset.")


def settings_of_weights(model: Any) -> dict[str, Any]:
    """Return the settings of a model whose weights are all in bfloat16; others become float32."""
    types = {p.dtype for p in model.parameters()} if isinstance(model, torch.nn.Module) else None
    return {"precision": "bf16", "param_dtype": "bf16"} if types == {torch.bfloat16} else {}


_OF_RANKS = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


_FIRST = {"process_index": 0, "local_process_index": 0, "num_processes": 1, "is_main_process": True}
_ALONE = SimpleNamespace(distributed_type=DistributedType.NO, is_local_main_process=True, **_FIRST)
"""What arguments made in a recipe file say of their ranks; TRL asks for it."""


def leave_ranks_alone() -> None:
    """Keep arguments and trainers that a recipe file makes from connecting the ranks.

    They would also put the model on the first GPU, in each of the ranks.
    """
    devices: Any = vars(TrainingArguments)["_setup_devices"]
    real = getattr(devices, "func", None) or devices.fget
    joins: Callable[..., None] = PartialState.__init__

    def on_cpu(args: Any) -> torch.device:
        if being_read() is None:
            return real(args)  # type: ignore[no-any-return]
        args.distributed_state, args._n_gpu = _ALONE, 0  # noqa: SLF001
        return torch.device("cpu")

    @functools.wraps(joins)
    def alone(state: Any, *args: Any, **kwargs: Any) -> None:
        kept = {n: os.environ.pop(n) for n in _OF_RANKS if being_read() and n in os.environ}
        try:
            joins(state, *args, **kwargs)
        finally:
            os.environ.update(kept)

    made = functools.cached_property(on_cpu)
    made.__set_name__(TrainingArguments, "_setup_devices")
    TrainingArguments._setup_devices = made  # noqa: SLF001
    PartialState.__init__ = alone
