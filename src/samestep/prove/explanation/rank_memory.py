"""What one rank holds in memory, and what a checkpoint holds, counted in one real step.

The step has the samples of one micro-step and runs on the CPU, whatever the training's device.
"""

import io
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from samestep.base.machine import free_memory_bytes
from samestep.base.settings import Settings
from samestep.base.trees import map_tensors, tree_leaves
from samestep.core.data.order import Block, held_parts
from samestep.core.data.recipe_data import open_split
from samestep.core.learner.averages import Average
from samestep.core.learner.batch_transform import BatchTransform
from samestep.core.learner.device import data_dtype
from samestep.core.learner.optimizer_state import members_of
from samestep.core.learner.sharding import find_blocks
from samestep.core.learner.side_effects import RandomDraws, batch_norms, watched
from samestep.core.learner.tree import TreeSum
from samestep.core.plan import Plan, learning_rate
from samestep.core.session.build import Built
from samestep.core.session.request import Request, to_toml
from samestep.core.session.session import state_bytes
from samestep.core.training.snapshot import capture
from samestep.core.training.step import check_used
from samestep.core.training.steps import eager_step
from samestep.launch.ranks.nproc import RANK_BYTES
from samestep.launch.ranks.world import World

_TIMES_THE_WEIGHTS = 4
"""What a step takes at least: weights, gradients, and two numbers per weight in the optimizer."""


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """Something that a rank holds."""

    bytes: int
    elements: int
    copies: int = 1
    """How many of them are held at a time; `bytes` counts all of them."""


NOTHING = MemoryPart(bytes=0, elements=0)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank holds in the middle of a step, as far as it can be counted."""

    weights: MemoryPart  # the trained weights, and those that are frozen
    buffers: MemoryPart
    gradients: MemoryPart
    """More than one copy with virtual ranks, whose sums wait for each other."""
    optimizer: dict[str, MemoryPart]  # name of the state → all weights' part of it
    average: MemoryPart = NOTHING  # of --ema
    batch: MemoryPart = NOTHING  # inputs and targets of one micro-step
    activations: MemoryPart = NOTHING  # what one micro-step's forward keeps for its backward
    gathered: MemoryPart = NOTHING
    """Of a loss over the whole batch: the outputs and targets of all ranks, which each rank
    receives in each step, and the gradients of these outputs."""
    data: MemoryPart = NOTHING  # samples held in memory, all of them on every rank
    blocks: MemoryPart = NOTHING
    """Of --strategy fsdp: what is gathered at once, weights and gradients of blocks."""

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        parts = [part for part in vars(self).values() if isinstance(part, MemoryPart)]
        return sum(part.bytes for part in (*parts, *self.optimizer.values()))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What makes a forward depend on which samples are together on a rank."""

    draws: dict[str, str]
    """Random operation of torch → the user's line that calls it, or ""."""
    generators: tuple[str, ...]  # Python's or NumPy's, if used
    batch_norms: tuple[str, ...]  # names of the layers


