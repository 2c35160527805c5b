"""What the ranks of a script tell `check`: an event for each thing that they do.

A watched rank appends events to a file of its own (`recorder.py`); once all have ended, the rules
read them (`rules/`). There is nothing between the two but these files, so a rank may die any time.

Paths are real ones, relative to the project where they lie in it. A digest or a checksum is a
number that tells bits from others.
"""

from typing import Any, Literal

from msgspec import Struct, field

Checksums = dict[str, int | None]
"""By name; None for a tensor without plain memory, or a gradient that is not there."""
FileMode = Literal["w", "a", "rename"]
ObjectKind = Literal["optimizer", "schedule", "loader", "scaler", "copy"]
StateKind = Literal["file", "model", "optimizer"]
StatePart = Literal["weights", "buffers", "optimizer", "scale", "copies"]


class Event(Struct, kw_only=True, omit_defaults=True, tag_field="kind", tag=True):
    """One thing that a rank did, and when."""

    where: str = ""
    """The innermost line of the user's code, `file.py:41`; empty if there was none."""
    step: int = 0  # optimizer steps that the rank had taken
    epoch: int = 0  # how often its training had begun to read from its loader
    evaluating: bool = False
    time: float = 0.0  # seconds since the rank was started


class VariableRead(Event):  # a launcher's variable was read, by the user's own code or by a library
    name: str
    value: str | None
    own: bool


class GroupMade(Event):  # the rank joins a process group; as which of how many, where that is known
    rank: int | None
    world_size: int | None
    own: bool


class GroupDestroyed(Event):
    """The process group of all ranks is about to be destroyed."""


class CollectiveCalled(Event):  # a collective is about to be called
    name: str
    op: str | None
    root: str | None
    shapes: list[list[int]]
    dtype: str | None
    group: str
    strides: list[int] | None  # those of the first tensor with memory between its elements
    trims: bool | None  # whether Accelerate leaves out repeated samples, where it gathers


class CudaAsked(Event):
    """The user's code asks whether there is a GPU."""


class DeviceAsked(Event):  # the user's code asked for a CUDA device
    index: int
    rank: int
    local_rank: int
    alone: bool  # whether nothing in its environment names a second node


class ErrorCaught(Event):  # an exception that the script may be about to swallow
    error: str
    text: str
    raised: str
    training: bool


class EpochRanOut(Event):
    """The script failed after an epoch that was cut short."""


class Remark(Event):  # what the user has to know about the run
    text: str


class RankEnded(Event):  # the last event of a rank that is not killed
    code: int
    text: str


class OfLoader(Event):  # what happens to a loader, or to several that look alike
    loader_id: int


class OfSampler(OfLoader):  # what a loader's sampler says of itself, also one in a batch sampler
    sampler: str
    sampler_made: str
    direct: bool  # whether the user's own code made it
    distributed: bool
    parts: int  # of how many it reads one
    set_epoch: int | None  # its epoch, if it knows epochs
    seed: int | None
    shuffle: bool | None


class LoaderRead(OfSampler):  # a loader is read for the first time
    data: int | None  # what tells its data set from others; None if nothing does
    views: list[int | None]  # the same of its tensors that are a part of others, and of those
    own: int | None  # the same of the subset, if it is one
    shard: str  # where one of its length was made by `shard`
    length: int | None
    base_length: int | None  # of the data set that subsets are made of
    batch_size: int | None
    workers: int
    iterable: bool
    reads: str  # where the `__iter__` of its data set is
    made: str
    asked: str | None  # where a loader of the same data set was asked to shuffle


class OrderDrawn(OfSampler):  # one pass over a loader, as its sampler gives it
    turn: int
    indices: list[int]
    batches: int
    count: int
    ended: bool
    truncated: bool
    left_out: int  # samples of a last batch that is not full
    permuted: bool = False  # whether `torch.randperm` was called for it


class BatchRead(OfLoader):  # a batch: how many samples it has, and a number for each of the first
    turn: int
    n: int
    rows: list[int]


class PassEnded(OfLoader):  # a pass came to its end, or to where it was cut
    turn: int
    cut: bool


class RandomDrawn(OfLoader):
    """What a data set drew for its first samples, in this process (-1) or in a worker."""

    worker: int
    drew: dict[str, list[int]]


class StreamPlaces(OfLoader):  # which rows of a tensor the samples of a stream are views of
    worker: int
    whole: int  # rows of the tensor
    places: list[int]


class DrawnAgain(Event):
    """Random numbers were drawn as in the steps before: in each, their source was seeded alike."""

    source: str


class SamplesLost(OfLoader):  # a batch has no row for some of its samples
    given: int
    lost: int


class JoinEntered(Event):
    """A context that lets ranks have batches left over."""


