"""What becomes of each argument of Lightning's Trainer: a setting, nothing, or a refusal."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, SequentialSampler, Subset

from samestep.base.errors import UserError, defined_at, listed
from samestep.bridges.lightning.logged import NTH, plain_name
from samestep.bridges.lightning.own_hooks import hooks_of_callback

_TAKEN = {
    *("max_epochs", "max_steps", "accumulate_grad_batches", "devices", "num_nodes", "callbacks"),
    *("gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps", "sync_batchnorm"),
    *("benchmark", "deterministic", "precision", "strategy", "accelerator"),
    *("check_val_every_n_epoch", "val_check_interval", "fast_dev_run"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches"),
}
_WITHOUT_EFFECT = {
    *("num_sanity_val_steps", "enable_checkpointing", "enable_progress_bar", "logger", "profiler"),
    *("enable_model_summary", "inference_mode", "use_distributed_sampler", "default_root_dir"),
    *("enable_autolog_hparams", "barebones", "limit_predict_batches", "model_registry"),
}
"""They change what a training shows, where it writes or how it shares out data."""
_SHOWS = {
    *("ProgressBar", "ModelSummary", "LearningRateMonitor", "DeviceStatsMonitor"),
    *("ThroughputMonitor", "SaveConfigCallback"),
}
"""Callbacks, or what they are made from, that change no training."""
_INSTEAD = {
    "StochasticWeightAveraging": "Leave it out. --ema 0.99 averages the weights of all steps.",
    "EMAWeightAveraging": "Leave it out, and use --ema with its decay.",
    "GradientAccumulationScheduler": "Give the Trainer accumulate_grad_batches=N instead.",
    "BackboneFinetuning": "Unfreeze in the module's on_train_epoch_end instead.",
}
"""What to do about Lightning's callbacks that are not called."""
_SUBSET = "Give a loader of torch.utils.data.Subset(data, range(…))."
_LEAVE_OUT = "Leave it out."
_REFUSED = {
    "min_epochs": _LEAVE_OUT,
    "min_steps": _LEAVE_OUT,
    "max_time": "Leave it out: samestep slurm submit --time stops a job in time, and resumes it.",
    "overfit_batches": _SUBSET,
    "detect_anomaly": "Call torch.autograd.set_detect_anomaly(True).",
    "reload_dataloaders_every_n_epochs": "Let the data set choose what it reads by the index.",
    "plugins": _LEAVE_OUT,
}
_OF_SEVERAL = {"keep_top_k": max, "checkpoint_every_steps": min, "checkpoint_every_epochs": min}
"""Settings of several ModelCheckpoints, and which of their values is taken."""
LIMITS = {"train": "limit_train_batches", "test": "limit_test_batches"}
LIMITS |= {"validation": "limit_val_batches"}
_ALL = {"min_epochs": 1}
"""Values that say what is done anyway."""
_MIXED = {"32": None, "64": "fp64", "16": "fp16", "bf16": "bf16"}
_PRECISIONS: dict[str, dict[str, Any]] = {
    "None": {},
    **{name: {"precision": value} for name, value in _MIXED.items()},
    **{f"{name}-mixed": {"precision": _MIXED[name]} for name in ("16", "bf16")},
    **{f"{name}-true": {"precision": _MIXED[name]} for name in ("32", "64")},
    "bf16-true": {"precision": "bf16", "param_dtype": "bf16"},
}
_STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("auto", "ddp", "ddp_spawn", "ddp_fork", "ddp_notebook")},
    "ddp_find_unused_parameters_false": {},
    "ddp_find_unused_parameters_true": {"find_unused": True},
    "fsdp": {"strategy": "fsdp"},
}
_DEVICES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("auto", "gpu", "cuda")},
    **{name: {"device": name} for name in ("cpu", "mps")},
}


_OF_TRAINER = """
    max_epochs=epochs accumulate_grad_batches=micro_batch_size gradient_clip_val=clip_norm
    check_val_every_n_epoch=eval_every_epochs val_check_interval=eval_every_steps devices=--nproc
    log_every_n_steps=log_every logger=track callbacks=patience,monitor,keep_top_k,ema
    ckpt_path=--resume num_nodes=--nodes benchmark=cudnn_benchmark fast_dev_run=max_steps
    limit_train_batches=Subset(data) overfit_batches=Subset(data)
"""
"""Arguments of Lightning's Trainer, and the settings or flags that say the same here."""


def refuse_own_names(settings: Mapping[str, Any]) -> None:
    """Refuse arguments of a Trainer among the settings of a recipe."""
    for name, own in (pair.split("=") for pair in _OF_TRAINER.split()):
        if name in settings:
            raise UserError(
                f"samestep.lightning.recipe(…) takes settings, but {name} is the Trainer's.",
                remedy=f"Use {own.replace(',', ', ')}: see page “Bring what you have”.",
            )


