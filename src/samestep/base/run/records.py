"""The records of a run: one JSON object per line of events.jsonl.

Each kind of record has a class here that documents its fields; the handbook's table is made from
them. `Run.append` writes records, and `RecordFile` reads them.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from samestep.base.errors import UserError
from samestep.base.run.files import open_regular

Record = dict[str, Any]
"""One line of events.jsonl: `event` first, then the fields of its kind."""

RUN_FORMAT = 1
"""The format of a run directory, in its `start` records; a run whose records do not say has 1."""

SYSTEM = Path("tracking", "system.jsonl")
"""In a run directory: what was measured of the machine, while the run was tracked."""

PHASES = ("data", "to_device", "forward", "backward", "all_reduce", "optimizer", "other")
"""The phases of a step, in order. `all_reduce` is the wait for ranks not hidden by backward."""
WHOLE = ("data", "to_device", "step", "other")
"""The phases where forward, backward and update are one graph, or one queue without events."""
WAITS = ("data", "to_device")
COMPUTE = ("forward", "backward", "optimizer", "step")
"""The phases that a rank computes itself, of both kinds."""
IN_ORDER = (*PHASES[:-1], "step", "other")
"""The phases of both kinds, as a table shows them."""

_Count = Annotated[int, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_Seconds = Annotated[float, Meta(ge=0)]


# Fields without a default are those that readers need: a record without one counts as damaged. Runs
# of your own loop and of Lightning's logger lack some of the others.
class StartRecord(Struct, kw_only=True, tag_field="event", tag="start"):
    """The beginning of a run, and of each resume."""

    format: int = RUN_FORMAT
    """The format of the run directory."""
    time: float | None = None
    """Seconds since 1970."""
    recipe: str = ""
    """Its name."""
    run_dir: str = ""
    """The directory, as it was given."""
    world_size: _Positive
    """The number of ranks."""
    virtual_ranks: int | None = None
    """With `--virtual-ranks`: the number."""
    num_samples: _Positive | None
    """Training samples; null for a stream."""
    global_batch_size: _Positive
    """Samples per step, over all ranks."""
    micro_batch_size: int | None = None
    """Samples that a rank takes at once."""
    batch_size_per_rank: int | None = None
    """If it was given."""
    batch_tokens: int | None = None
    """If it was given; then the batch sizes are those of the largest batch."""
    accumulate: int | None = None
    """Micro-steps per step."""
    steps_per_epoch: _Positive | None
    """Null for a stream."""
    epochs: int | None = None
    """The epochs to train."""
    total_steps: int | None = None
    """The steps to train."""
    log_every: int | None = None
    """Steps between `step` records."""
    order: str = "shuffled"
    """The order of the training samples."""
    lr: float | None = None
    """The learning rate, scaled by `lr_scaling`."""
    base_lr: float | None = None
    """The learning rate that was given."""
    lr_scaling: str = "none"
    """How it grows with the batch size."""
    own_schedule: bool = False
    """True if the recipe has a schedule."""
    device: str = ""
    """Of rank 0."""
    backend: str = ""
    """What connects the ranks."""
    launcher: str = ""
    """What started them."""
    num_nodes: int | None = None
    """The number of machines."""
    threads: int | None = None
    """PyTorch's threads per rank."""
    precision: str = ""
    """The precision of the forward pass."""
    param_dtype: str = ""
    """The type of the weights, if it was given."""
    kernels: dict[str, bool] = {}
    """On CUDA: TF32, cuDNN's timing, deterministic kernels."""
    arithmetic: dict[str, Any] = {}
    """With virtual ranks: what the bits depend on."""
    parameters: int | None = None
    """The model's parameters."""
    by_ranks: list[str] | None = None
    """Modules whose outputs depend on the number of ranks: `BatchNorm`, `dropout`."""
    monitor: str | None = None
    """The metric that the best checkpoint is chosen by."""
    lower_is_better: list[str] | None = None
    """Metrics of which less is better."""
    free_options: list[str] = []
    """Options that may change on resume."""
    left_out: list[Any] = []
    """Files that could not be read."""
    init_from: dict[str, Any] = {}
    """With `--init-from`: the file, its SHA-256, and what did not fit."""
    resumed: bool
    """True if the run continues."""
    notes: list[str] = []
    """What was shown at the start."""


