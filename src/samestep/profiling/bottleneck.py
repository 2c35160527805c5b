"""From measured numbers to one bottleneck, what it costs, and the one thing to change."""

from dataclasses import dataclass

from samestep.profiling.advice import ADVICE, milliseconds
from samestep.profiling.measured import MeasuredSteps
from samestep.run.phase_names import COMPUTE

# Below this share of a step a rank that is slower than the others is no straggler: ranks take turns
# at being last.
_STRAGGLES = 0.15
# A run is oversubscribed if a thread waits for a core longer than this fraction of a step, and the
# ranks alone would use more than this many times the available cores.
_STARVED, _OVER = 0.2, 1.2


@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of every step that a remedy of its own would take away."""

    kind: str
    seconds: float
    """Per step."""


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What bounds the training, in numbers per step."""

    kind: str
    seconds: float
    """What it takes of a step."""
    step: float
    """Seconds per step, with its share of evaluations and checkpoints."""
    why: str
    """The evidence, a sentence."""
    change: str
    """The one thing to change, a sentence."""
    ceiling: float
    """How many times as fast training would be if the bottleneck were gone altogether."""
    next_kind: str
    """What would bound it then."""
    next_seconds: float
    parts: tuple[StepPart, ...]
    """All parts, the largest first; together they are the step."""
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Share of the step that the bottleneck takes."""
        return self.seconds / self.step


def judge(measured: MeasuredSteps) -> Bottleneck:
    """Return the verdict on some measured steps."""
    parts = sorted(split(measured), key=lambda part: -part.seconds)
    total = sum(part.seconds for part in parts)
    first, *rest = parts
    starved = max(rank.starved for rank in measured.ranks)
    started = measured.local_ranks * (measured.threads + measured.workers)
    wanted = min(started, measured.wanted_cores)  # what others took is not wanted by these
    if wanted >= _OVER * measured.cores and starved >= _STARVED * total:
        first, rest = StepPart(kind="oversubscribed", seconds=min(starved, total)), parts
    # That some time was not looked into is nothing that could bound a training.
    following = next((p for p in rest if p.seconds > 0 and p.kind != "untraced"), first)
    why, change = ADVICE[first.kind](first.seconds, measured)
    return Bottleneck(
        kind=first.kind,
        seconds=first.seconds,
        step=total,
        why=why,
        change=change,
        ceiling=total / max(total - first.seconds, 1e-9 * total),
        next_kind=following.kind,
        next_seconds=following.seconds,
        parts=tuple(parts),
        notes=_notes(measured, first.kind, starved),
    )


def split(measured: MeasuredSteps) -> list[StepPart]:
    """Split a typical rank's step into parts that add up to it; each has its own remedy."""
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
    shares = {"untraced": 1.0}
    if operations is not None:
        shares = {
            "launch-bound": operations.launch,
            "host-sync": operations.sync,
            "memory-bound": operations.memory,
            "compute-bound": operations.matmul,
        }
    whole = sum(shares.values()) or 1.0
    seconds |= {kind: computing * share / whole for kind, share in shares.items()}
    return [StepPart(kind=kind, seconds=part) for kind, part in seconds.items()]


def _notes(measured: MeasuredSteps, kind: str, starved: float) -> tuple[str, ...]:
    notes = []
    if measured.stopped:
        notes.append(f"A stop signal came: this is what {measured.steps:,} steps until then show.")
    if starved >= _STARVED * measured.typical.step and kind != "oversubscribed":
        notes.append(
            f"Other programs use the cores: a thread waited {milliseconds(starved)} per step for "
            "one, so that the numbers here are too large. Measure again on a quiet machine."
        )
    if measured.profiled_itself:
        notes.append(
            "The script profiles some of its steps itself: they are left out, with what it does "
            "with its trace."
        )
    syncs = measured.traced.syncs
    if syncs >= 0.5 and kind != "host-sync":
        cost = "costs little on the CPU, and makes a GPU idle"
        if measured.device != "cpu":
            cost = "makes the device idle until the host has caught up"
        notes.append(
            f"The step reads {syncs:.3g} number{'' if syncs == 1 else 's'} from tensors (.item(), "
            f"float()); that {cost}. Read them once in many steps."
        )
    return tuple(notes)
