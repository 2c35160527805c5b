"""What is run: starts of ranks, one after the other, and the short trainings in each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from samestep.settings import Precision, Settings
from samestep.verification.exchange import RecipeFacts, Start
from samestep.verification.randomness import Kind

MAIN = "main"
"""The short training that all rows rest on."""
_SLOWER = 0.01


def plan_starts(sizes: Sequence[int]) -> list[Start]:
    """Return the starts: one process first, then the others, each resuming the one before.

    The last is one process again, which resumes the training of the largest number of ranks.
    """
    order = [1, *sorted(size for size in set(sizes) if size > 1), 1]
    return [
        Start(
            place=place,
            world_size=size,
            resumes=place - 1 if place else None,
            closing=place == len(order) - 1,
        )
        for place, size in enumerate(order)
    ]


@dataclass(frozen=True, kw_only=True)
class ShortTraining:
    """One short training of a start."""

    name: str
    precision: Precision
    free: frozenset[Kind] = frozenset()
    """What is left as it is; the rest of what differs with the number of ranks is held still."""
    halves: bool = False
    """Whether each rank takes its share in two micro-steps."""
    resumes: int | None = None
    saves: bool = False
    short: bool = False
    """Whether it ends where others stop and resume."""
    evaluates: bool = False
    lightning: bool = False


class PlannedStart(NamedTuple):
    """What decides which short trainings a start runs."""

    start: Start
    facts: RecipeFacts
    chosen: Precision
    """The precision of the user's settings."""


def settings_of(
    training: ShortTraining, settings: Settings, facts: RecipeFacts, world_size: int, run: Path
) -> Settings:
    """Return the user's settings, changed to those of a short training."""
    size = facts.size
    share = -(-size.global_batch // world_size)
    return replace(
        settings,
        run_dir=str(run),
        epochs=None,
        max_steps=size.steps,
        precision=training.precision,
        global_batch_size=size.global_batch,
        accumulate=None,
        batch_size=-(-share // 2) if training.halves else share,
        # With frozen statistics, a rate that suits batch normalisation may diverge.
        lr=settings.lr * (_SLOWER if "batchnorm" in facts.present else 1.0),
        engine="lightning" if training.lightning else "native",
        compile="off",
        log_every=1,
        patience=None,
        keep_top_k=None,
        checkpoint_every_minutes=None,
        monitor=None,
        mode="auto",
        eval_every_epochs=1,
        checkpoint_every_epochs=1,
        eval_every_steps=size.stop if training.evaluates and not training.lightning else None,
        checkpoint_every_steps=size.stop if training.saves or training.short else None,
    )
