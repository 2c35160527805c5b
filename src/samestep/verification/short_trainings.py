"""What is run: starts of ranks, one after the other, and the short trainings in each of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.settings import Precision, Settings, in_precision
from samestep.training.side_effects import Kind
from samestep.verification.exchange import RecipeFacts, Start

MAIN = "main"
"""The short training that all rows rest on."""
NUDGED = "nudged"
"""The same on one process from weights off by one rounding, where float64 is not possible."""
_SLOWER = 0.01


def plan_starts(sizes: Sequence[int], *, quick: bool = False) -> list[Start]:
    """Return the starts: one process first, then the others, each resuming the one before.

    The last is one process again, which resumes the training of the largest number of ranks; a
    quick verification resumes nothing, and has none such.
    """
    order = [1, *sorted({*sizes} - {1})]
    starts = [Start(place=place, world_size=size) for place, size in enumerate(order)]
    if quick:
        return starts
    return [*starts, Start(place=len(starts), world_size=1, closing=True)]


@dataclass(frozen=True, kw_only=True)
class ShortTraining:
    """A short training, taken by every start that has a use for it."""

    name: str
    own_precision: bool = False
    """Whether it computes in the precision of the user's settings, not in the most exact one."""
    free: frozenset[Kind] = frozenset()
    """What is left as it is; the rest of what differs with the number of ranks is held still."""
    halves: bool = False
    """Whether each rank, or each virtual one, takes its share in two micro-steps."""
    resumes: bool = False
    """Whether it goes on from the checkpoint of the start before."""
    saves: bool = False
    short: bool = False
    """Whether it ends where others stop and resume."""
    evaluates: bool = False
    lightning: bool = False
    nudged: bool = False
    """Whether its weights begin one rounding off, to measure what rounding does to the losses."""

    def is_taken(self, start: Start, facts: RecipeFacts, chosen: Precision) -> bool:
        """Whether a start takes it, where the user's settings chose a precision."""
        if self.nudged:
            return not start.place and facts.exact != "fp64" and facts.virtual_ranks is None
        if start.closing or self.resumes:
            return self.resumes and start.place > 0
        if self.halves and facts.virtual_ranks:
            return facts.size.halves(facts.virtual_ranks)
        if self.own_precision:
            return chosen != facts.exact
        if self.free or self.lightning:  # one process and the fewest ranks are enough
            there = facts.lightning if self.lightning else self.free <= facts.present
            return there and start.place <= 1
        return True


def settings_of(
    training: ShortTraining, settings: Settings, facts: RecipeFacts, world_size: int, run: Path
) -> Settings:
    """Return the user's settings, changed to those of a short training."""
    size = facts.size
    share = -(-size.global_batch // (settings.virtual_ranks or world_size))
    precision = settings.precision if training.own_precision else facts.exact
    return replace(
        in_precision(settings, precision),
        run_dir=str(run),
        epochs=None,
        max_steps=size.steps,
        batch_size=size.global_batch,
        batch_size_per_rank=None,
        micro_batch_size=-(-share // 2) if training.halves else share,
        accumulate=None,
        # DDP has no static graph of micro-steps; what one may leave unused, they may, too.
        static_graph=settings.static_graph and not training.halves,
        find_unused=settings.find_unused or (settings.static_graph and training.halves),
        eval_batch_size=256,  # all of the few samples at once, on any number of ranks
        # With frozen statistics, a rate that suits batch normalisation may diverge.
        lr=settings.lr * (_SLOWER if "batchnorm" in facts.present else 1.0),
        engine="lightning" if training.lightning else "native",
        compile="off",
        log_every=1,
        patience=None,
        keep_top_k=None,
        pictures=False,
        checkpoint_every_minutes=None,
        monitor=None,
        mode="auto",
        eval_every_epochs=1,
        checkpoint_every_epochs=1,
        eval_every_steps=size.stop if training.evaluates and not training.lightning else None,
        checkpoint_every_steps=size.stop if training.saves or training.short else None,
    )