def settings_of_trainer(given: Mapping[str, Any], loaders_batch: int) -> dict[str, Any]:
    """Return the settings that the arguments of a Trainer stand for.

    Args:
        given: the arguments that are not as by default, by their names.
        loaders_batch: the samples in a batch of the training loader, of one rank.

    Raises:
        UserError: names the argument that has no counterpart, and what to do instead.
    """
    unknown = "samestep does not know this argument. Leave it out."
    for name in given.keys() - _TAKEN - _WITHOUT_EFFECT:
        if given[name] != _ALL.get(name):
            refuse(name, given[name], _REFUSED.get(name, unknown))
    per_rank = loaders_batch * (accumulated := given.get("accumulate_grad_batches") or 1)
    half = _chosen(given, "precision", "None", _PRECISIONS)
    if half == _PRECISIONS["16-mixed"] and on_cpu(given):
        half = _PRECISIONS["bf16-mixed"]  # as the Trainer does
    settings: dict[str, Any] = {
        **_length(given, accumulated),
        "batch_size": per_rank * num_ranks(given),
        "micro_batch_size": loaders_batch if accumulated > 1 else None,
        "clip_norm": None if clip_value(given) else given.get("gradient_clip_val") or None,
        "log_every": given.get("log_every_n_steps") or None,
        "sync_batchnorm": given.get("sync_batchnorm") or None,
        "cudnn_benchmark": given.get("benchmark") or None,
        "deterministic": given.get("deterministic") is True or None,  # or "warn"
        **half,
        **_chosen(given, "strategy", "auto", _STRATEGIES),
        **_chosen(given, "accelerator", "auto", _DEVICES),
        **_evaluations(given, accumulated, given.get("max_epochs")),
    }
    settings |= _of_callbacks(given)
    return {name: value for name, value in settings.items() if value is not None}