class StepRecord(Struct, kw_only=True, tag_field="event", tag="step"):
    """One optimizer step, every `log_every` steps; in your own loop, more values of your own."""

    step: _Count
    """Steps so far, over all attempts."""
    epoch: int | None = None
    """From 1."""
    loss: float | None
    """Of the global batch; null for NaN and infinity. Where it is a sum of losses by name, these
    are fields, too."""
    grad_norm: float | None = None
    """Before clipping."""
    lr: float | None = None
    """The learning rate."""
    samples: _Count
    """Samples so far."""
    seconds: _Seconds
    """Training time so far."""
    samples_per_s: float | None = None
    """Since the last `step` record."""


class EpochRecord(Struct, kw_only=True, tag_field="event", tag="epoch"):
    """The end of an epoch, or of the part of it that a stopped run trained."""

    epoch: _Positive
    """From 1."""
    step: _Count
    """Steps so far."""
    loss: float | None
    """The mean training loss."""
    samples: _Count
    """Samples of this epoch."""
    train_seconds: _Seconds
    """Training time of this epoch."""
    samples_per_s: float | None = None
    """In this epoch."""
    terms_per_s: float | None = None
    """Of what `loss_terms` counts, such as tokens."""
    flops_per_s: float | None = None
    """Model FLOPs: floating-point operations of the model's forward and backward, of all ranks."""
    mfu: float | None = None
    """The part of what the GPUs can do at most in this precision; missing for unknown ones."""
    peak_memory_bytes: int | None = None
    """The most that a rank held so far: PyTorch on a GPU, else the whole process."""
    phases: dict[str, float] | None = None
    """The seconds of each phase of its steps, on rank 0."""
    metrics: dict[str, Any] = {}
    """The recipe's metrics, over what the epoch trained; losses by name come first."""
    ranks: dict[str, Any] = {}
    """With several ranks: the seconds of each rank in data, compute and all_reduce."""


class EvaluationRecord(Struct, kw_only=True, tag_field="event", tag="evaluation"):
    """An evaluation. All other fields are its metrics by name, `loss` first; null for NaN."""

    split: str = ""
    """`validation` or `test`; your own loop may name others."""
    epoch: int | None = None
    """From 1."""
    step: _Count
    """Steps so far."""
    samples: int | None = None
    """The samples that were evaluated."""
    seconds: _Seconds | None = None
    """How long it took."""
    checkpoint: str = ""
    """In the JSON of `samestep evaluate`: the file."""
    problems: list[str] = []
    """Of a test: checkpoints that could not be loaded."""
    per_class: dict[str, float | None] = {}
    """Of a test of named classes: the accuracy of each."""
    confusion: Any = None
    """Of a test of named classes: counts, a row per target, a column per prediction."""


class MetricsRecord(Struct, kw_only=True, tag_field="event", tag="metrics"):
    """What a script logged without a loss, in your own loop or by Lightning's logger."""

    step: _Count
    """The step that it belongs to."""
    epoch: int | None = None
    """From 1."""
    time: float
    """Seconds since 1970."""
    values: dict[str, Any]
    """By the names that the script gave."""


class BaselinesRecord(Struct, kw_only=True, tag_field="event", tag="baselines"):
    """The recipe's baselines, measured after the test."""

    step: int | None = None
    """Steps so far."""
    values: dict[str, Any] = {}
    """For each name its metrics, or why it was left out."""
    problems: list[str] = []
    """Why none could be measured."""
    seconds: float | None = None
    """How long it took."""


class PictureRecord(Struct, kw_only=True, tag_field="event", tag="picture"):
    """A picture of the best checkpoint."""

    step: int | None = None
    """Steps so far."""
    name: str = ""
    """Its name in pictures/pictures.json."""
    path: str = ""
    """Its PNG file."""
    title: str = ""
    """Its title."""
    problem: str = ""
    """Why there is none."""


class CheckpointRecord(Struct, kw_only=True, tag_field="event", tag="checkpoint"):
    """A checkpoint that was saved."""

    step: _Count
    """Steps so far."""
    path: str
    """Its file in the run directory."""
    sha256: str = ""
    """The hash of the file."""
    weights_sha256: Any = None
    """The hash of the weights, if it was computed."""
    seconds: _Seconds | None = None
    """How long it took, until it was announced."""
    blocked_seconds: _Seconds | None = None
    """How long the training waited for it."""


class CompileRecord(Struct, kw_only=True, tag_field="event", tag="compile"):
    """A compilation, or a recorded graph."""

    what: str = ""
    """What was compiled."""
    steps_per_graph: int | None = None
    """Steps that one launch takes."""
    seconds: _Seconds
    """How long it took."""