class LengthCut(Event):  # the length of a loader was asked for, and told as that of the short epoch
    whole: int


class OfModel(Event):  # what happens to a model; its number is that inside all wrappers
    model: str
    model_id: int


class ModelWrapped(OfModel):  # DDP or FSDP wraps a model
    wrapper: Literal["ddp", "fsdp"]
    parameters: int
    own: bool
    find_unused_parameters: bool | None
    broadcast_buffers: bool | None
    static_graph: bool | None


class ModelTrained(OfModel):  # the first forward pass of a model with gradients
    batch_norms: list[str]
    frozen_norms: list[str]
    shapes: dict[str, list[int]]
    tables: list[str]  # buffers that have rows
    frozen_in_vain: list[str]  # names that have an attribute which was meant to freeze them


class ForwardPass(OfModel):  # the outermost call of a module
    wrapped: bool
    inner: bool  # whether it is a part of a wrapped model, called without the wrapper
    training: bool
    modal: tuple[int, int]
    """Of the layers that differ in training, such as dropout: those in training mode, and all."""
    grad: bool
    n: int | None
    rows: list[int]
    drawn: bool  # whether its input is random numbers


class InferencePass(OfModel):  # a model's first call without gradients after a step
    weights: int
    shapes: int  # these two tell its parameters from others
    training: bool
    dropped: bool
    learnt: bool  # whether it dropped values as in training, and learnt statistics of the batch
    blank: int  # batch norms that evaluate with the mean of 0 that they are made with


class DropoutCalled(Event):
    """A function drops values of a model in evaluation mode, without gradients."""

    function: str
    p: float


class BackwardPass(Event):  # a backward pass is about to begin
    sync: bool  # whether it meets the other ranks'
    late: bool  # whether it does so within `no_sync`, which the forward was not in
    unused: dict[str, list[str]]  # what the loss leaves out, by the model's number
    closure: int = 0  # in which call of the closure that the step was given, from 1
    aided: bool = False  # whether the user's code called another library than PyTorch for it


class ModelSums(OfModel):  # all weights of a model
    parameters: Checksums
    buffers: Checksums
    sharded: bool


class WeightSums(ModelSums):
    """Weights before the first step and after some."""


class WeightSumsBefore(ModelSums):
    """Weights before some steps: what the script itself did to them is in it."""


class WeightsSaved(OfModel):
    """torch.save gets weights: as they were trained, or as they were before."""

    live: bool  # whether they are a module's own
    fresh: bool
    stale: bool
    parts: int  # into how many the weights are cut of which this rank's part is saved; 1 for whole


class NamesLoaded(Event):  # weights are loaded into a model
    into: int  # the number of its first parameter, which wrappers and outer models share
    strangers: list[str]  # their names, if none is one of the model's own
    own: list[str]  # the model's names, if these are strangers


class LoadedItself(Event):  # a model loads its own tensors of an earlier step
    taken: str
    at: int


class OptimizerMade(Event):  # an optimizer was made
    optimizer_id: int


class OptimizerStep(Event):
    """A step was taken; what the gradients were is known of the first steps, then rarely."""

    optimizer: str
    optimizer_id: int
    lr: float = 0.0
    models: list[int] = field(default_factory=list)
    thawed: list[str] = field(default_factory=list)
    """What changed though it needs no gradient and had none."""
    grads: Checksums = field(default_factory=dict)
    """Those before the step; 0 for one that is all zero."""
    still: list[str] = field(default_factory=list)  # what has a learning rate of 0
    strangers: list[tuple[list[int], int | None]] = field(default_factory=list)
    """Shapes of what is held and of no model, and checksums of its gradients."""
    unheld: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Shapes of what no optimizer holds and has a gradient, by the model's number."""
    tensors_replaced: list[str] = field(default_factory=list)


class GradientsUsed(Event):  # the gradients of an optimizer's step
    optimizer: str
    optimizer_id: int
    left: bool  # whether those of the step before were still there when the backward pass began
    cleared: str  # the line of a `zero_grad` after the last backward pass, or between several
    lost: int  # backward passes before it, if others followed
    tensors: int
    missing: int
    grown: float
    """What the script multiplied them by since the backward pass; 0 if it is not one number."""
    weights_grown: float | None = 1.0  # about what it multiplied weights by since the last step
    changes: list[tuple[float, float]] = field(default_factory=list)  # linear: before and after
    against: float = 0.0  # the cosine of the last pass's part and what the pass at `leaked` left
    leaked: str = ""


class LossReach(Event):  # what the graph of one of the first losses ends in, and its value
    value: float | None
    leaves: int
    parameters: int


class LossAverage(Event):  # what each summand of a loss counts for
    weight: float
    by: float  # the count that it is divided by
    other: float  # the product of its factors that are not counts
    count: float


