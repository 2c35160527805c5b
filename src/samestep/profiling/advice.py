"""What a bottleneck means in the measured numbers, and the one thing to change."""

import math

from samestep.profiling.measured import MeasuredSteps
from samestep.run.phase_names import COMPUTE
from samestep.screen.words import count

# What evaluations and checkpoints may take of the time: below it there is nothing to gain.
_AFFORDABLE = 0.05
_LATENCY_BYTES = 1 << 20


def explain(kind: str, seconds: float, measured: MeasuredSteps) -> str:
    """Return the evidence for a bottleneck, with its numbers per step."""
    return _EVIDENCE[kind](seconds, measured)


def advise(kind: str, seconds: float, measured: MeasuredSteps) -> str:
    """Return the one thing to change."""
    return _CHANGE[kind](seconds, measured)


def milliseconds(seconds: float) -> str:
    """Return a duration with three digits: 0.0042 ms, 4.20 ms, 420 ms, 4,200 ms."""
    value = seconds * 1000
    if value >= 100:
        return f"{value:,.0f} ms"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 4)}f} ms"


def _of_step(seconds: float, measured: MeasuredSteps) -> str:
    step = measured.typical.step + measured.evaluation + measured.checkpoint
    return f"{milliseconds(seconds)} of a step of {milliseconds(step)}"


def _input_why(seconds: float, measured: MeasuredSteps) -> str:
    text = f"The step waits {_of_step(seconds, measured)} for its data"
    operations = measured.typical.operations
    if measured.worker_start > seconds / 2:
        return (
            f"{text}, {milliseconds(measured.worker_start)} of it for loader processes to start: "
            "they are started again in every epoch."
        )
    if operations is not None and operations.collate > 0.4 and not measured.workers:
        return (
            f"{text}, and {operations.collate:.0%} of the wait puts samples together to a batch, "
            "in the training process itself."
        )
    if measured.in_memory:
        return f"{text}, which is gathered and transformed from memory."
    if measured.workers:
        return f"{text}, which {_workers(measured.workers)} cannot read as fast as it trains."
    return f"{text}, which the training process reads itself."


def _input_change(seconds: float, measured: MeasuredSteps) -> str:
    if measured.worker_start > seconds / 2:
        return (
            "Keep the workers between epochs: build the DataLoader once, with "
            "persistent_workers=True."
        )
    if measured.in_memory:
        return "Make transform and augment cheaper: they get a batch, so need no loop over samples."
    free = measured.cores // measured.local_ranks
    if measured.workers and measured.workers >= free:
        return (
            "Make reading a sample cheaper: decode once and keep the result, or hold the data in "
            f"memory; {_workers(measured.workers)} a rank is what {measured.cores} cores feed."
        )
    if measured.script:
        few = "More workers" if measured.workers else "Read in worker processes"
        how = f"{few}: DataLoader(…, num_workers={max(2, free)})"
        if measured.iterable:
            return (
                f"{how}, with an IterableDataset whose __iter__ yields only its worker's share by "
                "torch.utils.data.get_worker_info(): else each worker yields every sample."
            )
        return f"{how}, then profile again."
    tried = ",".join(str(n) for n in (0, 1, 2, 4, 8) if n <= max(4, free))
    return f"Read in worker processes: --workers {tried} here finds how many."


def _transfer_why(seconds: float, measured: MeasuredSteps) -> str:
    return f"Copying batches to the device takes {_of_step(seconds, measured)}."


def _communication_why(seconds: float, measured: MeasuredSteps) -> str:
    size, number = measured.gradient_bytes, len(measured.ranks)
    text = f"The ranks wait {_of_step(seconds, measured)} for their all-reduce"
    if not size:
        return f"{text}, beyond what backward hides."
    if size < _LATENCY_BYTES:
        return (
            f"{text} of {size / 1024:,.0f} KiB of gradients: so few bytes are all latency, paid "
            "once a step whatever the batch."
        )
    speed = 2 * (number - 1) / number * size / seconds / 1e9 if number > 1 else 0.0
    return f"{text} of {size / 2**20:,.0f} MiB of gradients, at {speed:.2g} GB/s."


