"""From measured numbers to one bottleneck, what it costs, and the one thing to change."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from samestep.base.run.records import COMPUTE
from samestep.base.words import count, size
from samestep.scripts.measuring.measured import MeasuredSteps, Operations

# A rank is a straggler if it is slower by this fraction of a step: ranks take turns at being last.
_STRAGGLES = 0.15
# A run counts as oversubscribed if a thread waits for a core longer than this fraction of a step,
# and the ranks by themselves would use more than this many times the available cores.
_STARVED, _OVER = 0.2, 1.2
# From this fraction of a step on, a wait for data is named even if another part takes longer.
_WAITS_LONG = 0.2
# Evaluations and checkpoints may take this fraction of the time.
_AFFORDABLE = 0.05
_LATENCY_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of every step that has a remedy of its own."""

    kind: str
    seconds: float  # per step


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What bounds the training, in numbers per step."""

    kind: str
    seconds: float
    step: float  # seconds per step, with its share of evaluations and checkpoints
    why: str  # the evidence, a sentence
    change: str  # the one thing to change, a sentence
    ceiling: float  # how many times as fast training would be without the bottleneck
    next_kind: str  # what would bound it then
    next_seconds: float
    parts: tuple[StepPart, ...]  # all parts, the largest first; they add up to the step
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the step that the bottleneck takes."""
        return self.seconds / self.step


def diagnose(measured: MeasuredSteps) -> Bottleneck:
    """Return the verdict on some measured steps."""
    parts = sorted(split(measured), key=lambda part: -part.seconds)
    total = max(sum(part.seconds for part in parts), 1e-9)  # a clock may not have moved
    first, *rest = parts
    starved = max(rank.starved for rank in measured.ranks)
    started = measured.local_ranks * (measured.threads + measured.workers)
    wanted = min(started, measured.wanted_cores)  # leaves out other programs' use of the cores
    if wanted >= _OVER * measured.cores and starved >= _STARVED * total:
        first, rest = StepPart(kind="oversubscribed", seconds=min(starved, total)), parts
    # Time that was not traced is not a bottleneck.
    following = next((p for p in rest if p.seconds > 0 and p.kind != "untraced"), first)
    facts = _facts(first, measured)
    holds = _conditions(measured)
    why, change = (
        (text if isinstance(text, str) else next(t for name, t in text.items() if holds[name]))
        for text in ADVICE[first.kind]
    )
    return Bottleneck(
        kind=first.kind,
        seconds=first.seconds,
        step=total,
        why=why.format(**facts),
        change=change.format(**facts),
        ceiling=total / max(total - first.seconds, 1e-9 * total),
        next_kind=following.kind,
        next_seconds=following.seconds,
        parts=tuple(parts),
        notes=_notes(measured, first.kind, starved),
    )


def split(measured: MeasuredSteps) -> list[StepPart]:
    """Split a typical rank's step into parts that add up to it."""
    phases, operations = measured.typical.phases, measured.typical.operations
    seconds = {
        "input-bound": phases.get("data", 0.0),
        "transfer-bound": phases.get("to_device", 0.0),
        "evaluation-bound": phases.get("evaluation", 0.0) + measured.evaluation,
        "checkpoint-bound": phases.get("checkpoint", 0.0) + measured.checkpoint,
        "loop-bound": phases.get("other", 0.0),
        "communication-bound": phases.get("all_reduce", 0.0),
    }
    if measured.excess >= _STRAGGLES * measured.typical.step:
        link = min(rank.phases.get("all_reduce", 0.0) for rank in measured.ranks)
        seconds["straggler"] = seconds["communication-bound"] - link
        seconds["communication-bound"] = link
    computing = sum(phases.get(phase, 0.0) for phase in COMPUTE)
    seconds |= _split_computing(computing, operations)
    return [StepPart(kind=kind, seconds=part) for kind, part in seconds.items()]


