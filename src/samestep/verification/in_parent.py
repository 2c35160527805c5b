"""What the parent process does: start the ranks, one size after the other, and judge the rest."""

import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from samestep.errors import UserError
from samestep.ranks.start import Ended
from samestep.recipe import Accepted
from samestep.reporting.words import count
from samestep.session.request import Request
from samestep.settings import Precision
from samestep.training.meter import KEPT
from samestep.verification.all_rows import judge
from samestep.verification.evidence import Check, Evidence
from samestep.verification.exchange import (
    RecipeFacts,
    Start,
    StartInstructions,
    folder_of,
    read_left,
    read_reports,
    write_left,
)
from samestep.verification.short_trainings import MAIN, plan_starts
from samestep.verification.trace import Trace

Launch = Callable[[int, Path], Ended]
"""(number of ranks, file of instructions) → how they ended."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The answer, and what it rests on."""

    recipe: str
    sizes: tuple[int, ...]
    facts: RecipeFacts
    precisions: tuple[str, ...]
    checks: list[Check]
    seconds: float
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs that was not accepted."""
        return all(check.passed for check in self.checks)


def gather(
    request: Request,
    sizes: Sequence[int],
    launch: Launch,
    *,
    batch: int | None = None,
    lightning: bool = True,
    quick: bool = False,
    tell: Callable[[int, int, str], None] = lambda *_: None,
) -> Evidence:
    """Start ranks, one size after the other, and read back what they left.

    One process is always among the sizes; the global batch is the smallest that will do, unless it
    is given; Lightning's Trainer is compared too if it is installed. With `quick` some rows are
    left out. `tell` is called with how many of how many starts are done, and the next one's ranks.

    Raises:
        UserError: the recipe cannot be trained in one process, or has too few samples.
        KeyboardInterrupt: the ranks were stopped by a signal.
    """
    starts = plan_starts(sizes, quick=quick)
    lightning = lightning and importlib.util.find_spec("lightning") is not None
    # Its engine refuses all three.
    lightning = lightning and request.recipe.loss_terms is None and request.settings.ema is None
    lightning = lightning and request.settings.virtual_ranks is None
    sizes = tuple(sorted({1, *sizes}))
    folder = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    ended: dict[int, str] = {}
    try:
        for start in starts:
            tell(start.place, len(starts), count(start.world_size, "rank"))
            told = StartInstructions(
                start=start, sizes=sizes, batch=batch, lightning=lightning, quick=quick
            )
            ended |= _run(told, folder, launch)
            if start.place == 0 and not (folder_of(folder, 0, 0) / f"{MAIN}.pt").is_file():
                break
            if start.place:  # these runs may be large, and have been resumed now
                shutil.rmtree(folder / f"start-{start.place - 1}" / "runs", ignore_errors=True)
        evidence = _read_evidence(folder, starts, request.settings.precision, ended)
        return replace(evidence, quick=quick, allows_unused=request.settings.allows_unused)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge_evidence(
    request: Request,
    evidence: Evidence,
    *,
    accept: Sequence[Accepted] = (),
    tolerance: float | None = None,
    notes: Sequence[str] = (),
    seconds: float = 0.0,
) -> Verification:
    """Return whether the recipe trains the same, by what its ranks left.

    `accept` may differ by intent, beside what the recipe accepts. `tolerance` is the largest
    relative difference of losses, which are then compared alone; else everything is, to rounding.
    """
    accepts = frozenset({*request.recipe.accepts, *accept})
    evidence = replace(evidence, accepts=accepts, tolerance=tolerance)
    if tolerance is not None:
        notes = (*notes, f"With --tolerance {tolerance:g} trainings are compared by their losses.")
    if evidence.quick:
        notes = (*notes, "With --quick some rows are left out: verify without it before you rely.")
    exact = evidence.facts.exact
    return Verification(
        recipe=request.recipe.name,
        sizes=tuple(sorted({start.world_size for start in evidence.starts})),
        facts=evidence.facts,
        precisions=(exact,) if evidence.quick else tuple(dict.fromkeys((exact, evidence.chosen))),
        checks=judge(evidence),
        seconds=seconds,
        notes=tuple(notes),
    )


def _run(instructions: StartInstructions, folder: Path, launch: Launch) -> dict[int, str]:
    """Run one start; return its number with its error message, if it failed."""
    start = instructions.start
    path = folder / f"instructions-{start.place}"
    write_left(path, instructions)
    ended = launch(start.world_size, path)
    if ended.code == 0:
        return {}
    if ended.code > 128:
        raise KeyboardInterrupt
    failures = [failure for report in read_reports(folder, start) for failure in report.failures]
    failure = min(failures, key=lambda f: f.lost_peer, default=None)
    message = failure.message if failure else ended.message.partition("; the other ranks")[0]
    # Nothing was kept before these few steps.
    message = message.replace(f"{KEPT} ", "")
    if start.place == 0 and (failure.mistake if failure else ended.code == 2):
        raise UserError(message)
    return {start.place: message or f"It ended with exit code {ended.code}."}


def _read_evidence(
    folder: Path, starts: Sequence[Start], chosen: Precision, ended: dict[int, str]
) -> Evidence:
    """Read back what the ranks left.

    Raises:
        UserError: there is nothing.
    """
    facts = read_left(folder / "facts", RecipeFacts)
    if facts is None:
        raise UserError(ended.get(0, "The first process left nothing."))
    traces = {}
    for start in starts:
        ranks = [folder_of(folder, start.place, rank) for rank in range(start.world_size)]
        for name in {path.name for path in ranks[0].glob("*.pt")}:
            if all((rank / name).is_file() for rank in ranks):
                key = (start.place, name.removesuffix(".pt"))
                left = [torch.load(rank / name, weights_only=True) for rank in ranks]
                traces[key] = [Trace(**trace) for trace in left]
    reports = {start.place: read_reports(folder, start) for start in starts}
    return Evidence(
        facts=facts, starts=starts, traces=traces, reports=reports, ended=ended, chosen=chosen
    )