class ResumeRecord(Struct, kw_only=True, tag_field="event", tag="resume"):
    """The checkpoint that a resumed run continues from."""

    step: _Count
    """The step of the checkpoint."""
    checkpoint: str
    """Its file name."""
    world_size: int | None = None
    """The number of ranks now."""
    problems: list[str] = []
    """Newer checkpoints that could not be loaded."""
    changes: list[Any] = []
    """What `--allow-change` allowed."""


class RegroupRecord(Struct, kw_only=True, tag_field="event", tag="regroup"):
    """With `--elastic`: the ranks continued without one that died, or with one that joined."""

    step: _Count
    """Steps so far; none is taken again."""
    ranks_before: int
    """The number of ranks before."""
    world_size: int
    """The number of ranks from now on."""
    gone: list[str] = []
    """Which ranks are gone, and why."""
    seconds: _Seconds | None = None
    """From when the loss was seen until all were ready for the next step."""


class ScreenRecord(Struct, kw_only=True, tag_field="event", tag="screen"):
    """The output, such as a job's log, takes nothing more; the training continues without it."""

    step: Any = None
    """Steps so far."""
    text: Any = ""
    """Why, as the system says it."""


class StopRecord(Struct, kw_only=True, tag_field="event", tag="stop"):
    """The end of an attempt. A killed run has none."""

    step: Any = None
    """Steps so far."""
    reason: Any = ""
    """Why it ended: `all epochs`, `early stopping`, the name of a signal …"""


KINDS: dict[str, type[Struct]] = {
    str(kind.__struct_config__.tag): kind
    for kind in (
        *(StartRecord, StepRecord, EpochRecord, EvaluationRecord, MetricsRecord, BaselinesRecord),
        *(PictureRecord, CheckpointRecord, CompileRecord, ResumeRecord, RegroupRecord),
        *(ScreenRecord, StopRecord),
    )
}
"""The class of each event. A record of any other event may hold anything."""

_EVALUATION_FIELDS = frozenset({"event", *EvaluationRecord.__struct_fields__})
TAKEN_NAMES = _EVALUATION_FIELDS | {*EpochRecord.__struct_fields__, "train_loss", "notes"}
"""Names that no metric may have: fields of records, and what `compare` calls the training loss."""
TAKEN_IN_STEPS = TAKEN_NAMES | {*StepRecord.__struct_fields__}
"""Names that no loss may have which is logged with each step."""

_DONE_AGAIN = ("step", "epoch", "evaluation", "baselines", "picture", "checkpoint")
"""Records after its checkpoint that a resumed run writes again."""
_DECODER = msgspec.json.Decoder(Record)
_OTHER = msgspec.defstruct("_Other", [("event", str)])
_CHUNK_BYTES = 1 << 20