def _communication_change(_seconds: float, measured: MeasuredSteps) -> str:
    if measured.script:
        return (
            "Exchange gradients less often: more samples per rank and step, or several micro-steps "
            "under no_sync(); `samestep doctor` measures the link."
        )
    if measured.gradient_bytes < _LATENCY_BYTES:
        return "Give each step more to compute: a larger --batch-size, or fewer ranks."
    return (
        "Exchange gradients less often: --accumulate 4 does so once in four micro-steps; `samestep "
        "doctor`, started the same way, measures the link."
    )


def _straggler_why(seconds: float, measured: MeasuredSteps) -> str:
    slow, typical = measured.ranks[measured.slowest], measured.typical
    gains = {
        name: sum(slow.phases.get(p, 0.0) - typical.phases.get(p, 0.0) for p in names)
        for name, names in (("for its data", ("data", "to_device")), ("to compute", COMPUTE))
    }
    what = max(gains, key=lambda name: gains[name])
    return (
        f"The others wait {_of_step(seconds, measured)} for rank {measured.slowest}, which takes "
        f"{milliseconds(gains[what])} longer {what} than they do."
    )


def _straggler_change(_seconds: float, measured: MeasuredSteps) -> str:
    return (
        f"Look at rank {measured.slowest} and its node: `samestep doctor`, started the same way, "
        "compares clocks, cores and speed of all; leave that node out if it is the machine."
    )


def _launch_why(seconds: float, measured: MeasuredSteps) -> str:
    operations = measured.typical.operations
    assert operations is not None
    each = seconds / max(operations.count, 1) * 1e6
    return (
        f"Python and starting operations take {_of_step(seconds, measured)}: "
        f"{operations.count:,.0f} calls into PyTorch a step, {each:.1f} µs each that are no work."
    )


def _launch_change(_seconds: float, measured: MeasuredSteps) -> str:
    if measured.compiled:
        return "More work per operation: a larger --batch-size."
    if measured.script:
        return "torch.compile(model), or more samples a step: each operation then does more work."
    if len(measured.ranks) == 1:
        return "--compile on makes one graph of whole steps."
    return "More samples per rank and step (--batch-size), or fewer ranks for so small a model."


def _sync_why(seconds: float, measured: MeasuredSteps) -> str:
    operations = measured.typical.operations
    assert operations is not None
    return (
        f"Reading {operations.syncs:,.0f} numbers a step from tensors (.item(), float(), int(), "
        f"bool()) takes {_of_step(seconds, measured)}, each read waiting for what it reads."
    )


def _memory_why(seconds: float, measured: MeasuredSteps) -> str:
    operations = measured.typical.operations
    assert operations is not None
    return (
        f"Operations that move numbers and hardly compute with them take "
        f"{_of_step(seconds, measured)}{_top(operations.top_memory)}."
    )


def _memory_change(_seconds: float, measured: MeasuredSteps) -> str:
    phases = measured.typical.phases
    if phases.get("optimizer", 0.0) > 0.5 * sum(phases.get(p, 0.0) for p in COMPUTE):
        return "The optimizer moves all weights once a step: more samples a step make that rarer."
    if measured.script:
        return "torch.compile(model): it fuses operations, so that numbers are moved once."
    if measured.compiled:
        return "--precision bf16 halves what is moved, where the device has it."
    return "--compile on fuses operations, so that numbers are moved once."


def _compute_why(seconds: float, measured: MeasuredSteps) -> str:
    operations = measured.typical.operations
    assert operations is not None
    return f"Computing takes {_of_step(seconds, measured)}{_top(operations.top_matmul)}."


def _compute_change(_seconds: float, measured: MeasuredSteps) -> str:
    if measured.device == "cpu":
        return "Nothing stands in its way: a faster device, or ranks on more of them."
    return "Nothing stands in its way: --precision bf16 if it is not on yet, or more devices."


def _rarely(kind: str, seconds: float, measured: MeasuredSteps) -> str:
    """Return how much more rarely something has to happen to be affordable."""
    step = measured.typical.step - measured.typical.phases.get(kind, 0.0)
    factor = max(2, math.ceil(seconds / max(_AFFORDABLE * step, 1e-9)))
    steps = measured.counts.get(kind, 0)
    every = f", once in {steps * factor:,} steps" if steps else ""
    return f"{factor} times more rarely{every}"