def _address(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors and some subclasses
        return None


def is_too_large(model: nn.Module) -> bool:
    """Whether a step of this model would take more memory than this machine has free."""
    free = free_memory_bytes()
    weights = sum(p.nbytes for p in model.parameters())
    return free is not None and (_TIMES_THE_WEIGHTS - 1) * weights > free


def measure(request: Request, built: Built, plan: Plan, rows: int) -> tuple[RankMemory, Drawn]:
    """Take one step of `rows` samples, which changes the weights; return what it held, and drew."""
    work, draws = built.work, RandomDraws()
    model, module = work.learner.model, work.learner.applied
    saved: dict[int, tuple[int, int]] = {}  # address of what the forward saves → bytes, elements
    forwards = True
    outputs: list[Tensor] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = module(*args, **kwargs)
        outputs[:] = _tensors(output)
        return output

    def pack(tensor: Tensor) -> Tensor:
        if forwards and (where := _address(tensor)) is not None and where not in addresses:
            size = tensor.untyped_storage().nbytes()
            saved[where] = size, size // tensor.element_size()
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        nonlocal forwards
        forwards = False
        return tensor

    learner = replace(
        work.learner,
        scaler=None,
        counter=None,
        measured=False,
        carried=work.learner.carried and work.learner.carried.alone(rows),
        wrapped=cast("Any", watched(forward, draws)),
        loss=watched(work.learner.loss, draws),
    )
    block = _real_batch(request, built, rows)
    if work.batch_transform is not None:
        block = BatchTransform(request.recipe, work.settings, World())(block, 0, 0)
    tensors = _tensors((block.inputs, block.targets))
    batch = list({id(tensor): tensor for tensor in tensors}.values())
    addresses = {_address(tensor) for tensor in (*model.parameters(), *model.buffers(), *batch)}
    model.train()
    step = eager_step(learner, work.settings, World(), rows)
    with saved_tensors_hooks(pack, unpack):
        step(block, 0, [learning_rate(plan, work.settings, 0)], want_norm=False)
    if plan.world_size > 1 and not work.settings.allows_unused:
        check_used(model)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    average = work.learner.average
    averages = average.state() if isinstance(average, Average) else {}
    sources = [source for source in work.sources() if source.held_bytes]
    sizes, elements = (sum(counts) for counts in zip((0, 0), *saved.values(), strict=True))
    memory = RankMemory(
        weights=_memory_of(model.parameters()),
        buffers=_memory_of(model.buffers()),
        gradients=_memory_of(gradients, copies=_sums_at_a_time(built)),
        optimizer=_optimizer_parts(work.learner.optimizer),
        average=_memory_of({id(a): a for a in averages.values()}.values()),
        batch=_memory_of(batch),
        activations=MemoryPart(bytes=sizes, elements=elements),
        gathered=_gathered(outputs, block.targets, plan.global_batch_size, rows)
        if work.learner.over_batch
        else NOTHING,
        data=MemoryPart(
            bytes=sum(source.held_bytes for source in sources),
            elements=sum(source.num_samples for source in sources),
        ),
    )
    drawn = Drawn(
        draws=dict(draws.draws),
        generators=tuple(sorted(draws.generators)),
        batch_norms=tuple(batch_norms(model)),
    )
    return memory, drawn


@dataclass(frozen=True, kw_only=True)
class StrategyMemory:
    """What a rank holds by one strategy, and whether all ranks of a node fit."""

    bytes_per_rank: int
    complete: bool
    """Whether activations, batch and data are in it; else it is what is needed at least."""
    available_bytes: int | None
    """What this machine has free for all of them, or its GPU for one rank; None: unknown."""
    fits: bool | None


def shared_out(
    memory: RankMemory, model: nn.Module, classes: tuple[type, ...], by: int
) -> RankMemory:
    """Return a rank's memory if `by` ranks shard a model with FSDP.

    In the backward, two blocks' weights are gathered at once (the next one's early), and a block's
    gradients lie there whole and once more in the order in which they are sent; what belongs to no
    block stays gathered from the forward on.
    """

    def part(whole: MemoryPart) -> MemoryPart:
        size, elements = -(-whole.bytes // by), -(-whole.elements // by)
        return replace(whole, bytes=size, elements=elements)

    blocks = [_memory_of(block.parameters()) for block in find_blocks(model, classes)]
    largest = max(blocks, key=lambda block: block.bytes, default=NOTHING)
    rest_bytes = max(0, memory.weights.bytes - sum(block.bytes for block in blocks))
    rest_elements = max(0, memory.weights.elements - sum(block.elements for block in blocks))
    return replace(
        memory,
        weights=part(memory.weights),
        gradients=part(memory.gradients),
        optimizer={name: part(state) for name, state in memory.optimizer.items()},
        average=part(memory.average),
        blocks=MemoryPart(
            bytes=4 * largest.bytes + 2 * rest_bytes,
            elements=4 * largest.elements + 2 * rest_elements,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class WholeMatrices:
    """What `torch.optim.Muon` takes while it steps: every rank orthogonalises all matrices."""

    number: int
    flops: int  # of Newton-Schulz in each step, on each rank
    largest_bytes: int
    """For a moment: the largest matrix, and what Newton-Schulz makes of it."""
    gathered_bytes: int  # of all matrices in each step, with --strategy fsdp; else 0


def whole_matrices(optimizer: torch.optim.Optimizer, settings: Settings) -> WholeMatrices | None:
    """Return the cost of Muon's matrices; None if no optimizer is `torch.optim.Muon`."""
    members = [member for member in members_of(optimizer) if isinstance(member, torch.optim.Muon)]
    groups = [group for member in members for group in member.param_groups]
    turns = [(p, group["ns_steps"]) for group in groups for p in group["params"]]
    if not turns:
        return None
    shapes = [(*sorted(p.shape), p.nbytes, steps) for p, steps in turns]
    each = 4 if settings.newton_schulz == "fp32" else 2  # bytes
    return WholeMatrices(
        number=len(turns),
        flops=sum(2 * few * few * (2 * many + few) * steps for few, many, _, steps in shapes),
        largest_bytes=max(n + 2 * each * few * (few + many) for few, many, n, _ in shapes),
        gathered_bytes=sum(n for *_, n, _ in shapes) if settings.strategy == "fsdp" else 0,
    )


def least_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> RankMemory:
    """Return a rank's memory besides activations and data, without taking a step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    size = state_bytes([], [optimizer])
    return RankMemory(
        weights=_memory_of(model.parameters()),
        buffers=_memory_of(model.buffers()),
        gradients=_memory_of(trained),
        optimizer={"state": MemoryPart(bytes=size, elements=size // trained[0].element_size())},
    )


def fitting(
    memory: RankMemory, device: str, ranks_here: int, free_bytes: int | None, *, complete: bool
) -> StrategyMemory:
    """Return whether the ranks of a node, each with this memory, fit on this machine."""
    available = None
    together = memory.total
    if device == "cpu":
        available, together = free_bytes, (memory.total + RANK_BYTES) * ranks_here
    elif device == "cuda" and torch.cuda.is_available():
        available = torch.cuda.mem_get_info()[1]
    return StrategyMemory(
        bytes_per_rank=memory.total,
        complete=complete,
        available_bytes=available,
        fits=None if available is None else together <= available,
    )


def _gathered(outputs: list[Tensor], targets: Any, global_batch: int, rows: int) -> MemoryPart:
    """Return the memory that a loss over the whole batch gathers, scaled from one micro-step."""
    held = _memory_of([*outputs, *outputs, *_tensors(targets)])  # outputs, and their gradients
    bytes_of_all, elements = (n * global_batch // rows for n in (held.bytes, held.elements))
    return MemoryPart(bytes=bytes_of_all, elements=elements)


def _real_batch(request: Request, built: Built, rows: int) -> Block:
    """Return the first samples of the first epoch as a single process would train on them."""
    settings, plan = built.work.settings, built.work.plan
    if plan.by_tokens is not None:  # samples of any length would be padded to more
        steps = built.work.train.blocks(0, 0, global_batch=rows, drop_last=False, cut=plan.cut)
        return replace(next(steps).parts[0], parts=())
    dtype = data_dtype(settings.precision)
    with closing(
        open_split(built.splits.train, World(), request.recipe, settings, dtype)
    ) as source:
        blocks = source.blocks(0, 0, global_batch=rows, drop_last=False)
        block = next(single for block in blocks for single in block.singles())
    if block.parts:
        (part,) = block.parts
        return replace(part, parts=())
    # Steps that were gathered together share their memory.
    inputs = map_tensors(torch.clone, block.inputs)
    same = block.targets is block.inputs
    targets = inputs if same else map_tensors(torch.clone, block.targets)
    return replace(block, inputs=inputs, targets=targets)


def _sums_at_a_time(built: Built) -> int:
    """Return the most sums of gradients that a rank holds while it adds up its virtual ranks."""
    world = built.work.world
    tree: TreeSum[None] = TreeSum(lambda _left, _right: None)
    most = 1
    for part in held_parts(world) if world.virtual_ranks else ():
        most = max(most, len(tree.roots) + 1)
        tree.push(None, part)
    return most


def _optimizer_parts(optimizer: torch.optim.Optimizer) -> dict[str, MemoryPart]:
    tensors: dict[str, list[Tensor]] = {}
    for state in optimizer.state.values():
        for name, value in state.items():
            tensors.setdefault(name, []).extend(_tensors(value))
    return {name: _memory_of(of_name) for name, of_name in tensors.items() if of_name}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _memory_of(tensors: Iterable[Tensor], copies: int = 1) -> MemoryPart:
    sizes = [(tensor.nbytes, tensor.numel()) for tensor in tensors]
    num_bytes, elements = (sum(counts) for counts in zip((0, 0), *sizes, strict=True))
    return MemoryPart(bytes=num_bytes * copies, elements=elements, copies=copies)


class _ByteCount(io.RawIOBase):
    """A file that counts the bytes written to it and keeps none."""

    bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self.bytes += memoryview(data).nbytes
        return memoryview(data).nbytes


def checkpoint_bytes(request: Request, built: Built) -> int:
    """Return the size of a checkpoint of a training that has taken a step."""
    content = capture(built.work, built.state, request.recipe.name)
    content["made_with"] = to_toml(request, built.work.plan)
    count = _ByteCount()
    torch.save(content, cast("BinaryIO", count))
    return count.bytes