def _split_computing(seconds: float, operations: Operations | None) -> dict[str, float]:
    """Split what an untraced step computes by what limits it.

    Tracing delays the host, but no kernel: on a GPU the kernels take as long in an untraced step,
    and the rest of it waits for the host. So the verdict does not depend on the tracer's cost.
    """
    if operations is None:
        return {"untraced": seconds}
    waits = {"launch-bound": operations.launch, "host-sync": operations.sync}
    works = {"memory-bound": operations.memory, "compute-bound": operations.matmul}
    if operations.gpu_busy is None:
        parts = [(waits | works, seconds)]
    else:
        worked = min(operations.gpu_busy, seconds)
        parts = [(works, worked), (waits, seconds - worked)]
    return {
        kind: part * share / (sum(shares.values()) or 1.0)
        for shares, part in parts
        for kind, share in shares.items()
    }


def milliseconds(seconds: float) -> str:
    """Return a duration with three digits: 0.0042 ms, 4.20 ms, 420 ms, 4,200 ms."""
    value = seconds * 1000
    if value >= 100:
        return f"{value:,.0f} ms"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 4)}f} ms"


class Advice(NamedTuple):
    """The evidence for a bottleneck and the one thing to change, or condition → text of several."""

    why: dict[str, str] | str
    change: dict[str, str] | str


_WAITS = "The step waits {part} for its data"
_REDUCES = "The ranks wait {part} for their all-reduce"
_MORE_WORKERS = "{more_workers}: DataLoader(…, num_workers={enough})"
_RARELY = Advice(
    why="{Rare}s take {part}, averaged over the steps.",
    change="{verb} {factor} times less often{every}: then it takes less than {affordable}.",
)
ADVICE = {
    "input-bound": Advice(
        why={
            "starts workers": f"{_WAITS}, {{worker_start}} of it for loader processes to start: "
            "they are started again in every epoch.",
            "collates": f"{_WAITS}, and {{collate}} of the wait collates samples, in the training "
            "process itself.",
            "in memory": f"{_WAITS}, which is gathered and transformed from memory.",
            "has workers": f"{_WAITS}, which {{workers}} cannot read as fast as it trains.",
            "else": f"{_WAITS}, which the training process reads itself.",
        },
        change={
            "starts workers": "Keep the workers between epochs: build the DataLoader once, with "
            "persistent_workers=True. From the second epoch on this changes the order, unless the "
            "sampler has its own generator, or set_epoch.",
            "in memory": "Make transform and augment cheaper: they get a batch, so they need no "
            "loop over samples.",
            "all cores work": "Make reading a sample cheaper: decode once and keep the result, or "
            "hold the data in memory; {cores} feed no more than {workers} per rank.",
            "recipe": "Read in worker processes, --num-workers {enough}: --workers {tried} here "
            "finds how many.",
            "iterable": f"{_MORE_WORKERS}, with an IterableDataset whose __iter__ yields only its "
            "worker's share (torch.utils.data.get_worker_info()): else each worker yields all.",
            "else": f"{_MORE_WORKERS}, then profile again.",
        },
    ),
    "transfer-bound": Advice(
        why="Copying batches to the device takes {part}.",
        change={
            "script": "Keep the data on the device, or pin the memory it comes from.",
            # It is pinned already, and copied while the device computes.
            "else": "Make batches smaller: return inputs as bytes, and convert them to floats in "
            "the recipe's transform, which runs on the device.",
        },
    ),
    "communication-bound": Advice(
        why={
            "no gradients": f"{_REDUCES}, beyond what backward hides.",
            "few gradients": f"{_REDUCES} of {{gradients}} of gradients: so few bytes are all "
            "latency, paid once per step at any batch size.",
            "else": f"{_REDUCES} of {{gradients}} of gradients, at {{gb_per_s}} GB/s.",
        },
        change={
            "script": "Exchange gradients less often: more samples per rank and step, or several "
            "micro-steps under no_sync(); `samestep doctor` measures the link.",
            "few gradients": "Let each step compute more: a larger --batch-size, or fewer ranks.",
            "else": "Exchange gradients less often: --accumulate 4 does so once in four "
            "micro-steps; `samestep doctor`, started the same way, measures the link.",
        },
    ),
    "straggler": Advice(
        why="The others wait {part} for rank {slowest}, which takes {longer} than they do.",
        change="Check rank {slowest} and its node: `samestep doctor`, started the same way, "
        "compares clocks, cores and speed of all ranks; exclude that node if it is slow.",
    ),
    "launch-bound": Advice(
        why="Python and starting operations take {part}: {calls} PyTorch calls per step, each with "
        "{overhead} µs of overhead.",
        change={
            "compiled": "More work per operation: a larger --batch-size.",
            "script": "torch.compile(model), or more samples per step: each operation then does "
            "more work.",
            "one rank": "--compile on makes one graph of whole steps.",
            "else": "More samples per step (--batch-size), or fewer ranks for so small a model.",
        },
    ),
    "host-sync": Advice(
        why="Reading {syncs} numbers per step from tensors (.item(), float(), int(), bool()) takes "
        "{part}: each read waits for its value.",
        change="Sum them as tensors, and read them once in many steps.",
    ),
    "memory-bound": Advice(
        why="Operations that move data and compute little take {part}{top_memory}.",
        change={
            "long updates": "The optimizer moves all weights once per step: train more samples "
            "per step.",
            "script": "torch.compile(model): it fuses operations, so that data is moved once.",
            "compiled": "--precision bf16 halves the data moved, if the device supports it.",
            "else": "--compile on fuses operations, so that data is moved once.",
        },
    ),
    "compute-bound": Advice(
        why="Computing takes {part}{top_matmul}.",
        change={
            "CPU": "Nothing else limits it: use a faster device, or ranks on more devices.",
            "else": "Nothing else limits it: use --precision bf16 if it is not on yet, or more "
            "devices.",
        },
    ),
    "untraced": Advice(
        why="Computing takes {part}; no step of it was traced.",
        change="Let it take more steps: a trace of some shows what they compute.",
    ),
    "evaluation-bound": _RARELY,
    "checkpoint-bound": _RARELY,
    "loop-bound": Advice(
        why="The loop's own Python between the steps ({between}logging, metrics) takes {part}.",
        change={
            "script": "Do the work between steps less often: logging, metrics, images, prints.",
            "else": "--log-every with a larger number.",
        },
    ),
    "oversubscribed": Advice(
        why="{ranks} of {threads} and {workers} want {wanted} cores, and there {are}: threads "
        "wait for a core {part}.",
        change={
            "many threads": "{set_threads}: as many threads as each rank has cores.",
            "many workers": "Fewer workers: {fitting_workers} per rank.",
            "else": "Fewer ranks: {cores} for {local_ranks} of them.",
        },
    ),
}
"""By kind of bottleneck. Of several texts, the first counts whose condition holds (`_conditions`);
`_facts` has what they name."""