def _evaluation_why(seconds: float, measured: MeasuredSteps) -> str:
    return f"Evaluations take {_of_step(seconds, measured)}, shared out over the steps."


def _evaluation_change(seconds: float, measured: MeasuredSteps) -> str:
    rarely = _rarely("evaluation", seconds, measured)
    how = "" if measured.script else " (--eval-every-epochs, --eval-every-steps)"
    return f"Evaluate {rarely}{how}: then it takes less than {_AFFORDABLE:.0%}."


def _checkpoint_why(seconds: float, measured: MeasuredSteps) -> str:
    return f"Checkpoints take {_of_step(seconds, measured)}, shared out over the steps."


def _checkpoint_change(seconds: float, measured: MeasuredSteps) -> str:
    rarely = _rarely("checkpoint", seconds, measured)
    how = "" if measured.script else " (--checkpoint-every-epochs, -steps, -minutes)"
    return f"Save {rarely}{how}: then it takes less than {_AFFORDABLE:.0%}."


def _loop_why(seconds: float, measured: MeasuredSteps) -> str:
    return f"What lies between the steps (logging, metrics) takes {_of_step(seconds, measured)}."


def _loop_change(_seconds: float, measured: MeasuredSteps) -> str:
    if measured.script:
        return "Do what lies between two steps once in many: logging, metrics, images, prints."
    return "--log-every with a larger number."


def _oversubscribed_why(seconds: float, measured: MeasuredSteps) -> str:
    each = f"{count(measured.threads, 'thread')} and {_workers(measured.workers)}"
    return (
        f"{count(measured.local_ranks, 'rank')} of {each} want {measured.wanted_cores:.1f} cores, "
        f"and there {'is' if measured.cores == 1 else 'are'} {measured.cores}: a thread waits for "
        f"one {_of_step(seconds, measured)}."
    )


def _oversubscribed_change(_seconds: float, measured: MeasuredSteps) -> str:
    threads = max(1, measured.cores // measured.local_ranks)
    if measured.threads > threads:
        how = f"torch.set_num_threads({threads})" if measured.script else f"--threads {threads}"
        return f"{how}: as many threads as each rank has cores."
    if measured.workers > 1:
        return f"Fewer workers: {max(1, measured.cores // measured.local_ranks - 1)} a rank."
    return f"Fewer ranks: {count(measured.cores, 'core')} for {measured.local_ranks} of them."


def _workers(number: int) -> str:
    return count(number, "worker")


def _top(top: tuple[tuple[str, float], ...]) -> str:
    return ": " + ", ".join(f"{name} {share:.0%}" for name, share in top[:3]) if top else ""


_EVIDENCE = {
    "input-bound": _input_why,
    "transfer-bound": _transfer_why,
    "communication-bound": _communication_why,
    "straggler": _straggler_why,
    "launch-bound": _launch_why,
    "host-sync": _sync_why,
    "memory-bound": _memory_why,
    "compute-bound": _compute_why,
    "untraced": lambda seconds, measured: (
        f"Computing takes {_of_step(seconds, measured)}; no step of it was traced."
    ),
    "evaluation-bound": _evaluation_why,
    "checkpoint-bound": _checkpoint_why,
    "loop-bound": _loop_why,
    "oversubscribed": _oversubscribed_why,
}
_CHANGE = {
    "input-bound": _input_change,
    "transfer-bound": lambda *_: "Keep the data on the device, or pin the memory it comes from.",
    "communication-bound": _communication_change,
    "straggler": _straggler_change,
    "launch-bound": _launch_change,
    "host-sync": lambda *_: "Add numbers up as tensors, and read them once in many steps.",
    "memory-bound": _memory_change,
    "compute-bound": _compute_change,
    "untraced": lambda *_: "Let it take more steps: a trace of some splits what they compute.",
    "evaluation-bound": _evaluation_change,
    "checkpoint-bound": _checkpoint_change,
    "loop-bound": _loop_change,
    "oversubscribed": _oversubscribed_change,
}