class RowsLabelled(Event):  # labels of a loss over the rows of all ranks
    rows: int  # that this rank gave to the gather
    own: int  # the first column that these became
    first: int  # the first column that the labels point at
    blocks: list[int | None] = field(default_factory=list)  # or a number for each rank's labels


class OrdersDiffer(Event):  # predictions and labels of an evaluation are in other orders
    orders: tuple[str, str]  # of predictions, and of the labels of the same samples


class GradientsClipped(Event):  # gradients were clipped
    name: str
    limit: float
    norm: float | None
    scaled: float  # what the loss was multiplied by, if they still are
    sizes: list[int]
    sums: list[int | None]  # checksums before it


class ScalerStep(Event):  # a scaler's step
    scale: float
    skipped: bool


class ScaledStep(Event):  # a step with gradients that are still multiplied
    scale: float


class ScaleUpdated(Event):
    """A scaler's update is called."""


class AutocastKept(Event):
    """A second step within one autocast."""


class SchedulerMade(Event):  # a scheduler was made, perhaps of others
    scheduler: str
    scheduler_id: int
    total: int | None  # for how many steps
    inner: list[int]
    lr: float = 0.0


class SchedulerStep(Event):  # a scheduler was stepped
    scheduler_id: int
    lr: float
    replaced: bool  # whether other optimizers step the weights of its own
    metric: float | None = None  # the number that it follows


class GradientCompared(Event):
    """The gradient of the first step, compared with that of the joined batch in one process."""

    residual: float = 0.0
    direction: float = 0.0
    scale: float = 1.0
    first: str = ""
    averaged: bool = False  # whether it is the mean of what the ranks had
    sizes: list[int] = field(default_factory=list)
    rough: bool = False
    not_seen: str = ""  # why it could not be compared


class NumberRead(Event):  # a tensor of one element became a Python number
    value: float | None  # None for NaN


class NumbersShown(Event):  # numbers were printed or logged
    numbers: list[str]
    labelled: bool  # whether the text names this rank with its number


class NumbersReduced(Event):  # a small tensor before its all-reduce, or before it is gathered
    op: str
    values: list[float]
    metric: bool  # whether it is more than what a library counts for itself
    bent: list[dict[str, float]]
    """What a value is that may have no mean: "root", "exp", or a quotient, with its divisor."""


class NumberAveraged(Event):
    """The first number of such a sum, once it is divided by the number of ranks in place."""

    value: float


class FileWritten(Event):  # a file is emptied (`w`), appended to (`a`) or replaced
    path: str
    mode: FileMode


class FileSaved(Event):  # torch.save, or one like it
    path: str | None
    tensors: int
    wrapped: list[str]  # names that begin with a wrapper's, if all do
    resumable: bool  # whether an optimizer's state is in it


class FileLoaded(Event):  # torch.load
    path: str
    map_location: str | None
    weights_only: bool | None
    names: list[str]
    own: bool


class FileFetched(Event):  # something is downloaded, or a data set is asked to do so
    what: str
    fetched: bool


class TrackerStarted(Event):  # a tracker was started
    name: str
    asked: dict[str, str]


class BarShown(Event):  # a progress bar was made
    name: str
    disabled: bool
    position: int | None


class TrainingState(Event):  # the state in which a step begins, as digests
    weights: list[int | None]
    buffers: list[int | None]
    optimizer: list[int | None]
    copies: list[int]  # other models with weights, averages of the trained ones among them
    scale: list[float]
    random: dict[str, int]
    averages: set[int] = field(default_factory=set)  # copies that change in most steps


class StepBegun(TrainingState, kw_only=True):
    """A step that the optimizer is about to take, and what it depends on."""

    groups: list[dict[str, list[float]]]
    rows: list[int]
    indices: list[int]
    loss: float | None  # None if it is not finite
    gradients: list[int | None]
    iterable: bool


class FinalState(TrainingState):
    """The state after the last step."""


class WeightNames(Event):  # the names of the weights, in the order of the optimizers
    names: list[str]


class ObjectMade(Event):  # where something is made that a checkpoint holds the state of
    what: ObjectKind


class CheckpointSaved(Event):  # a checkpoint, or a part of one
    path: str
    leaves: dict[str, Any]  # what is in it by its path in the tree; of a tensor [its digest]
    apart: bool  # whether another thread wrote it
    changed: bool  # whether the training changed it meanwhile
    renamed: bool = False


class FileRenamed(Event):  # a file or folder got another name, perhaps as it was whole
    old: str
    path: str


class StateLoaded(Event):  # a file, or a part of the state, was loaded before the first step
    what: StateKind
    path: str
    names: list[str]


class CheckpointGone(Event):  # a file that was loaded is not as it was at the first step
    path: str


class WaitsForKill(Event):
    """This rank stopped before a step, and waits to be killed."""
