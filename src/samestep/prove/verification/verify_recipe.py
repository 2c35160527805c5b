"""One verification, from the request to the answer: start ranks, gather what they found, judge."""

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import torch

from samestep.base.errors import UserError, did_you_mean
from samestep.base.settings import Settings
from samestep.base.words import count
from samestep.core.recipe import Accepted
from samestep.core.session.request import Request
from samestep.core.training.meter import KEPT
from samestep.launch.ranks.nproc import check_ranks
from samestep.launch.ranks.process import handed_back
from samestep.launch.ranks.start import Ended
from samestep.prove.verification import NO_EFFECT
from samestep.prove.verification.evidence import Check, Evidence, TableRow
from samestep.prove.verification.rows import judge
from samestep.prove.verification.short_trainings import (
    MAIN,
    RankReport,
    RecipeFacts,
    Start,
    StartInstructions,
    plan_starts,
    start_with_death,
)
from samestep.prove.verification.trace import Trace

MOST_RANKS = 64
_SIZES, _QUICK_SIZES = (1, 2, 3), (1, 2)

Launch = Callable[[int, Path, str], Ended]
"""(number of ranks, file of their task, their device) → how they ended."""
Tell = Callable[[int, int, str], None]
"""(starts that are done, all starts, the next one's ranks in words)"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What a verification compares, and what may differ."""

    sizes: tuple[int, ...] | None = None
    """Numbers of ranks; None for 1, 2 and 3, or fewer."""
    quick: bool = False
    accept: tuple[str, ...] = ()
    """What may differ by intent."""
    tolerance: float | None = None
    """Compare only losses, up to this relative difference."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The answer, and what it rests on."""

    recipe: str
    sizes: tuple[int, ...]
    facts: RecipeFacts
    precisions: tuple[str, ...]
    checks: list[Check]
    notes: tuple[str, ...]
    seconds: float = 0.0

    @property
    def same(self) -> bool:
        """Whether nothing differs that was not accepted."""
        return all(check.passed for check in self.checks)


def verify_recipe(
    request: Request,
    options: VerifyOptions,
    launch: Launch,
    *,
    given: Collection[str],
    keep: Launch | None = None,
    tell: Tell = lambda *_: None,
) -> Verification:
    """Train a recipe for a few steps on several numbers of ranks, and compare.

    `launch` starts ranks that call `run_start`, and `keep` ranks that outlive each other; `given`
    are the settings that the user has given; `tell` shows the progress. It raises KeyboardInterrupt
    if a signal stopped the ranks.
    """
    settings, started_at = request.settings, time.time()
    sizes = sizes_of(options, settings.virtual_ranks)
    check_ranks(max(sizes), oversubscribe=settings.oversubscribe, flag="--nproc")
    accepted = accepted_of(options, settings.virtual_ranks)
    device, notes = device_of(settings, max(sizes))
    if idle := sorted({*given} & {*NO_EFFECT}):  # as train() takes them
        notes += (f"{', '.join(idle)}: no effect, since a verification chooses its own steps.",)
    request = replace(request, settings=replace(settings, device=device))
    if device != "cpu" and torch.cuda.is_available():
        keep = None  # it was never tried with NCCL
    evidence = gather(
        request,
        sizes,
        lambda number, task: launch(number, task, device),
        None if keep is None else lambda number, task: keep(number, task, device),
        batch=settings.batch_size if "batch_size" in given else None,
        quick=options.quick,
        tell=tell,
    )
    found = judge_evidence(
        request, evidence, accept=accepted, tolerance=options.tolerance, notes=notes
    )
    return replace(found, seconds=time.time() - started_at)


def sizes_of(options: VerifyOptions, virtual: int | None) -> Sequence[int]:
    """Return the numbers of ranks: none is larger than the number of virtual ranks."""
    if options.sizes is None:
        usual = _QUICK_SIZES if options.quick else _SIZES
        return [size for size in usual if virtual is None or size <= virtual]
    if virtual is not None and max(options.sizes) > virtual:
        raise UserError(
            f"--virtual-ranks {virtual} is less than the {max(options.sizes)} ranks of "
            f"--nproc {','.join(map(str, options.sizes))}: each rank computes one or more "
            f"virtual ranks. Give at least --virtual-ranks {max(options.sizes)}, or fewer ranks.",
            flags=("virtual_ranks",),
        )
    return options.sizes


def accepted_of(options: VerifyOptions, virtual: int | None) -> tuple[Accepted, ...]:
    """Return what may differ by intent, after a look at the words."""
    known, accept = list(get_args(Accepted)), ",".join(options.accept)
    for word in (word for word in options.accept if word not in known):
        raise UserError(
            f"--accept {accept}: {word!r} cannot be accepted. "
            f"{did_you_mean(word, known)}There is: {', '.join(known)}."
        )
    for flag, value in (("accept", accept), ("tolerance", options.tolerance)):
        if value and virtual is not None:
            raise UserError(
                f"--{flag} {value} does not go with --virtual-ranks, with which everything has to "
                "be equal to the last bit. Leave one of them out."
            )
    return cast("tuple[Accepted, ...]", options.accept)