def _of_callbacks(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict[str, Any]()
    for callback in callbacks_of(given):
        for name, value in _of_callback(callback).items():
            if name in _OF_SEVERAL:
                settings[name] = _OF_SEVERAL[name](value, settings.get(name, value))
            elif settings.setdefault(name, value) != value and name not in ("monitor", "mode"):
                raise UserError(
                    f"Two callbacks of the Trainer disagree on {name}: {settings[name]!r} and "
                    f"{value!r}. samestep uses one value for both.",
                    remedy="Give both the same, or leave one of the callbacks out.",
                )
    stops = settings.pop("stop_monitor", None)
    if stops and "monitor" not in settings:
        settings["monitor"], _, settings["mode"] = stops.rpartition(":")
    if stops and stops != "{monitor}:{mode}".format(**settings):
        settings["stop_monitor"] = stops
    return settings


def clip_value(given: Mapping[str, Any]) -> float | None:
    """Return the most that a number of a gradient may be, where a Trainer clips by value."""
    algorithm = given.get("gradient_clip_algorithm") or "norm"
    if str(algorithm).lower() not in ("norm", "value"):
        refuse("gradient_clip_algorithm", algorithm, "Clip by “norm” or by “value”.")
    by_value = str(algorithm).lower() == "value"
    return given.get("gradient_clip_val") or None if by_value else None


def refuse(name: str, value: Any, remedy: str) -> None:
    """Refuse an argument of a Trainer."""
    raise UserError(f"Trainer({name}={value!r:.60}) has no counterpart in samestep.", remedy=remedy)


def _length(given: Mapping[str, Any], accumulated: int) -> dict[str, Any]:
    epochs, steps = given.get("max_epochs"), given.get("max_steps", -1)
    if few := int(given.get("fast_dev_run") or 0):
        return {"epochs": 1, "max_steps": -(-few // accumulated)}
    if epochs == steps == -1:
        refuse("max_epochs", -1, "Set a number of epochs, or max_steps.")
    if epochs is None and steps == -1:
        epochs = 1000
    whole = {"epochs": epochs, "max_steps": steps}
    return {name: None if number == -1 else number for name, number in whole.items()}


def on_cpu(given: Mapping[str, Any]) -> bool:
    """Whether the Trainer would train on a CPU."""
    device = str(given.get("accelerator", "auto"))
    # A build for CUDA names its accelerator where there is none.
    return device == "cpu" or (device == "auto" and not torch.accelerator.is_available())


def limited(loader: Any, stage: str, given: Mapping[str, Any]) -> Any:
    """Return a loader's data, or of those first batches to which a script's Trainer limits it."""
    name = LIMITS.get(stage, LIMITS["validation"])
    limit, batches = given.get(name, 1.0), loader.batch_sampler
    if limit == 1.0 and isinstance(limit, float):
        return loader.dataset
    each = limit * num_ranks(given) if isinstance(limit, int) else None  # the Trainer's is a rank's
    number = int(len(loader) * limit) if each is None else each
    if type(batches) is not BatchSampler or type(batches.sampler) is not SequentialSampler:
        refuse(name, limit, _SUBSET)
    return Subset(loader.dataset, range(min(len(loader.dataset), number * batches.batch_size)))


def num_ranks(given: Mapping[str, Any]) -> int:
    """Return for how many ranks the script asks; those of all devices are taken for one."""
    devices = given.get("devices", "auto")
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        devices = len(devices)
    number = int(devices) if str(devices).isdigit() else 1
    return max(1, number) * int(given.get("num_nodes") or 1)


def _chosen(
    given: Mapping[str, Any], name: str, default: str, known: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    value = given.get(name, default)
    of_ddp = getattr(value, "_ddp_kwargs", None)
    more = ("_ddp_comm_hook", "_ddp_comm_wrapper", "_model_averaging_period")
    plain = not any(getattr(value, name, None) for name in more)
    if of_ddp is not None and plain and not of_ddp.keys() - {"find_unused_parameters"}:
        return {"find_unused": True} if of_ddp.get("find_unused_parameters") else {}
    if str(value) not in known:
        refuse(name, value, f"Use one of {', '.join(sorted(known.keys() - {'None'}))}.")
    return known[str(value)]


def _evaluations(given: Mapping[str, Any], accumulated: int, epochs: Any) -> dict[str, Any]:
    every, interval = given.get("check_val_every_n_epoch", 1), given.get("val_check_interval")
    once = interval is None or (isinstance(interval, float) and interval == 1.0)
    if once and every is not None:
        return {"eval_every_epochs": every}
    if not isinstance(interval, int) or every is not None or interval % accumulated:
        remedy = "Set check_val_every_n_epoch=None and a whole number of steps."
        refuse("val_check_interval", interval, remedy)
    steps = int(interval or 0) // accumulated
    only_the_last = epochs if epochs not in (None, -1) else 10**6
    return {"eval_every_steps": steps, "eval_every_epochs": only_the_last}


def _of_callback(callback: Any) -> dict[str, Any]:
    kind = type(callback)
    names = {base.__name__ for base in kind.__mro__ if _is_lightnings(base)}
    if _is_lightnings(kind) and kind.__name__ == "EarlyStopping":
        for name in ("stopping_threshold", "divergence_threshold"):
            if getattr(callback, name, None) is not None:
                refuse(f"EarlyStopping.{name}", getattr(callback, name), _LEAVE_OUT)
        delta = abs(callback.min_delta)
        follows = {"stop_monitor": "{monitor}:{mode}".format(**followed(callback))}
        return {**follows, "patience": callback.patience, "min_delta": delta}
    if _is_lightnings(kind) and kind.__name__ == "ModelCheckpoint":
        return dict(_kept(callback))
    if not _SHOWS & names and names != {"Callback"}:
        raise UserError(
            f"samestep does not call the Trainer's callback {kind.__name__}{defined_at(kind)}.",
            remedy=_INSTEAD.get(
                kind.__name__, "Move its code into hooks of the module, or leave it out."
            ),
        )
    return {}


def _is_lightnings(own: Any) -> bool:
    """Whether a class is Lightning's own, of `lightning` or of `pytorch_lightning`."""
    return re.match(r"(pytorch_)?lightning\.", own.__module__) is not None


def callbacks_of(given: Mapping[str, Any]) -> list[Any]:
    """Return the callbacks that a Trainer is given."""
    callbacks = given.get("callbacks") or ()
    return [*callbacks] if isinstance(callbacks, Sequence) else [callbacks]


def called_callbacks(given: Mapping[str, Any]) -> tuple[list[tuple[Any, list[str]]], list[str]]:
    """Return a script's own callbacks with the hooks that are called, and notes on the others."""
    called: list[tuple[Any, list[str]]] = []
    notes: list[str] = []
    for callback in callbacks_of(given):
        kind = type(callback)
        if _is_lightnings(kind) or any(b.__name__ in _SHOWS for b in kind.__mro__):
            continue
        hooks, missed = hooks_of_callback(callback)
        called.append((callback, hooks))
        if missed:
            what = f"{kind.__name__}{defined_at(kind)} has its own {listed(missed)}"
            notes.append(f"The callback {what}: not called.")
    return called, notes


def followed(callback: Any) -> dict[str, str]:
    """Return which value a callback follows, as samestep calls it."""
    if callback.monitor.startswith("train") or callback.monitor == "loss":
        raise UserError(
            f"{type(callback).__name__} monitors {callback.monitor!r}, a value of the training.",
            remedy="Monitor a value that validation_step logs, such as “val_loss”.",
        )
    name, _, loader = callback.monitor.partition(f"/{NTH}")
    of_loader = f"{NTH}{loader}/" if loader else ""
    return {"monitor": of_loader + plain_name(name), "mode": callback.mode}


def _kept(callback: Any) -> Iterator[tuple[str, Any]]:
    if callback.monitor is not None:
        yield from followed(callback).items()
        if callback.save_top_k > 0:
            yield "keep_top_k", callback.save_top_k
    if steps := callback._every_n_train_steps:  # noqa: SLF001 - it has no other name
        yield "checkpoint_every_steps", steps
    if (epochs := callback._every_n_epochs) > 1:  # noqa: SLF001
        yield "checkpoint_every_epochs", epochs
