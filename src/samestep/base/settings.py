"""The settings of one run: how to train, as one frozen dataclass that checks itself.

What to train is the recipe's. Settings come from three layers, the later winning: the recipe's
defaults, a TOML file, the flags.
"""

import itertools
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from samestep.base.conflicts import conflict_in
from samestep.base.errors import UserError

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
ParamDtype = Literal["fp32", "bf16"]
MatmulPrecision = Literal["highest", "high", "medium"]
OrderName = Literal["shuffled", "sequential", "columns", "replacement", "weighted"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Backend = Literal["auto", "nccl", "gloo"]
Strategy = Literal["ddp", "fsdp"]
ShardWithin = Literal["all", "node"]
Schedule = Literal["constant", "cosine", "linear", "polynomial"]
_COMMON = {"common": True}
"""Marks a setting that the short `--help` shows, too."""
_FREE = {"may_change": True}
"""Marks a setting that may change on resume: the training stays the same."""
_BITS_ALONE = {"may_change": False}
"""The same, but it may change the last bit, so not with virtual ranks."""
T = TypeVar("T")


def may_change(default: T) -> T:
    """Return `field(default=default, metadata={"may_change": True})`.

    It declares an option of a recipe that may change on resume, such as a folder of data.
    """
    return field(default=default, metadata=_FREE)


def free_names(*kinds: type | None, virtual_ranks: object = None) -> frozenset[str]:
    """Return the names of the fields that may change on resume."""
    marks = (True, False) if virtual_ranks is None else (True,)
    every_field = (f for kind in kinds if kind is not None for f in fields(kind))
    return frozenset(f.name for f in every_field if f.metadata.get("may_change") in marks)


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases."""
    import ast  # noqa: PLC0415 - only for help
    import inspect  # noqa: PLC0415

    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, SyntaxError):  # no source, as of `object`
            continue
        for statement, below in itertools.pairwise(getattr(tree, "body", [])):
            match statement, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[name] = " ".join(text.split())
    return docs


class _WithFields:
    """A class's docstring and those of its fields, read from the source when `help()` asks."""

    def __init__(self, own: str) -> None:
        self._own = own

    def __get__(self, _: object, kind: type) -> str:
        parts = [f"{name}: {text}" for name, text in field_docs(kind).items()]
        lines = [textwrap.fill(part, 100, subsequent_indent="    ") for part in parts]
        return "\n".join([textwrap.dedent(f"    {self._own}").rstrip(), "", "Fields:", *lines])


def documented(kind: type[T]) -> type[T]:
    """Add the docstrings of a dataclass's fields to its `help()`."""
    kind.__doc__ = _WithFields(kind.__doc__ or "")  # type: ignore[assignment]
    return kind


@documented
@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train. Every field is a flag (`--batch-size 64`) and a TOML key (`batch_size = 64`).

    Raises:
        UserError: a value is out of its range, or two settings exclude each other.
    """

    epochs: int | None = field(default=None, metadata=_COMMON | _FREE)
    """Passes over the training set."""
    max_steps: int | None = field(default=None, metadata=_COMMON | _FREE)
    """Stop after this many steps, whatever the epoch."""

    batch_size: int | None = field(default=None, metadata=_COMMON)
    """Samples per step over all ranks."""
    batch_size_per_rank: int | None = None
    """Instead of --batch-size: samples per step on each rank; more ranks then mean larger steps."""
    batch_tokens: int | None = None
    """Instead of --batch-size: the most tokens per step, with padding, by the recipe's lengths."""
    micro_batch_size: int | None = field(default=None, metadata=_BITS_ALONE)
    """The most samples that a rank computes at once; the number of micro-steps follows."""
    accumulate: int | None = field(default=None, metadata=_BITS_ALONE)
    """Instead of --micro-batch-size: micro-steps per optimizer step."""
    eval_batch_size: int | None = field(default=None, metadata=_BITS_ALONE)
    """Samples per rank in each forward pass of an evaluation; by default those of a micro-step."""
    virtual_ranks: int | None = field(default=None, metadata=_COMMON)
    """Cut each batch into this many fixed shares, for the same bits on any number of ranks."""
    self_check: bool = field(default=True, metadata=_FREE)
    """With virtual ranks, compute one share of the first step twice and compare. Refuse to resume
    where the loss or the model counts its calls."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is incomplete."""
    order: OrderName = "shuffled"
    """Order of the training samples. columns: each slot of a batch reads its own contiguous part;
    replacement: drawn with replacement; weighted: drawn by the recipe's weights."""
    group_by_length: bool = False
    """Shuffle so that the samples of a batch have similar lengths. The recipe gives the lengths."""
    shuffle_buffer: int = 0
    """Elements of a stream that are shuffled together; 0 keeps the stream's order."""

    optimizer: Literal["adam", "adamw", "sgd"] = field(default="adam", metadata=_COMMON)
    """The optimizer, unless the recipe makes its own."""
    lr: float = field(default=1e-3, metadata=_COMMON)
    """Learning rate, before --lr-scaling."""
    momentum: float = 0.0
    """Momentum, for sgd."""
    weight_decay: float = field(default=0.0, metadata=_COMMON)
    """Weight decay; decoupled in adamw, an L2 penalty in adam and sgd."""
    clip_norm: float | None = None
    """Clip the gradient to this norm; by default it is not clipped."""

    ema: float | None = None
    """Evaluate an exponential moving average of the weights with this decay, such as 0.999.
    Checkpoints hold both the average and the weights."""

    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Multiply --lr by batch size / base batch size (linear: Goyal et al. 2017), or by its square
    root."""
    base_batch_size: int | None = None
    """The batch size that --lr was tuned for; needed for --lr-scaling."""
    warmup_steps: int | float = field(default=0, metadata=_COMMON)
    """Steps of a linear warm-up to --lr; below 1, a fraction of all steps. Step s of w, counted
    from 0, takes (s + 1) / (w + 1) of it."""
    warmup_from: float | None = None
    """Fraction f of --lr at which the warm-up begins: step s of w then takes f + (1 - f) s / w of
    it. 0 is the s / w of Hugging Face; by default f is 1 / (w + 1)."""
    schedule: Schedule = field(default="constant", metadata=_COMMON)
    """Learning rate after the warm-up; all but constant fall to --lr-end by the last step. A recipe
    may have its own schedule."""
    lr_end: float = 0.0
    """Learning rate at the end of the schedule, before --lr-scaling."""
    lr_power: float = 1.0
    """Exponent p of --schedule polynomial, which follows (1 - progress) ** p."""

    engine: Literal["native", "lightning"] = "native"
    """The training loop: samestep's own, or PyTorch Lightning's Trainer (samestep[lightning])."""
    precision: Precision = field(default="fp32", metadata=_COMMON)
    """Number format: bf16 and fp16 use autocast (fp16 with a gradient scaler); fp64 converts model
    and data."""
    param_dtype: ParamDtype | None = None
    """Type of weights and optimizer state; by default fp32, or fp64 with --precision fp64. bf16
    needs --precision bf16."""
    matmul_precision: MatmulPrecision | None = None
    """Precision of float32 products and convolutions; highest forbids TF32."""
    newton_schulz: Literal["bf16", "fp32"] = "bf16"
    """Type in which torch.optim.Muon orthogonalises its updates; bf16 turns rounding errors
    into percents, fp32 takes the same steps on any number of ranks and with fsdp."""
    seed: int = field(default=42, metadata=_COMMON)
    """Seed of all random numbers: initial weights, sample order, augmentation, dropout."""
    init_from: str | None = field(default=None, metadata=_COMMON)
    """Weights to start from: a run (its best checkpoint), one of its checkpoints, a file with a
    state_dict (.safetensors, .pt, .pth, .bin, .ckpt), or a folder that save_pretrained wrote. All
    else is new, also the optimizer."""
    init_strict: bool = True
    """With --init-from, names and shapes must match. Off loads what fits, and lists the rest."""
    device: Device = field(default="auto", metadata=_COMMON | _FREE)
    """Device to train on; auto takes the best one of this machine."""
    backend: Backend = field(default="auto", metadata=_FREE)
    """Communication between the ranks; auto: nccl for CUDA devices on Linux, else gloo."""
    timeout_s: float = field(default=600.0, metadata=_FREE)
    """Seconds that ranks wait for the slowest one before they give up."""
    stall_s: float | None = field(default=None, metadata=_FREE)
    """Seconds without a step after which the ranks count as hung, and the one that hangs is named;
    by default 20 times the median step, at least 60; 0 turns this off."""
    compile: Literal["off", "on"] = field(default="off", metadata=_COMMON | _BITS_ALONE)
    """Compile the step with torch.compile: a slow start, then faster steps."""
    channels_last: bool = field(default=False, metadata=_BITS_ALONE)
    """Store images in channels-last layout: faster convolutions on many devices."""
    cudnn_benchmark: bool = field(default=False, metadata=_FREE)
    """Let cuDNN try its convolution algorithms and use the fastest; for inputs of one shape."""
    deterministic: bool = field(default=False, metadata=_BITS_ALONE)
    """Use only operations that give the same bits each time; slower on GPUs."""
    checkpoint_activations: bool = field(default=False, metadata=_FREE)
    """Recompute the activations of marked blocks in the backward pass: less memory, more time."""
    threads: int | None = field(default=None, metadata=_BITS_ALONE)
    """CPU threads per rank; by default OMP_NUM_THREADS, else chosen from cores and model."""
    num_workers: int = field(default=0, metadata=_COMMON | _FREE)
    """Loader processes per rank; for data that is not held in memory."""
    oversubscribe: bool = field(default=False, metadata=_FREE)
    """Allow more than 4 ranks or loader processes per core, or several ranks on one GPU."""

    strategy: Strategy = field(default="ddp", metadata=_FREE)
    """ddp: each rank holds the whole model; fsdp: a shard, for models that do not fit."""
    shard_within: ShardWithin = field(default="all", metadata=_FREE)
    """With fsdp, shard the model over all ranks, or within each node (HSDP)."""
    reshard_after_forward: bool = field(default=True, metadata=_FREE)
    """With fsdp, free a block's gathered weights after its forward pass. Off keeps them for the
    backward pass: more memory, less communication."""
    gather_dtype: ParamDtype | None = None
    """With fsdp, the type in which weights are gathered; by default their own. bf16 needs
    --precision bf16. It halves the gathered bytes, and also rounds normalization layers."""
    cpu_offload: bool = field(default=False, metadata=_FREE)
    """With fsdp on GPUs, keep weights, gradients and optimizer state in CPU memory."""
    bucket_cap_mb: int | None = field(default=None, metadata=_FREE)
    """MiB of gradients in each all-reduce; by default 25, as in PyTorch."""
    find_unused: bool = field(default=False, metadata=_BITS_ALONE)
    """With ddp, allow steps that leave parameters unused, as in models with branches; slower."""
    static_graph: bool = field(default=False, metadata=_BITS_ALONE)
    """With ddp, promise that every step uses the same parameters in the same way."""
    sync_batchnorm: bool = False
    """Let BatchNorm use the samples of all ranks, not only its own; only on NVIDIA GPUs."""

    run_dir: str | None = field(default=None, metadata=_COMMON | _FREE)
    """Directory of the run; by default a new one in runs/."""
    log_every: int | None = field(default=None, metadata=_FREE)
    """Steps between `step` records; by default 200 to 500 per run, one per 50 steps if long."""
    eval_every_epochs: int = field(default=1, metadata=_FREE)
    """Epochs between two evaluations on the validation set."""
    eval_every_steps: int | None = field(default=None, metadata=_FREE)
    """Steps between two evaluations, in addition to those after epochs."""
    checkpoint_every_epochs: int = field(default=1, metadata=_FREE)
    """Epochs between two checkpoints; the end of the run always saves one."""
    checkpoint_every_steps: int | None = field(default=None, metadata=_FREE)
    """Steps between two checkpoints, in addition to those after epochs."""
    checkpoint_every_minutes: float | None = field(default=None, metadata=_FREE)
    """Minutes between two checkpoints, in addition to those after epochs."""
    checkpoint_sync: bool = field(default=False, metadata=_FREE)
    """Wait until each checkpoint is written, instead of writing it while the training continues.
    This saves the memory of one copy of the state."""
    keep_top_k: int | None = field(default=None, metadata=_FREE)
    """Keep only the last checkpoint and the best K by --monitor; by default all are kept."""
    keep_newest: int | None = field(default=None, metadata=_FREE)
    """Keep only the newest N checkpoints and the best; with --keep-top-k, the best K."""
    keep_hours: float | None = field(default=None, metadata=_FREE)
    """Keep only the checkpoints of the last H hours, the best and the last."""
    mirror: str | None = field(default=None, metadata=_FREE)
    """Copy the run to a store as it trains: s3://BUCKET/RUN or another address of fsspec; none."""
    monitor: str | None = field(default=None, metadata=_COMMON)
    """Validation metric that decides which checkpoint is best, as in loss:min; by default accuracy,
    else loss."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether the smallest or the largest value of --monitor is best; auto: min for the loss and
    the recipe's lower_is_better, max for others."""
    patience: int | None = field(default=None, metadata=_COMMON | _FREE)
    """Stop after this many evaluations without a new best; --monitor says which is best."""
    stop_monitor: str | None = field(default=None, metadata=_FREE)
    """Metric that --patience follows instead of --monitor, as in loss:min."""
    min_delta: float = field(default=0.0, metadata=_FREE)
    """Smallest change that counts as an improvement for --patience."""
    halving: int | None = field(default=None, metadata=_FREE)
    """In a sweep, compare trainings by --monitor after their evaluations 1, N, N² …, and stop those
    that are not among the best 1/N so far (ASHA). Only evaluations after epochs count."""

    pictures: bool = field(default=True, metadata=_FREE)
    """Save pictures at the end of the run: predictions, and what the recipe draws."""

    track: str | None = field(default=None, metadata=_COMMON | _FREE)
    """Trackers, separated by commas: comet, mlflow, tensorboard, trackio, wandb, or your own
    (my_tracker.py, package.module); none stops those of a resumed run. In TOML, a table [track]
    with `to` and the names below without `track_`."""
    track_project: str | None = field(default=None, metadata=_FREE)
    """Project at the tracker (MLflow: experiment); by default the recipe's name."""
    track_name: str | None = field(default=None, metadata=_FREE)
    """Name of the run at the tracker; by default the name of its directory."""
    track_workspace: str | None = field(default=None, metadata=_FREE)
    """Workspace at Comet, entity at W&B; by default that of your account."""
    track_tags: str | None = field(default=None, metadata=_FREE)
    """Tags of the run at the tracker, separated by commas."""
    track_offline: bool = field(default=False, metadata=_FREE)
    """Write the trackers' files into the run directory and send nothing."""
    track_checkpoints: bool = field(default=False, metadata=_FREE)
    """Also send the checkpoints, as artifacts."""
    track_timeout: float = field(default=120.0, metadata=_FREE)
    """Seconds to wait for a tracker to start, and for each of its answers."""

    def __post_init__(self) -> None:
        check_flags(self, _POSITIVE, lambda value: 0 < value < math.inf, "be greater than 0")
        check_flags(self, _NOT_NEGATIVE, lambda value: 0 <= value < math.inf, "be 0 or more")
        check_flags(self, ("momentum", "ema"), lambda value: value < 1, "be below 1")
        check_flags(self, ("warmup_from",), lambda value: value <= 1, "be 1 or less")
        whole_or_below_1 = "be a whole number of steps, or a fraction of them below 1"
        check_flags(self, ("warmup_steps",), lambda v: v < 1 or v == int(v), whole_or_below_1)
        check_flags(self, ("halving",), lambda value: value >= 2, "be 2 or more")
        check_flags(self, ("threads",), lambda value: value <= 1024, "be 1024 or less")
        check_flags(self, ("timeout_s",), lambda value: value <= 10**6, "be 1000000 or less")
        numbers = (*_POSITIVE, *_NOT_NEGATIVE)
        check_flags(self, numbers, lambda value: value < 2**63, "be below 2^63")
        if self.run_dir is not None and not self.run_dir.strip():
            raise UserError("--run-dir is empty; name a directory, or omit it.", flags=["run_dir"])
        if self.lr_scaling != "none" and self.base_batch_size is None:
            raise UserError(
                f"--lr-scaling {self.lr_scaling} needs --base-batch-size: the batch size that "
                f"--lr {self.lr} was tuned for.",
                flags=["lr_scaling", "base_batch_size"],
            )
        if self.param_dtype == "bf16" and self.precision != "bf16":
            raise UserError(
                f"--param-dtype bf16 does not go with --precision {self.precision}: weights in "
                "bfloat16 need --precision bf16.",
                remedy="Add it, or leave --param-dtype out.",
                flags=["param_dtype", "precision"],
            )
        if self.param_dtype == "fp32" and self.precision == "fp64":
            raise UserError(
                "--param-dtype fp32 does not go with --precision fp64: everything is float64 then.",
                remedy="Leave one of them out.",
                flags=["param_dtype", "precision"],
            )
        if self.gather_dtype and self.precision not in (self.gather_dtype, "bf16", "fp16"):
            raise UserError(
                f"--gather-dtype {self.gather_dtype} does not go with --precision "
                f"{self.precision}, which computes with weights of that type.",
                remedy="Add --precision bf16, or leave --gather-dtype out.",
                flags=["gather_dtype", "precision"],
            )
        check_flags(self, ("virtual_ranks",), lambda value: value <= 4096, "be 4096 or less")
        if conflict := conflict_in(self):
            raise UserError(conflict.message, remedy=conflict.remedy, flags=[*conflict.flags])
        if self.virtual_ranks is not None:
            # CPU kernels may sum in another order with another number of threads.
            object.__setattr__(self, "threads", self.threads or 1)
            object.__setattr__(self, "deterministic", True)

    @property
    def forwards_together(self) -> bool:
        """Whether a forward of one rank waits for those of the others."""
        return self.sync_batchnorm or self.strategy == "fsdp"

    @property
    def allows_unused(self) -> bool:
        """Whether DDP looks for parameters without a gradient instead of waiting for them."""
        return self.find_unused or self.static_graph


_POSITIVE = (
    *("epochs", "max_steps", "batch_size", "batch_size_per_rank", "micro_batch_size"),
    *("batch_tokens", "accumulate", "lr", "keep_top_k", "keep_newest", "keep_hours"),
    *("base_batch_size", "clip_norm", "threads", "log_every", "eval_every_epochs"),
    *("eval_every_steps", "checkpoint_every_epochs", "checkpoint_every_steps"),
    *("checkpoint_every_minutes", "patience", "track_timeout", "timeout_s"),
    *("eval_batch_size", "bucket_cap_mb", "ema", "virtual_ranks", "lr_power"),
)
_NOT_NEGATIVE = (
    *("momentum", "weight_decay", "warmup_steps", "seed", "num_workers", "min_delta"),
    *("warmup_from", "shuffle_buffer", "stall_s", "lr_end"),
)


def check_flags(
    options: object, names: Iterable[str], holds: Callable[[Any], bool], must_be: str
) -> None:
    """Raise a `UserError` that names the flag if a given value does not hold."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not holds(value):
            raise UserError(f"--{flag_name(name)} is {value}; it must {must_be}.", flags=[name])


def flag_name(name: str) -> str:
    """Return a field's name as on the command line: `batch_size` → `batch-size`."""
    return name.replace("_", "-")


def order_name(settings: Settings) -> str:
    """Return the name of the training samples' order in records."""
    if settings.batch_tokens is not None:
        return "by tokens"
    return "by length" if settings.group_by_length else settings.order


def in_precision(settings: Settings, precision: Precision) -> Settings:
    """Return the settings in another precision, and weights of its type."""
    if precision == settings.precision:
        return settings
    return replace(settings, precision=precision, param_dtype=None, gather_dtype=None)


# A layer that sets one of them drops the others from the layers below.
_ALTERNATIVES = (
    ("batch_size", "batch_size_per_rank", "batch_tokens"),
    ("micro_batch_size", "accumulate"),
    ("epochs", "max_steps"),
)
OTHER_NAMES = {"global_batch_size": "batch_size"}
MERGED = {
    "eval_every": (
        "1epoch|500steps",
        "How often to evaluate: after epochs, and after steps if given: 1epoch,500steps.",
    ),
    "checkpoint_every": (
        "1epoch|500steps|30min",
        "How often to save: after epochs, and after steps or minutes if given: 500steps,30min.",
    ),
}
"""Settings with a unit that set several fields: what is typed, and what `--help` says."""
_INTERVAL = re.compile(r"(\d+(?:\.\d+)?) ?(epoch|step|min)(?:s|utes?)?")
_FIELD_OF = {"epoch": "epochs", "step": "steps", "min": "minutes"}
ALSO_ACCEPTED = frozenset({*OTHER_NAMES, *MERGED})
"""Names that are not fields, and are accepted wherever a setting is given."""


def canonical_names(table: Mapping[str, Any], where: object) -> dict[str, Any]:
    """Return settings by the names of their fields; `where` begins a message.

    `global_batch_size` is `batch_size`; `eval_every = "500steps"` sets `eval_every_steps`; `monitor
    = "loss:min"` sets `mode`, too; a table `track` sets `track` by its `to` and `track_KEY` by KEY.
    """
    settings: dict[str, Any] = {}
    for name, value in table.items():
        for key, own_value in _fields_set_by(name, value, where).items():
            before = settings.get(key, table.get(key))
            if key != name and before not in (None, own_value):
                limit = "; micro_batch_size limits what one rank computes at once"
                raise UserError(
                    f"{where}: {key} is {before} and {name} is {value}, but both set {key}.",
                    remedy=f"Keep one of them{limit if key == 'batch_size' else ''}.",
                    flags=[key],
                )
            settings[key] = own_value
    return settings


def _fields_set_by(name: str, value: Any, where: object) -> dict[str, Any]:
    if name in OTHER_NAMES:
        return {OTHER_NAMES[name]: value}
    if name == "monitor" and isinstance(value, str) and value.endswith((":min", ":max")):
        metric, _, mode = value.rpartition(":")
        return {"monitor": metric, "mode": mode}
    if name == "track" and isinstance(value, Mapping):
        keys = {key: key.replace("-", "_") for key in value}
        return {"track" if k == "to" else f"track_{k}": value[key] for key, k in keys.items()}
    if name not in MERGED or value is None:
        return {name: value}
    parts = value.split(",") if isinstance(value, str) else value
    intervals: dict[str, Any] = {}
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        match = _INTERVAL.fullmatch(str(part).strip())
        unit = match[2] if match else ""
        valid = bool(match) and (unit == "min" or "." not in match[1])  # type: ignore[index]
        field_name = f"{name}_{_FIELD_OF[unit]}" if valid else ""
        if field_name not in Settings.__dataclass_fields__ or field_name in intervals:
            must = "give numbers with units, each unit once: " + MERGED[name][0].replace("|", ",")
            raise UserError(f"{where}: {name} = {value!r}: {must}.", flags=[name])
        number = float(match[1])  # type: ignore[index]
        intervals[field_name] = number if unit == "min" else int(number)
    return intervals


def merge_layers(*layers: dict[str, object]) -> dict[str, object]:
    """Merge layers of settings; the later ones win."""
    merged: dict[str, object] = {}
    for layer in (canonical_names(layer, "settings") for layer in layers):
        for names in _ALTERNATIVES:
            named = [name for name in names if layer.get(name) is not None]
            for other in names if len(named) == 1 else ():
                merged.pop(other, None)
        if layer.get("batch_tokens") is not None:
            merged.pop("micro_batch_size", None)  # it was meant for a batch of samples
        if layer.get("optimizer", "sgd") != "sgd" and "momentum" not in layer:
            merged.pop("momentum", None)  # it was meant for the optimizer of a layer below
        if layer.get("monitor", merged.get("monitor")) != merged.get("monitor"):
            merged.pop("mode", None)  # it was meant for the metric of a layer below
        merged.update(layer)
    return merged


def as_table(settings: Settings) -> dict[str, object]:
    """Return the settings that have a value, as a TOML table."""
    return {name: value for name, value in vars(settings).items() if value is not None}
