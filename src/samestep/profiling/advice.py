"""What a bottleneck means in the measured numbers, and the one thing to change."""

import math

from samestep.profiling.measured import MeasuredSteps
from samestep.reporting.words import count
from samestep.run.phase_names import COMPUTE

# What evaluations and checkpoints may take of the time: below it there is nothing to gain.
_AFFORDABLE = 0.05
_LATENCY_BYTES = 1 << 20


def milliseconds(seconds: float) -> str:
    """Return a duration with three digits: 0.0042 ms, 4.20 ms, 420 ms, 4,200 ms."""
    value = seconds * 1000
    if value >= 100:
        return f"{value:,.0f} ms"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 4)}f} ms"


def _bytes(size: int) -> str:
    """Return less than a MiB with its unit: 136 bytes, 12 KiB."""
    return f"{size / 1024:,.0f} KiB" if size >= 1024 else f"{size} bytes"


def _of_step(seconds: float, measured: MeasuredSteps) -> str:
    step = measured.typical.step + measured.evaluation + measured.checkpoint
    return f"{milliseconds(seconds)} of a step of {milliseconds(step)}"


def _input(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    why = f"The step waits {_of_step(seconds, measured)} for its data"
    workers, free = measured.workers, measured.cores // measured.local_ranks
    if measured.worker_start > seconds / 2:
        why += f", {milliseconds(measured.worker_start)} of it for loader processes to start: they "
        change = "Keep the workers between epochs: build the DataLoader once, with "
        return why + "are started again in every epoch.", change + "persistent_workers=True."
    collate = measured.traced.collate
    if collate > 0.4 and not workers:
        why += f", and {collate:.0%} of the wait puts samples together to a batch, in "
        why += "the training process itself."
    elif measured.in_memory:
        why += ", which is gathered and transformed from memory."
    elif workers:
        why += f", which {count(workers, 'worker')} cannot read as fast as it trains."
    else:
        why += ", which the training process reads itself."
    if measured.in_memory:
        change = (
            "Make transform and augment cheaper: they get a batch, so need no loop over samples."
        )
        return why, change
    if workers >= max(1, free):
        return why, (
            "Make reading a sample cheaper: decode once and keep the result, or hold the data in "
            f"memory; {count(workers, 'worker')} per rank is what {measured.cores} cores feed."
        )
    if not measured.script:
        tried = ",".join(str(n) for n in (0, 1, 2, 4, 8) if n <= max(4, free))
        return why, f"Read in worker processes: --workers {tried} here finds how many."
    how = "More workers" if workers else "Read in worker processes"
    how += f": DataLoader(…, num_workers={max(2, free)})"
    if not measured.iterable:
        return why, f"{how}, then profile again."
    return why, (
        f"{how}, with an IterableDataset whose __iter__ yields only its worker's share by "
        "torch.utils.data.get_worker_info(): else each worker yields every sample."
    )


def _transfer(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    why = f"Copying batches to the device takes {_of_step(seconds, measured)}."
    if measured.script:
        return why, "Keep the data on the device, or pin the memory it comes from."
    return why, (  # it is pinned already, and copied while the device computes
        "Make batches smaller: give inputs as bytes, and let the recipe's transform, which runs on "
        "the device, turn them into floats."
    )


def _communication(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    size, number = measured.gradient_bytes, len(measured.ranks)
    why = f"The ranks wait {_of_step(seconds, measured)} for their all-reduce"
    if not size:
        why += ", beyond what backward hides."
    elif size < _LATENCY_BYTES:
        why += (
            f" of {_bytes(size)} of gradients: so few bytes are all latency, paid once per step "
            "whatever the batch."
        )
    else:
        speed = 2 * (number - 1) / number * size / seconds / 1e9 if number > 1 else 0.0
        why += f" of {size / 2**20:,.0f} MiB of gradients, at {speed:.2g} GB/s."
    if measured.script:
        return why, (
            "Exchange gradients less often: more samples per rank and step, or several micro-steps "
            "under no_sync(); `samestep doctor` measures the link."
        )
    if size < _LATENCY_BYTES:
        return why, "Give each step more to compute: a larger --batch-size, or fewer ranks."
    return why, (
        "Exchange gradients less often: --accumulate 4 does so once in four micro-steps; `samestep "
        "doctor`, started the same way, measures the link."
    )


def _straggler(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    rank, typical = measured.slowest, measured.typical
    slow = measured.ranks[rank]
    longer, what = max(
        (sum(slow.phases.get(p, 0.0) - typical.phases.get(p, 0.0) for p in names), name)
        for name, names in (("for its data", ("data", "to_device")), ("to compute", COMPUTE))
    )
    why = (
        f"The others wait {_of_step(seconds, measured)} for rank {rank}, which takes "
        f"{milliseconds(longer)} longer {what} than they do."
    )
    return why, (
        f"Look at rank {rank} and its node: `samestep doctor`, started the same way, compares "
        "clocks, cores and speed of all; leave that node out if it is the machine."
    )


def _launch(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    operations = measured.traced
    each = seconds / max(operations.count, 1) * 1e6
    why = (
        f"Python and starting operations take {_of_step(seconds, measured)}: "
        f"{operations.count:,.0f} PyTorch calls per step, each with {each:.1f} µs of overhead."
    )
    if measured.compiled:
        return why, "More work per operation: a larger --batch-size."
    change = "More samples per step (--batch-size), or fewer ranks for so small a model."
    if measured.script:
        change = (
            "torch.compile(model), or more samples per step: each operation then does more work."
        )
    elif len(measured.ranks) == 1:
        change = "--compile on makes one graph of whole steps."
    return why, change


def _sync(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    why = (
        f"Reading {measured.traced.syncs:,.0f} numbers per step from tensors (.item(), float(), "
        f"int(), bool()) takes {_of_step(seconds, measured)}, each read waiting for what it reads."
    )
    return why, "Add numbers up as tensors, and read them once in many steps."


def _memory(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    why = (
        "Operations that move numbers and hardly compute with them take "
        f"{_of_step(seconds, measured)}{_top(measured.traced.top_memory)}."
    )
    phases = measured.typical.phases
    if phases.get("optimizer", 0.0) > 0.5 * sum(phases.get(p, 0.0) for p in COMPUTE):
        return why, "The optimizer moves all weights once per step: train more samples per step."
    if measured.script:
        return why, "torch.compile(model): it fuses operations, so that numbers are moved once."
    if measured.compiled:
        return why, "--precision bf16 halves what is moved, where the device has it."
    return why, "--compile on fuses operations, so that numbers are moved once."


def _compute(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    change = "a faster device, or ranks on more of them."
    if measured.device != "cpu":
        change = "--precision bf16 if it is not on yet, or more devices."
    why = f"Computing takes {_of_step(seconds, measured)}{_top(measured.traced.top_matmul)}."
    return why, f"Nothing stands in its way: {change}"


def _untraced(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    why = f"Computing takes {_of_step(seconds, measured)}; no step of it was traced."
    return why, "Let it take more steps: a trace of some splits what they compute."


def _rarely(phase: str, seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    """Say how much more rarely an evaluation or a checkpoint has to happen to be affordable."""
    step = measured.typical.step - measured.typical.phases.get(phase, 0.0)
    factor = max(2, math.ceil(seconds / max(_AFFORDABLE * step, 1e-9)))
    what, flags = "Save", "--checkpoint-every-epochs, -steps, -minutes"
    if phase == "evaluation":
        what, flags = "Evaluate", "--eval-every-epochs, --eval-every-steps"
    steps = measured.counts.get(phase, 0)
    every = f", once in {steps * factor:,} steps" if steps else ""
    every += "" if measured.script else f" ({flags})"
    return (
        f"{phase.capitalize()}s take {_of_step(seconds, measured)}, shared out over the steps.",
        f"{what} {factor} times more rarely{every}: then it takes less than {_AFFORDABLE:.0%}.",
    )


def _loop(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    what = "logging, metrics"
    if measured.script and measured.in_memory:  # no DataLoader, so that data is not told apart
        what = "making batches, logging, metrics"
    why = f"The loop's own Python between the steps ({what}) takes {_of_step(seconds, measured)}."
    if measured.script:
        return why, "Do what lies between two steps once in many: logging, metrics, images, prints."
    return why, "--log-every with a larger number."


def _oversubscribed(seconds: float, measured: MeasuredSteps) -> tuple[str, str]:
    ranks, cores, workers = measured.local_ranks, measured.cores, measured.workers
    why = (
        f"{count(ranks, 'rank')} of {count(measured.threads, 'thread')} and "
        f"{count(workers, 'worker')} want {measured.wanted_cores:.1f} cores, and there "
        f"{'is' if cores == 1 else 'are'} {cores}: a thread waits for one "
        f"{_of_step(seconds, measured)}."
    )
    threads = max(1, cores // ranks)
    if measured.threads > threads:
        how = f"torch.set_num_threads({threads})" if measured.script else f"--threads {threads}"
        return why, f"{how}: as many threads as each rank has cores."
    if workers > 1:
        return why, f"Fewer workers: {max(1, cores // ranks - 1)} per rank."
    return why, f"Fewer ranks: {count(cores, 'core')} for {ranks} of them."


def _top(top: tuple[tuple[str, float], ...]) -> str:
    return ": " + ", ".join(f"{name} {share:.0%}" for name, share in top[:3]) if top else ""


ADVICE = {
    "input-bound": _input,
    "transfer-bound": _transfer,
    "communication-bound": _communication,
    "straggler": _straggler,
    "launch-bound": _launch,
    "host-sync": _sync,
    "memory-bound": _memory,
    "compute-bound": _compute,
    "untraced": _untraced,
    "evaluation-bound": lambda *known: _rarely("evaluation", *known),
    "checkpoint-bound": lambda *known: _rarely("checkpoint", *known),
    "loop-bound": _loop,
    "oversubscribed": _oversubscribed,
}
"""Each returns the evidence for a bottleneck of its kind, which takes so many seconds per step, and
the one thing to change."""
