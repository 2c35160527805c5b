"""What is run: starts of ranks, one after the other, and the short trainings in each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.settings import Precision, Settings
from samestep.verification.facts import Facts
from samestep.verification.randomness import KINDS, Kind

MAIN, FREE, ACCUMULATED, RESUMED, PRECISION, LIGHTNING = (
    "main",
    "as it is",
    "accumulated",
    "resumed",
    "precision",
    "lightning",
)
_SLOWER = 0.01


@dataclass(frozen=True, kw_only=True)
class Start:
    """Ranks that are started once and run several situations."""

    place: int
    """Its number, counted from 0."""
    world_size: int
    resumes: int | None
    """The earlier start whose checkpoint is resumed here."""
    closing: bool = False
    """Whether nothing is done here but to resume, and to load a checkpoint on one device."""


def plan_starts(sizes: Sequence[int]) -> list[Start]:
    """Return the starts: one process first, then the others, each going on from the one before.

    The last is one process again, which goes on from the largest number of ranks.
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
class Situation:
    """One short training."""

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


def plan_situations(start: Start, facts: Facts, chosen: Precision) -> list[Situation]:
    """Return what one start runs, the decisive one first.

    Args:
        start: the ranks.
        facts: what is known of the recipe.
        chosen: the precision of the user's settings.
    """
    exact = facts.exact
    resumed = Situation(name=RESUMED, precision=exact, resumes=start.resumes)
    if start.closing:
        return [resumed]
    present = [kind for kind in KINDS if kind in facts.present]
    found = [Situation(name=MAIN, precision=exact, saves=True, evaluates=True)]
    if start.place <= 1:
        # What differs by itself is measured once: on one process and on the fewest ranks.
        if present:
            found.append(Situation(name=FREE, precision=exact, free=frozenset(present), short=True))
        if len(present) > 1:
            found += [
                Situation(
                    name=f"{FREE}: {kind}", precision=exact, free=frozenset({kind}), short=True
                )
                for kind in present
            ]
    found.append(Situation(name=ACCUMULATED, precision=exact, halves=True, short=True))
    if start.resumes is not None:
        found.append(resumed)
    if chosen != exact:
        found.append(Situation(name=PRECISION, precision=chosen))
    if start.place <= 1 and facts.lightning:
        found.append(Situation(name=LIGHTNING, precision=exact, evaluates=True, lightning=True))
    return found


def settings_of(
    situation: Situation, settings: Settings, facts: Facts, world_size: int, run: Path
) -> Settings:
    """Return the user's settings with what a situation needs of them changed."""
    cut = facts.cut
    share = -(-cut.global_batch // world_size)
    return replace(
        settings,
        run_dir=str(run),
        epochs=None,
        max_steps=cut.steps,
        precision=situation.precision,
        global_batch_size=cut.global_batch,
        accumulate=None,
        batch_size=-(-share // 2) if situation.halves else share,
        # With frozen statistics a rate that batch normalisation bears may diverge.
        lr=settings.lr * (_SLOWER if facts.batchnorm else 1.0),
        engine="lightning" if situation.lightning else "native",
        compile="off",
        log_every=1,
        patience=None,
        keep_top_k=None,
        checkpoint_every_minutes=None,
        monitor=None,
        mode="auto",
        eval_every_epochs=1,
        checkpoint_every_epochs=1,
        eval_every_steps=cut.stop if situation.evaluates and not situation.lightning else None,
        checkpoint_every_steps=cut.stop if situation.saves or situation.short else None,
    )