def _conditions(m: MeasuredSteps) -> dict[str, object]:
    phases, free = m.typical.phases, m.cores // m.local_ranks
    computing = sum(phases.get(phase, 0.0) for phase in COMPUTE)
    return {
        "starts workers": m.worker_start > phases.get("data", 0.0) / 2,
        "collates": m.traced.collate > 0.4 and not m.workers,
        "in memory": m.in_memory,
        "has workers": m.workers,
        "all cores work": m.workers >= max(1, free),
        "iterable": m.iterable,
        "recipe": not m.script,
        "script": m.script,
        "compiled": m.compiled,
        "no gradients": not m.gradient_bytes,
        "few gradients": m.gradient_bytes < _LATENCY_BYTES,
        "one rank": len(m.ranks) == 1,
        "long updates": phases.get("optimizer", 0.0) > 0.5 * computing,
        "CPU": m.device == "cpu",
        "many threads": m.threads > max(1, free),
        "many workers": m.workers > 1,
        "else": True,
    }


def _facts(bottleneck: StepPart, m: MeasuredSteps) -> dict[str, object]:
    seconds, traced, slow, typical = bottleneck.seconds, m.traced, m.ranks[m.slowest], m.typical
    number, free = len(m.ranks), m.cores // m.local_ranks
    gigabytes = 2 * (number - 1) / number * m.gradient_bytes / 1e9
    longer, to_do = max(
        (sum(slow.phases.get(p, 0.0) - typical.phases.get(p, 0.0) for p in names), to_do)
        for to_do, names in (("for its data", ("data", "to_device")), ("to compute", COMPUTE))
    )
    rare = bottleneck.kind.removesuffix("-bound")
    step = typical.step + m.evaluation + m.checkpoint
    others = typical.step - typical.phases.get(rare, 0.0)
    factor = max(2, math.ceil(seconds / max(_AFFORDABLE * others, 1e-9)))
    every = f", once in {m.counts[rare] * factor:,} steps" if m.counts.get(rare) else ""
    verb, flags = "Save", "--checkpoint-every-epochs, -steps, -minutes"
    if rare == "evaluation":
        verb, flags = "Evaluate", "--eval-every-epochs, --eval-every-steps"
    threads = max(1, free)
    return {
        "part": f"{milliseconds(seconds)} of a step of {milliseconds(step)}",
        "ranks": count(m.local_ranks, "rank"),
        "local_ranks": m.local_ranks,
        "threads": count(m.threads, "thread"),
        "workers": count(m.workers, "worker"),
        "cores": count(m.cores, "core"),
        "are": f"{'is' if m.cores == 1 else 'are'} {m.cores}",
        "wanted": f"{m.wanted_cores:.1f}",
        "set_threads": f"torch.set_num_threads({threads})" if m.script else f"--threads {threads}",
        "fitting_workers": max(1, free - 1),
        "worker_start": milliseconds(m.worker_start),
        "collate": f"{traced.collate:.0%}",
        "tried": ",".join(str(n) for n in (0, 1, 2, 4, 8) if n <= max(4, free)),
        "more_workers": "More workers" if m.workers else "Read in worker processes",
        "enough": max(2, free),
        "gradients": size(m.gradient_bytes),
        "gb_per_s": f"{gigabytes / max(seconds, 1e-9):.2g}",
        "slowest": m.slowest,
        "longer": f"{milliseconds(longer)} longer {to_do}",
        "calls": f"{traced.count:,.0f}",
        "overhead": f"{seconds / max(traced.count, 1) * 1e6:.1f}",
        "syncs": f"{traced.syncs:,.0f}",
        "top_matmul": _top(traced.top_matmul),
        "top_memory": _top(traced.top_memory),
        # Without a DataLoader, making batches cannot be separated from the loop.
        "between": "making batches, " if m.script and m.in_memory else "",
        "Rare": rare.capitalize(),
        "verb": verb,
        "factor": factor,
        "every": every if m.script else f"{every} ({flags})",
        "affordable": f"{_AFFORDABLE:.0%}",
    }