def device_of(settings: Settings, top: int) -> tuple[Any, tuple[str, ...]]:
    """Return the device of all ranks, one GPU each or the CPU, and a note about it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    too_few = f"{top} ranks need a GPU each, and {gpus} are here."
    if settings.device == "cuda" and 0 < gpus < top:
        raise UserError(
            f"--device cuda: {too_few} Use --device cpu, or --nproc 1{',2' if gpus > 1 else ''}."
        )
    if settings.device != "auto":
        return settings.device, ()
    if gpus >= top or (top == 1 and torch.backends.mps.is_available()):
        return "auto", ()
    return "cpu", (f"On the CPU: {too_few}",) * (gpus > 0)


def gather(
    request: Request,
    sizes: Sequence[int],
    launch: Callable[[int, Path], Ended],
    keep: Callable[[int, Path], Ended] | None = None,
    *,
    batch: int | None = None,
    lightning: bool = True,
    quick: bool = False,
    tell: Tell = lambda *_: None,
) -> Evidence:
    """Start ranks, one size after the other, and gather what they hand back.

    One process is always among the sizes. The global batch is the smallest that will do, unless it
    is given. Lightning's Trainer is compared too if it is installed.
    """
    settings, starts = request.settings, plan_starts(sizes, quick=quick)
    with_death = None if quick or keep is None else start_with_death(sizes, len(starts))
    # Lightning's engine refuses all of these.
    recipe = request.recipe
    takes = recipe.loss_over == "samples" and recipe.carry is None
    takes = takes and settings.ema is None and settings.virtual_ranks is None
    takes = takes and not {"optimizer", "metrics"}.intersection(recipe.schedule_asks())
    instructions = StartInstructions(
        start=starts[0],
        folder=Path(tempfile.mkdtemp(prefix="samestep-verify-")),
        sizes=tuple(sorted({1, *sizes})),
        batch=batch,
        lightning=lightning and takes and find_spec("lightning") is not None,
        quick=quick,
    )
    traces: dict[tuple[int, str], list[Trace]] = {}
    reports: dict[int, list[RankReport]] = {}
    ended: dict[int, str] = {}
    folder, facts = instructions.folder, None
    try:
        planned = [*starts, *filter(None, [with_death])]
        for start in planned:
            tell(start.place, len(planned), count(start.world_size, "rank"))
            task = folder / f"start-{start.place}"
            failed = frozenset(f.training for report in reports.get(0, ()) for f in report.failures)
            told = replace(instructions, start=start, facts=facts, failed=failed)
            task.write_bytes(pickle.dumps(told))
            how = (keep if start.loses_rank and keep else launch)(start.world_size, task)
            values = [handed_back(task, rank) for rank in range(start.world_size)]
            # A rank that was killed has no report.
            reports[start.place] = [
                next((v for v in each if isinstance(v, RankReport)), RankReport())
                for each in values
            ]
            of_start: dict[str, list[Trace]] = {}
            for trace in (v for each in values for v in each if isinstance(v, Trace)):
                of_start.setdefault(trace.training, []).append(trace)
            # Only what all ranks have finished counts.
            finish = len(values) - start.loses_rank
            complete = {n: found for n, found in of_start.items() if len(found) == finish}
            traces |= {(start.place, name): found for name, found in complete.items()}
            if how.code:
                ended[start.place] = _message(start, how, reports[start.place])
            if start.place == 0:
                facts = next((v for v in values[0] if isinstance(v, RecipeFacts)), None)
                if MAIN not in complete:
                    break
            else:  # these runs may be large, and have been resumed now
                shutil.rmtree(folder / f"runs-{start.place - 1}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if facts is None:
        raise UserError(ended.get(0, "The first process left nothing."))
    return Evidence(
        facts=facts,
        starts=starts,
        with_death=with_death,
        traces=traces,
        reports=reports,
        ended=ended,
        chosen=settings.precision,
        quick=quick,
        allows_unused=settings.allows_unused,
    )


def _message(start: Start, ended: Ended, reports: list[RankReport]) -> str:
    """Return why a start failed; raise it if the user has to mend it first."""
    if ended.code > 128:
        raise KeyboardInterrupt
    failures = [failure for report in reports for failure in report.failures]
    failure = min(failures, key=lambda f: f.lost_peer, default=None)
    message = failure.message if failure else ended.message.partition("; the other ranks")[0]
    message = message.replace(f"{KEPT} ", "")  # nothing was kept before these few steps
    if start.place == 0 and (failure.mistake if failure else ended.code == 2):
        raise UserError(message)
    return message or f"It ended with exit code {ended.code}."


def judge_evidence(
    request: Request,
    evidence: Evidence,
    *,
    accept: Sequence[Accepted] = (),
    tolerance: float | None = None,
    notes: Sequence[str] = (),
) -> Verification:
    """Return whether the recipe trains the same, by what its ranks handed back.

    `accept` may differ by intent, in addition to what the recipe accepts. With a `tolerance` only
    losses are compared, up to this relative difference; without, everything is, up to rounding.
    """
    accepts = {*request.recipe.accepts, *accept}
    return answer_of(request.recipe.name, evidence, accepts, tolerance, notes)


def answer_of(
    name: str,
    evidence: Evidence,
    accepts: Collection[Accepted],
    tolerance: float | None,
    notes: Sequence[str],
    rows: Sequence[TableRow] | None = None,
) -> Verification:
    """Return the answer, by the rows for recipes or by others."""
    evidence = replace(evidence, accepts=frozenset(accepts), tolerance=tolerance)
    if tolerance is not None:
        notes = (*notes, f"With --tolerance {tolerance:g} trainings are compared by their losses.")
    if evidence.quick:
        notes = (*notes, "With --quick some rows are left out: verify without it before you rely.")
    exact = evidence.facts.exact
    return Verification(
        recipe=name,
        sizes=tuple(sorted({start.world_size for start in evidence.starts})),
        facts=evidence.facts,
        precisions=(exact,) if evidence.quick else tuple(dict.fromkeys((exact, evidence.chosen))),
        checks=judge(evidence, rows),
        notes=tuple(notes),
    )
