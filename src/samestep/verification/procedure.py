"""Start the ranks one size after the other, read back what they left, and judge it."""

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import msgspec

from samestep.errors import UserError
from samestep.execution.request import Request
from samestep.ranks.start import Ended
from samestep.recipe import Accepted
from samestep.run.files import write_text
from samestep.screen.words import count
from samestep.training.window import KEPT
from samestep.verification.checks import judge
from samestep.verification.evidence import Check, Evidence
from samestep.verification.facts import Facts, read_facts
from samestep.verification.messages import Order, folder_of, read_told
from samestep.verification.situations import MAIN, Start, plan_starts
from samestep.verification.trace import load_trace

ORDER_FILE = "SAMESTEP_VERIFY"
"""Set, in the ranks that are started here, to the file that says what they do."""

Launch = Callable[[int, Path], Ended]
"""(number of ranks, file of the order) → how they ended."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer, and what it rests on."""

    recipe: str
    sizes: tuple[int, ...]
    facts: Facts
    precisions: tuple[str, ...]
    device: str
    checks: list[Check]
    seconds: float
    notes: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs that was not accepted."""
        return all(check.passed for check in self.checks)


def verify(
    request: Request,
    sizes: Sequence[int],
    launch: Launch,
    *,
    batch: int | None = None,
    accept: Sequence[Accepted] = (),
    tolerance: float | None = None,
    lightning: bool = True,
    tell: Callable[[str], None] = lambda _text: None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Return whether a recipe trains the same on one process and on these numbers of ranks.

    Args:
        request: the recipe, its options and settings.
        sizes: numbers of ranks; one process is always among them.
        launch: starts ranks, and waits for their end.
        batch: the global batch, if not the smallest that will do.
        accept: what may differ by intent, beside what the recipe accepts.
        tolerance: largest relative difference of losses; else everything is compared, to rounding.
        lightning: whether Lightning's Trainer is compared too, if it is installed.
        tell: called with what is being done.
        notes: what the user should know of how it was done.

    Raises:
        UserError: the recipe cannot be trained in one process, or has too few samples.
        KeyboardInterrupt: the ranks were stopped by a signal.
    """
    began = time.perf_counter()
    sizes = tuple(sorted({1, *sizes}))
    starts = plan_starts(sizes)
    lightning = lightning and importlib.util.find_spec("lightning") is not None
    order = Order(start=starts[0], sizes=sizes, batch=batch, lightning=lightning)
    folder = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    try:
        ended: dict[int, str] = {}
        for start in starts:
            tell(f"{count(start.world_size, 'rank')} ({start.place + 1} of {len(starts)} starts)")
            failure = _run(start, replace(order, start=start), folder, launch)
            if failure is not None:
                ended[start.place] = failure
            if start.place == 0 and not _main_trace(folder):
                break
            _free(folder, start)
        evidence = read_evidence(folder, starts, request, ended)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if tolerance is not None:
        notes = (*notes, f"With --tolerance {tolerance:g} trainings are compared by their losses.")
    evidence = replace(
        evidence, accepts=frozenset({*request.recipe.accepts, *accept}), tolerance=tolerance
    )
    return Report(
        recipe=request.recipe.name,
        sizes=sizes,
        facts=evidence.facts,
        precisions=tuple(dict.fromkeys((evidence.facts.exact, evidence.chosen))),
        device=request.settings.device,
        checks=judge(evidence),
        seconds=time.perf_counter() - began,
        notes=notes,
    )


def _run(start: Start, order: Order, folder: Path, launch: Launch) -> str | None:
    """Run one start; return what was said of its failure, if it failed."""
    path = folder / f"order-{start.place}.json"
    write_text(path, msgspec.json.encode(asdict(order)).decode())
    ended = launch(start.world_size, path)
    if ended.code == 0:
        return None
    if ended.code > 128:
        raise KeyboardInterrupt
    failures = [
        f for r in range(start.world_size) for f in read_told(folder, start.place, r).failures
    ]
    failures.sort(key=lambda f: f.lost_peer)
    message = failures[0].message if failures else ended.message.partition("; the other ranks")[0]
    mistake = failures[0].mistake if failures else ended.code == 2
    # Nothing was kept before these few steps.
    message = message.replace(f"{KEPT} ", "")
    if start.place == 0 and mistake:
        raise UserError(message)
    return message or f"It ended with exit code {ended.code}."


def _main_trace(folder: Path) -> bool:
    return (folder_of(folder, 0, 0) / f"{MAIN}.pt").is_file()


def _free(folder: Path, start: Start) -> None:
    """Delete the runs of an earlier start, which may be large, once they have been resumed."""
    if start.resumes is not None:
        shutil.rmtree(folder / f"start-{start.resumes}" / "runs", ignore_errors=True)


def read_order(path: Path) -> Order:
    """Return what a start is to do."""
    return msgspec.json.decode(path.read_bytes(), type=Order)


def read_evidence(
    folder: Path, starts: Sequence[Start], request: Request, ended: dict[int, str]
) -> Evidence:
    """Read back what the ranks left.

    Raises:
        UserError: there is nothing.
    """
    facts = read_facts(folder / "facts.json")
    if facts is None:
        raise UserError(ended.get(0, "The first process left nothing."))
    traces = {}
    for start in starts:
        ranks = [folder_of(folder, start.place, rank) for rank in range(start.world_size)]
        for name in {path.name for path in ranks[0].glob("*.pt")}:
            if all((rank / name).is_file() for rank in ranks):
                key = (start.place, name.removesuffix(".pt"))
                traces[key] = [load_trace(rank / name) for rank in ranks]
    return Evidence(
        facts=facts,
        starts=starts,
        traces=traces,
        told={
            s.place: [read_told(folder, s.place, r) for r in range(s.world_size)] for s in starts
        },
        ended=ended,
        chosen=request.settings.precision,
        accepts=frozenset(),
    )


def order_of_this_rank() -> Path | None:
    """Return the file that says what this rank does, if this process is one."""
    named = os.environ.get(ORDER_FILE)
    return Path(named) if named else None