def _top(top: tuple[tuple[str, float], ...]) -> str:
    return ": " + ", ".join(f"{name} {share:.0%}" for name, share in top[:3]) if top else ""


def _notes(measured: MeasuredSteps, kind: str, starved: float) -> tuple[str, ...]:
    notes = []
    if measured.stopped:
        notes.append(f"A stop signal came: this is what {measured.steps:,} steps until then show.")
    if starved >= _STARVED * measured.typical.step and kind != "oversubscribed":
        notes.append(
            f"Other programs use the cores: threads waited {milliseconds(starved)} per step for a "
            "core, so these times are too long. Measure again on an idle machine."
        )
    if measured.profiled_itself:
        notes.append(
            "The script profiles some of its steps itself: they are left out, and so is its "
            "handling of the trace."
        )
    step, waits = measured.typical.step, measured.typical.phases.get("data", 0.0)
    reads_itself = not (measured.workers or measured.in_memory)
    if kind != "input-bound" and reads_itself and waits >= _WAITS_LONG * step:
        flag = "DataLoader(…, num_workers=2)" if measured.script else "--num-workers 2"
        notes.append(
            f"The step also waits {milliseconds(waits)} ({waits / step:.0%}) for its data, which "
            f"the training process reads itself: {flag} reads it meanwhile."
        )
    syncs = measured.traced.syncs
    if syncs >= 0.5 and kind != "host-sync":
        cost = "costs little on the CPU, but leaves a GPU idle"
        if measured.device != "cpu":
            cost = "leaves the device idle until the host catches up"
        notes.append(
            f"The step reads {syncs:.3g} number{'' if syncs == 1 else 's'} from tensors (.item(), "
            f"float()); that {cost}. Read them once in many steps."
        )
    return tuple(notes)
