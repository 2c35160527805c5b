"""What is run: ranks are started several times, and each start runs several short trainings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.base.settings import Precision, Settings, in_precision
from samestep.core.learner.side_effects import Kind
from samestep.prove.verification.few_samples import TrainingSize

MAIN = "main"  # the short training that all rows rest on
NUDGED = "nudged"
"""The same on one process from weights off by one rounding, where float64 is not possible."""
NUDGED_GRADIENT = "nudged gradient"
"""The same on one process, where each step of the optimizer gets a gradient off by a rounding."""
OPTIMIZER_ROW = "optimizer"
OWN_PRECISION = "precision"  # the same in the precision of the user's settings
NUDGED_IN_OWN = "nudged in own precision"  # … and there with such gradients: of a loop of one's own
_SLOWER = 0.01
_ALWAYS: dict[str, Any] = {
    **dict.fromkeys(
        ("epochs", "batch_size_per_rank", "batch_tokens", "accumulate", "patience", "keep_top_k")
    ),
    **dict.fromkeys(
        ("checkpoint_every_minutes", "monitor", "keep_newest", "keep_hours", "stop_monitor")
    ),
    "mode": "auto",
    "compile": "off",
    "pictures": False,
    "log_every": 1,
    "eval_every_epochs": 1,
    "checkpoint_every_epochs": 1,
    "eval_batch_size": 256,  # all of the few samples at once, on any number of ranks
}


SHARDED: dict[str, Any] = {
    "strategy": "fsdp",
    **dict.fromkeys(("find_unused", "static_graph", "channels_last", "sync_batchnorm"), False),
    "bucket_cap_mb": None,
    "track_checkpoints": False,
}
"""How the ranks share the model out, without what only DDP takes."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """Ranks that are started once and run several short trainings."""

    place: int
    """Its number, counted from 0. Each start but the first resumes the checkpoint of the last."""
    world_size: int
    closing: bool = False
    """Whether this start only resumes, and evaluates a checkpoint on one device."""
    loses_rank: bool = False  # whether rank 0 dies in it, and the others continue


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """What the first process found out about the recipe, before ranks are compared."""

    num_samples: int  # training samples of the recipe
    size: TrainingSize
    evaluates: str  # the split that is evaluated
    exact: Precision = "fp64"  # the most exact precision that the model can compute in
    inexact: str = ""  # why this is not float64
    virtual_ranks: int | None = None
    """With virtual ranks all trainings must be equal to the last bit, and nothing is fixed."""
    lightning: bool = False  # whether Lightning is installed and takes these settings
    allows_unused: bool = False
    """Whether steps may leave parameters unused (--find-unused), which FSDP cannot train."""
    present: frozenset[Kind] = frozenset()
    """What the recipe has of the things that differ by themselves on other numbers of ranks."""
    results: dict[str, Any] = field(default_factory=dict)
    """Row → the result of its experiment, if there is any."""


@dataclass(frozen=True, kw_only=True)
class StartInstructions:
    """What the ranks of one start are to do."""

    start: Start
    folder: Path  # for the runs
    sizes: tuple[int, ...]
    batch: int | None  # the global batch, if the user named one
    lightning: bool
    quick: bool
    facts: RecipeFacts | None = None  # None in the first start, which finds them out
    failed: frozenset[str] = frozenset()
    """Short trainings that failed in one process: on several ranks they would end the start."""


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How a short training failed on a rank."""

    training: str
    step: int
    """The step that was being taken, counted from 1; 0 before the first."""
    message: str
    mistake: bool = False
    """Whether it is a `UserError`, whose message the user sees as it is."""
    lost_peer: bool = False  # whether another rank's failure caused it


@dataclass(kw_only=True)
class RankReport:
    """What a rank found out, in addition to its traces."""

    num_samples: int = 0  # training samples that its data has
    results: dict[str, Any] = field(default_factory=dict)
    """Row → the result of its experiment on this rank."""
    failures: list[RankFailure] = field(default_factory=list)