def metric_values(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an `evaluation` record, or of a table of result.json like it."""
    return {name: v for name, v in evaluation.items() if name not in _EVALUATION_FIELDS}


def parse_lines(text: bytes, *, checked: bool = False) -> list[Record | None]:
    """Return the record of each line; None for a line that holds none.

    With `checked`, a record that lacks a field of its kind, or has one of another type, is none.
    """
    if text and checked:  # all at once, which takes half the time if no line is damaged
        with contextlib.suppress(msgspec.MsgspecError, RecursionError, TypeError):
            records = _DECODER.decode_lines(text)
            by_event: dict[object, list[Record]] = {}
            for record in records:
                by_event.setdefault(record.get("event"), []).append(record)
            for event, of_kind in by_event.items():
                msgspec.convert(of_kind, list[KINDS.get(str(event), _OTHER)])  # type: ignore[misc]
            if len(records) == text.count(b"\n") + (not text.endswith(b"\n")):
                return [*records]
    lines = text.split(b"\n")
    return [_parse(line, checked=checked) for line in lines[: len(lines) - text.endswith(b"\n")]]


def _parse(line: bytes, *, checked: bool) -> Record | None:
    try:
        record = _DECODER.decode(line)
    except (msgspec.MsgspecError, RecursionError):
        try:  # NaN, and a path's bytes that are not UTF-8
            record = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            return None
    event = record.get("event") if isinstance(record, dict) else None
    if not isinstance(event, str):
        return None
    if checked:
        try:
            msgspec.convert(record, KINDS.get(event, _OTHER))
        except (msgspec.MsgspecError, RecursionError):
            return None
    return record


class RecordFile:
    """The whole lines of a file of records, which may be damaged, torn off, or still growing."""

    def __init__(self, path: Path, *, checked: bool = False) -> None:
        self._path, self._checked, self._offset = path, checked, 0
        self.num_read = 0
        """Lines that were read."""
        self.damaged: list[int] = []
        """The lines, from 1, that hold no record."""
        self.torn = False
        """Whether it ended in half a line when it was last read."""

    def read(self) -> Iterator[list[tuple[int, Record]]]:
        """Yield the new records with the numbers of their lines, from 0, a chunk at a time.

        Without a file there are none; another OSError is raised.
        """
        self.torn = False
        missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
        with missing, open_regular(self._path) as file:
            file.seek(self._offset)
            while not self.torn and (lines := file.readlines(_CHUNK_BYTES)):
                if not lines[-1].endswith(b"\n"):
                    self.torn = True  # it is being written, or was torn off by a kill
                    lines.pop()  # and is read from its beginning next time
                parsed = parse_lines(b"".join(lines), checked=self._checked) if lines else []
                numbered = list(enumerate(parsed, self.num_read))
                self.damaged += [number + 1 for number, record in numbered if record is None]
                self._offset += sum(map(len, lines))
                self.num_read += len(lines)
                yield [(number, record) for number, record in numbered if record is not None]

    def read_all(self) -> list[Record]:
        """Return all new records."""
        return [record for chunk in self.read() for _, record in chunk]


def check_format(start: Record, path: Path) -> None:
    """Refuse a run that a newer samestep has written, by its `start` record."""
    version = start.get("format", RUN_FORMAT)
    if isinstance(version, int) and version > RUN_FORMAT:
        raise UserError(
            f"{path} has run format {version}, and this samestep reads formats up to {RUN_FORMAT}. "
            "Install the samestep that wrote it, or a newer one: its versions are in "
            "environment.json."
        )


def read_records(path: str | PathLike[str], *, superseded: bool = False) -> Iterator[Record]:
    """Yield the records of a run as one uninterrupted run would have written them.

    A resumed run starts again from a checkpoint, so what an earlier attempt wrote of later steps is
    superseded: it stays in the file, and is left out unless it is asked for.

    Raises:
        UserError: there is no run here, a line of it is damaged, or its format is too new.
    """
    path = Path(path)
    file = path / "events.jsonl"
    lines = RecordFile(file)
    try:
        file.stat()
        records = lines.read_all()
    except OSError as error:
        raise UserError(f"{path} holds no run: {file} cannot be read.") from error
    if lines.damaged:
        number = lines.damaged[0]
        raise UserError(
            f"{file} is damaged in line {number}: it holds no record. Restore the file from a "
            f"backup, or delete that line: sed -i {number}d {file}"
        )
    yield from records if superseded else as_uninterrupted(records, path)


def samples_per_step(plan: Mapping[str, Any]) -> float:
    """Return the samples of a step by a `start` record: their mean, as the last may have fewer."""
    batch, samples, steps = plan["global_batch_size"], plan["num_samples"], plan["steps_per_epoch"]
    return min(batch, samples / steps) if samples and steps else float(batch)


def up_to_step(record: Record, step: int) -> Record | None:
    """Return a record of a step up to this one, or of none; else None."""
    return record if (record.get("step") or 0) <= step else None


def as_uninterrupted(
    written: Iterable[Record],
    path: Path,
    until: Callable[[Record, int], Record | None] = up_to_step,
) -> list[Record]:
    """Leave out of a run's records those that a later attempt has superseded."""
    records: list[Record] = []
    for record in written:
        if record["event"] == "start":
            check_format(record, path)
            if not record["resumed"]:
                records = []  # killed before its first checkpoint, and begun anew
        if record["event"] == "resume":
            # The end of an epoch has the same step as a checkpoint that a signal caused right
            # before it, so the step does not decide. Where a kill came between the checkpoint
            # and its record, nothing came after it.
            records = [cut for r in records if (cut := until(r, record["step"])) is not None]
            file = f"checkpoints/{record['checkpoint']}"
            saved = [n for n, r in enumerate(records) if r.get("path") == file]
            after = saved[-1] + 1 if saved else len(records)
            records[after:] = [r for r in records[after:] if r["event"] not in _DONE_AGAIN]
        records.append(record)
    return records
