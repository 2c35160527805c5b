"""What every verification does: choose the ranks, start them, collect what they hand back, answer.

Recipes (`verify_recipe.py`) and scripts with a loop of their own (`verify_loop.py`) differ in what
a start runs: several short trainings of a recipe, but one of a script, as its process ends then.
"""

import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

import torch

from samestep.base.errors import LOST_PEER, UserError, caused, did_you_mean, is_users
from samestep.base.settings import Device, Precision, Settings
from samestep.base.words import count
from samestep.core.recipe import Accepted
from samestep.core.training.meter import KEPT
from samestep.launch.ranks.nproc import check_ranks
from samestep.launch.ranks.process import handed_back
from samestep.launch.ranks.start import Ended
from samestep.prove.verification.evidence import Check, Evidence, TableRow
from samestep.prove.verification.rows import check_rows
from samestep.prove.verification.short_trainings import (
    MAIN,
    RankFailure,
    RankReport,
    RecipeFacts,
    Start,
)
from samestep.prove.verification.trace import Trace

MOST_RANKS = 64
_SIZES, _QUICK_SIZES = (1, 2, 3), (1, 2)

Launch = Callable[[int, Path, str], Ended]
"""(number of ranks, file of their task, their device) → how they ended."""
Progress = Callable[[int, int, str], None]
"""(starts that are done, all starts, the next one's ranks in words)"""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What a verification compares, and what may differ."""

    sizes: tuple[int, ...] | None = None  # numbers of ranks; None for 1, 2 and 3, or fewer
    quick: bool = False
    accept: tuple[str, ...] = ()  # what may differ by intent
    tolerance: float | None = None  # compare only losses, up to this relative difference


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The answer, and what it rests on."""

    recipe: str
    sizes: tuple[int, ...]
    facts: RecipeFacts
    precisions: tuple[str, ...]
    checks: list[Check]
    notes: tuple[str, ...]
    seconds: float

    @property
    def same(self) -> bool:
        """Whether nothing differs that was not accepted."""
        return all(check.passed for check in self.checks)


@dataclass(kw_only=True)
class Starts:
    """The starts of one verification, and what their ranks have handed back so far."""

    options: VerifyOptions
    sizes: Sequence[int]
    accepted: frozenset[Accepted]
    device: Device
    notes: tuple[str, ...]
    folder: Path
    launch: Launch
    progress: Progress
    began: float = field(default_factory=time.time)
    done: int = 0
    total: int = 0  # how many there will be, as far as is known
    facts: RecipeFacts | None = None
    traces: dict[tuple[int, str], list[Trace]] = field(default_factory=dict)
    """(start, short training) → the trace of each rank, if all have finished it."""
    reports: dict[int, list[RankReport]] = field(default_factory=dict)
    """Start → the report of each rank, of the main training if it ran several."""
    ended: dict[int, str] = field(default_factory=dict)  # start that failed → its error message

    def run(
        self, start: Start, task: object, launch: Launch | None = None
    ) -> tuple[list[RankReport], RankFailure | None]:
        """Start ranks with a task; return their reports, and how they failed if they did.

        It raises KeyboardInterrupt if a signal stopped them.
        """
        place, num_ranks = start.place, start.world_size
        self.progress(self.done, self.total, count(num_ranks, "rank"))
        self.done += 1
        file = self.folder / f"start-{self.done}"
        file.write_bytes(pickle.dumps(task))
        end = (launch or self.launch)(num_ranks, file, self.device)
        if end.code > 128:
            raise KeyboardInterrupt
        values = [handed_back(file, rank) for rank in range(num_ranks)]
        # A rank that was killed has no report.
        reports = [
            next((v for v in of_rank if isinstance(v, RankReport)), RankReport())
            for of_rank in values
        ]
        traces: dict[str, list[Trace]] = {}
        for trace in (v for of_rank in values for v in of_rank if isinstance(v, Trace)):
            traces.setdefault(trace.training, []).append(trace)
        survivors = num_ranks - start.loses_rank
        complete = {name for name, of_ranks in traces.items() if len(of_ranks) == survivors}
        self.traces |= {(place, name): traces[name] for name in complete}
        if MAIN in complete or place not in self.reports:
            self.reports[place] = reports
        if self.facts is None:
            self.facts = next((v for v in values[0] if isinstance(v, RecipeFacts)), None)
        if not end.code and sum(map(bool, values)) >= survivors:
            return reports, None
        failure = _first_failure(end, reports)
        self.ended[place] = failure.message
        return reports, failure

    def evidence(
        self,
        facts: RecipeFacts,
        planned: Sequence[Start],
        chosen: Precision,
        with_death: Start | None = None,
    ) -> Evidence:
        """Return the results so far as evidence, to which later starts add theirs."""
        return Evidence(
            facts=facts,
            starts=planned,
            with_death=with_death,
            traces=self.traces,
            reports=self.reports,
            ended=self.ended,
            chosen=chosen,
            quick=self.options.quick,
        )

    def answer(
        self,
        name: str,
        evidence: Evidence,
        accepts: Sequence[Accepted] = (),
        notes: Sequence[str] = (),
        rows: Sequence[TableRow] | None = None,
    ) -> Verification:
        """Return whether it is the same training, by the rows for recipes or by others.

        With a tolerance only losses are compared, up to this relative difference; without,
        everything is, up to rounding. A recipe `accepts` some differences, as the options may.
        """
        tolerance, notes = self.options.tolerance, [*self.notes, *notes]
        accepted = self.accepted.union(accepts)
        evidence = replace(evidence, accepts=accepted, tolerance=tolerance)
        if tolerance is not None:
            notes.append(f"With --tolerance {tolerance:g}, only losses are compared.")
        if evidence.quick:
            notes.append("--quick skips some rows: verify without it before you rely on this.")
        exact, chosen = evidence.facts.exact, evidence.chosen
        return Verification(
            recipe=name,
            sizes=tuple(sorted({start.world_size for start in evidence.starts})),
            facts=evidence.facts,
            precisions=(exact,) if evidence.quick else tuple(dict.fromkeys((exact, chosen))),
            checks=check_rows(evidence, rows),
            notes=tuple(notes),
            seconds=time.time() - self.began,
        )