def plan_starts(sizes: Sequence[int], *, quick: bool = False) -> list[Start]:
    """Return the starts: one process, other sizes and, unless quick, one process that resumes."""
    order = [1, *sorted({*sizes} - {1})]
    starts = [Start(place=place, world_size=size) for place, size in enumerate(order)]
    return starts if quick else [*starts, Start(place=len(starts), world_size=1, closing=True)]


def start_with_death(sizes: Sequence[int], place: int) -> Start | None:
    """Return the start in which a rank dies, of the largest of the sizes; None for one process."""
    return Start(place=place, world_size=max(sizes), loses_rank=True) if max(sizes) > 1 else None


@dataclass(frozen=True, kw_only=True)
class ShortTraining:
    """A short training, run by every start that has a use for it."""

    name: str
    own_precision: bool = False
    """Whether it computes in the precision of the user's settings, not in the most exact one."""
    free: frozenset[Kind] = frozenset()
    """What is left as it is; the rest of what differs with the number of ranks is fixed."""
    halves: bool = False
    """Whether each rank, or each virtual rank, takes its share in two micro-steps."""
    resumes: bool = False  # whether it resumes the checkpoint of the start before
    saves: bool = False
    short: bool = False  # whether it ends at the step where others stop and resume
    evaluates: bool = False
    lightning: bool = False
    sharded: bool = False  # whether the ranks share the model out, by FSDP
    nudged: bool = False
    """Whether its weights begin one rounding off, to measure what rounding does to the losses."""
    loses_rank: bool = False
    """Whether rank 0 is killed within the step at which others stop."""
    nudges_gradient: bool = False
    """Whether its gradients are one rounding off, to measure what the recipe's optimizer does."""

    def is_taken(self, start: Start, facts: RecipeFacts, chosen: Precision) -> bool:
        """Whether a start runs it, given the precision that the user chose."""
        if self.nudged or self.nudges_gradient:
            narrow = facts.exact != "fp64" and facts.virtual_ranks is None
            own = self.nudges_gradient and OPTIMIZER_ROW in facts.results
            return not start.place and (own or (self.nudged and narrow))
        if start.closing or self.resumes:
            return self.resumes and start.place > 0
        if self.halves and facts.virtual_ranks:
            return facts.size.halves(facts.virtual_ranks)
        if self.own_precision:
            return chosen != facts.exact
        if self.free or self.lightning:  # one process and the fewest ranks are enough
            applies = facts.lightning if self.lightning else self.free <= facts.present
            return applies and start.place <= 1
        return not self.sharded or (start.place == 1 and facts.virtual_ranks is None)


def left_free(kind: Kind) -> ShortTraining:
    """Return the short training that leaves one kind of random behaviour as it is.

    All other trainings fix it, or it would hide every difference: so one here has this cause.
    """
    return ShortTraining(name=f"{kind} as it is", free=frozenset({kind}), short=True)


def run_of(folder: Path, place: int, training: str) -> Path:
    """Return the run directory of a start's short training."""
    return folder / f"runs-{place}" / training.replace(" ", "-")


def settings_of(
    training: ShortTraining, settings: Settings, facts: RecipeFacts, world_size: int, run: Path
) -> Settings:
    """Return the user's settings, changed to those of a short training."""
    size, halves = facts.size, training.halves
    share = -(-size.global_batch // (settings.virtual_ranks or world_size))
    precision = settings.precision if training.own_precision else facts.exact
    changed = {
        **_ALWAYS,
        "run_dir": str(run),
        "max_steps": size.steps,
        "batch_size": size.global_batch,
        "micro_batch_size": -(-share // 2) if halves else share,
        # DDP has no static graph of micro-steps: find_unused allows the same there.
        "static_graph": settings.static_graph and not halves,
        "find_unused": settings.find_unused or (settings.static_graph and halves),
        # With frozen statistics, a rate that suits batch normalisation may diverge.
        "lr": settings.lr * (_SLOWER if "batchnorm" in facts.present else 1.0),
        "engine": "lightning" if training.lightning else "native",
        "eval_every_steps": size.stop if training.evaluates and not training.lightning else None,
        "checkpoint_every_steps": size.stop if training.saves or training.short else None,
    }
    if training.sharded:
        changed |= SHARDED
    return replace(in_precision(settings, precision), **changed)
