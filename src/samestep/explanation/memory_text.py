"""The memory of one rank in words: bytes, and how they follow."""

from collections.abc import Iterator

from samestep.explanation.explain import Explanation
from samestep.explanation.rank_memory import Part, RankMemory
from samestep.ranks.nproc import RANK_BYTES
from samestep.reporting.words import count, size


def memory_rows(told: Explanation) -> Iterator[tuple[str, str]]:
    """Yield what a rank holds, each with its name."""
    memory = told.memory
    if memory is None:
        yield "not measured", told.not_measured
        return
    yield "weights", _told(memory.weights)
    if memory.buffers.bytes:
        yield "buffers", _told(memory.buffers)
    yield "gradients", _told(memory.gradients)
    yield "optimizer", _optimizer(memory)
    if told.settings.ema is not None:
        yield "average", f"{_told(memory.average)} (--ema), once more while it evaluates"
    samples = count(told.step.most, "sample")
    yield "a batch", f"{size(memory.batch.bytes)}: inputs and targets of a micro-step, {samples}"
    text = (
        f"{size(memory.activations.bytes)}: what one forward of {samples} keeps for its backward"
        f"{_again(told)}"
    )
    yield "activations", text
    yield "data", _data(told, memory)
    yield "together", f"{size(memory.total)} per rank"
    yield from _not_counted(told)


def _told(part: Part) -> str:
    """Return bytes as a product, where all elements are of one size."""
    if not part.elements:
        return "nothing"
    each, rest = divmod(part.bytes, part.elements * part.copies)
    copies = f"{part.copies} × " if part.copies > 1 else ""
    how = f"{part.elements:,} × {each} bytes" if not rest else f"{part.elements:,} numbers"
    why = ", sums of virtual ranks that wait for each other" if part.copies > 1 else ""
    return f"{size(part.bytes)} = {copies}{how}{why}"


def _optimizer(memory: RankMemory) -> str:
    if not memory.optimizer:
        return "nothing: it remembers nothing between steps"
    total = sum(part.bytes for part in memory.optimizer.values())
    parts = (f"{name} {part.elements:,}" for name, part in memory.optimizer.items())
    each = {part.bytes / max(1, part.elements) for part in memory.optimizer.values()}
    times = f", each × {each.pop():g} bytes" if len(each) == 1 else ""
    return f"{size(total)}: {' + '.join(parts)} numbers{times}"


def _again(told: Explanation) -> str:
    if not told.settings.checkpoint_activations:
        return ""
    return "; inputs of the marked blocks are not in it"


def _data(told: Explanation, memory: RankMemory) -> str:
    if not memory.data.bytes:
        return "none: samples are read when they are needed"
    where = "in the rank's memory"
    if told.device == "cuda":
        where = "on its GPU where they fit a quarter of it, else in the CPU's memory"
    number = count(memory.data.elements, "sample")
    what = "to train and validate with" if told.evaluations.has_validation else "to train with"
    return f"{size(memory.data.bytes)}: {number} {what}, all of them {where}"


def _not_counted(told: Explanation) -> Iterator[tuple[str, str]]:
    ranks = told.plan.world_size > 1
    if ranks and not told.plan.virtual_ranks:
        yield "DDP", "its buckets take no more: the gradients lie in them"
    missing = ["results inside an operation", "what the allocator keeps in reserve"]
    if ranks:
        missing.append("what ranks send each other")
    if told.settings.compile == "on":
        missing.append("what compiling changes")
    if told.settings.num_workers:
        missing.append(f"the loader processes ({told.settings.num_workers} per rank)")
    if told.device == "cpu":
        base = f"Python and PyTorch themselves (about {RANK_BYTES >> 20} MiB)"
        yield "not counted", f"{base}, {', '.join(missing)}"
        return
    yield "not counted", f"Python and PyTorch themselves, {', '.join(missing)}"
    text = (
        "What a rank reserves beyond this is not known here: the numbers above were counted on "
        "the CPU, and a GPU's kernels may keep more."
    )
    yield "on the GPU", text