@contextmanager
def starting(
    options: VerifyOptions, settings: Settings, launch: Launch, progress: Progress = lambda *_: None
) -> Iterator[Starts]:
    """Choose the numbers of ranks and their device; clean up after the starts."""
    sizes = _sizes(options, settings.virtual_ranks)
    check_ranks(max(sizes), oversubscribe=settings.oversubscribe, flag="--nproc")
    words, accept = list(get_args(Accepted)), ",".join(options.accept)
    for word in (word for word in options.accept if word not in words):
        raise UserError(
            f"--accept {accept}: {word!r} cannot be accepted. "
            f"{did_you_mean(word, words)}Choose from: {', '.join(words)}."
        )
    for flag, value in (("accept", accept), ("tolerance", options.tolerance)):
        if value and settings.virtual_ranks is not None:
            raise UserError(
                f"--{flag} {value} does not go with --virtual-ranks, which compares everything to "
                "the last bit. Leave one of them out."
            )
    accepted = cast("tuple[Accepted, ...]", options.accept)
    device, notes = _device(settings, max(sizes))
    prefix = "samestep-verify-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Starts(
            options=options,
            sizes=sizes,
            accepted=frozenset(accepted),
            device=device,
            notes=notes,
            folder=Path(folder),
            launch=launch,
            progress=progress,
        )


def _first_failure(end: Ended, reports: Sequence[RankReport]) -> RankFailure:
    """Return why ranks failed: causes come before their effects, those within a step first."""
    message = end.message.partition("; the other ranks")[0] or f"It exited with code {end.code}."
    by_launcher = RankFailure(training=MAIN, step=0, message=message, mistake=end.code == 2)
    failures = [failure for report in reports for failure in report.failures]
    first = min(failures, key=lambda f: (f.lost_peer, not f.step), default=by_launcher)
    # Nothing was kept before these few steps.
    return replace(first, message=first.message.replace(f"{KEPT} ", ""))


def _sizes(options: VerifyOptions, virtual: int | None) -> Sequence[int]:
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


def _device(settings: Settings, most_ranks: int) -> tuple[Device, tuple[str, ...]]:
    """Return the device of all ranks, one GPU each or the CPU, and a note about it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    too_few = f"{most_ranks} ranks need a GPU each, and this machine has {gpus}."
    if settings.device == "cuda" and 0 < gpus < most_ranks:
        raise UserError(f"{too_few} Use --device cpu, or --nproc 1{',2' if gpus > 1 else ''}.")
    if settings.device != "auto":
        return settings.device, ()
    if gpus >= most_ranks or (most_ranks == 1 and torch.backends.mps.is_available()):
        return "auto", ()
    return "cpu", (f"On the CPU: {too_few}",) if gpus else ()


def failure_of(trace: Trace, error: Exception) -> RankFailure:
    """Return the failure that a rank hands back for an error in a short training."""
    if trace.begun > 1:  # what fails now and not at once depends on the batch
        error = caused(error)
    mistake, text = isinstance(error, UserError), str(error).strip()
    lost = not mistake and bool(LOST_PEER.search(text))
    if not mistake:
        # Without the dispatcher's list of what it could do.
        first = text.partition("\n")[0].partition(" This could be because the operator")[0]
        frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = f"{type(error).__name__}: {first}{where}"
    return RankFailure(
        training=trace.training, step=trace.begun, message=text, mistake=mistake, lost_peer=lost
    )
