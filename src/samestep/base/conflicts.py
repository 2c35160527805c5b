"""Which settings do not go together, and why; `Settings` raises what is found here."""

from typing import Any, NamedTuple

_Allowed = dict[str, tuple[tuple[object, ...], str]]
"""Setting → the values that it may have, and why it may have no other."""

_WITH_VIRTUAL_RANKS: _Allowed = {
    "sync_batchnorm": (
        (False,),
        "each virtual rank normalises over its own samples, on any number of ranks",
    ),
    "engine": (("native",), "Lightning's DDP adds up the gradients in its own order"),
    "strategy": (
        ("ddp",),
        "virtual ranks add up whole gradients in a fixed order, FSDP their parts in its own",
    ),
}
_WITH_FSDP: _Allowed = {
    "engine": (("native",), "Lightning's engine trains with Lightning's own DDP"),
    "precision": (
        ("fp32", "bf16", "fp64"),
        (
            "the gradient scaler of fp16 would check each rank's shard of the gradients "
            "separately. bf16 needs no scaler"
        ),
    ),
    "channels_last": ((False,), "FSDP shards only contiguous weights"),
    "find_unused": (
        (False,),
        (
            "FSDP waits for every gradient of a block on every rank; a parameter that no rank ever "
            "uses can be frozen"
        ),
    ),
    "static_graph": ((False,), "it is a promise to DDP"),
    "bucket_cap_mb": ((None,), "FSDP reduces gradients block by block, not in buckets"),
    "sync_batchnorm": ((False,), "they have not been tested together"),
    "track_checkpoints": ((False,), "a tracker takes one file, and each rank writes its own"),
}
_WITH_DDP: _Allowed = {
    "shard_within": (("all",), "DDP shards nothing"),
    "reshard_after_forward": ((True,), "DDP gathers no weights, so there are none to free"),
    "gather_dtype": ((None,), "DDP gathers no weights"),
    "cpu_offload": ((False,), "only shards can be kept in the CPU's memory"),
}


class Conflict(NamedTuple):
    """Two settings that do not go together, for an error."""

    message: str
    flags: tuple[str, str]
    remedy: str = "Leave one of them out."


def conflict_in(settings: Any) -> Conflict | None:
    """Return the first pair of settings that contradict each other, if any do."""
    is_fsdp = settings.strategy == "fsdp"
    own = _conflict(settings, _WITH_FSDP if is_fsdp else _WITH_DDP, "strategy", settings.strategy)
    virtual = settings.virtual_ranks is not None
    if settings.cudnn_benchmark and (settings.deterministic or virtual):
        return Conflict(
            "--cudnn-benchmark does not go with --deterministic: it may choose other kernels.",
            ("cudnn_benchmark", "deterministic"),
        )
    if settings.momentum and settings.optimizer != "sgd":
        return Conflict(
            f"--momentum {settings.momentum} has no effect with --optimizer {settings.optimizer}.",
            ("momentum", "optimizer"),
            "Leave it out, or use --optimizer sgd.",
        )
    if settings.stop_monitor and settings.patience is None:
        return Conflict(
            f"--stop-monitor {settings.stop_monitor} has no effect without --patience.",
            ("stop_monitor", "patience"),
            "Add --patience N, the number of evaluations to wait, or leave it out.",
        )
    return (
        _schedule_conflict(settings)
        or _order_conflict(settings)
        or (virtual and _conflict(settings, _WITH_VIRTUAL_RANKS, "virtual_ranks", ""))
        or own
    )


def _schedule_conflict(settings: Any) -> Conflict | None:
    schedule, end = settings.schedule, settings.lr_end
    if end and schedule == "constant":
        return Conflict(
            f"--lr-end {end} has no effect with --schedule constant: the rate stays.",
            ("lr_end", "schedule"),
            "Leave it out, or choose another schedule.",
        )
    if end > settings.lr:
        return Conflict(
            f"--lr-end {end} is above --lr {settings.lr}, where the schedule starts.",
            ("lr_end", "lr"),
            "Choose a lower --lr-end.",
        )
    if settings.lr_power != 1 and schedule != "polynomial":
        return Conflict(
            f"--lr-power {settings.lr_power} has no effect with --schedule {schedule}.",
            ("lr_power", "schedule"),
            "Leave it out, or use --schedule polynomial.",
        )
    return None


def _order_conflict(settings: Any) -> Conflict | None:
    order = settings.order
    if settings.group_by_length and order != "shuffled":
        return Conflict(
            f"--group-by-length does not go with --order {order}: it is an order itself.",
            ("group_by_length", "order"),
        )
    if settings.drop_last and order in ("replacement", "weighted"):
        return Conflict(
            f"--drop-last does not go with --order {order}: no draw is left over.",
            ("drop_last", "order"),
            "Leave it out; --max-steps sets another length.",
        )
    return None


def _conflict(settings: Any, table: _Allowed, other: str, chosen: str) -> Conflict | None:
    for name, (allowed, why) in table.items():
        value = getattr(settings, name)
        if value in allowed:
            continue
        flag = name.replace("_", "-")
        typed = f"--no-{flag}" if value is False else f"--{flag}"
        if not isinstance(value, bool):
            typed += f" {value}"
        with_what = f"--{other.replace('_', '-')} {chosen}".strip()
        return Conflict(f"{typed} does not go with {with_what}: {why}.", (name, other))
    return None
