"""One verification of a script with a loop of its own: start it on 1 and N ranks, and compare."""

import pickle
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.settings import Precision, Settings
from samestep.base.words import count
from samestep.core.training.side_effects import ALL_KINDS, KINDS, Kind
from samestep.launch.ranks.nproc import check_ranks
from samestep.launch.ranks.process import handed_back
from samestep.prove.verification.evidence import Evidence
from samestep.prove.verification.loop_on_rank import STATISTICS, LoopTask
from samestep.prove.verification.rows.own_loop import LOOP_ROWS
from samestep.prove.verification.rows.rounding import Arithmetic
from samestep.prove.verification.short_trainings import (
    MAIN,
    NUDGED,
    NUDGED_GRADIENT,
    NUDGED_IN_OWN,
    OPTIMIZER_ROW,
    OWN_PRECISION,
    RankReport,
    RecipeFacts,
    ShortTraining,
    Start,
    left_free,
    plan_starts,
)
from samestep.prove.verification.trace import Trace, TrainingDifference
from samestep.prove.verification.verify_recipe import (
    Launch,
    Tell,
    Verification,
    VerifyOptions,
    accepted_of,
    answer_of,
    device_of,
    sizes_of,
)

_OTHERS = "; the other ranks"
_MAIN = ShortTraining(name=MAIN)
_OWN = ShortTraining(name=OWN_PRECISION, own_precision=True)
_LOOK = ShortTraining(name=MAIN, free=ALL_KINDS)
"""What the first start runs: everything as it is, so that it shows what has to be fixed."""


class _FailedError(UserError):
    """The script has failed in one process, by no mistake that samestep knows."""


def verify_loop(
    script: Path,
    arguments: Sequence[str],
    options: VerifyOptions,
    launch: Launch,
    *,
    tell: Tell = lambda *_: None,
) -> Verification:
    """Run the first steps of a script's own loop on several numbers of ranks, and compare.

    `launch` starts ranks that call `run_script`; `tell` shows the progress.
    """
    started_at, sizes = time.time(), sizes_of(options, None)
    check_ranks(max(sizes), flag="--nproc")
    accepts = accepted_of(options, None)
    device, notes = device_of(Settings(), max(sizes))
    folder = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    task = LoopTask(
        script=script,
        arguments=tuple(arguments),
        folder=folder,
        run=folder,
        start=Start(place=0, world_size=1),
        training=_LOOK,
        most_ranks=max(sizes),
        device=device,
        doubles=True,
    )
    try:
        evidence = _Starts(task, sizes, launch, tell).gather(quick=options.quick)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = answer_of(
        script.name,
        evidence,
        accepts=accepts,
        tolerance=options.tolerance,
        notes=notes,
        rows=LOOP_ROWS,
    )
    return replace(found, seconds=time.time() - started_at)


class _Starts:
    """The starts of one verification: each runs the script once, for one short training."""

    def __init__(self, task: LoopTask, sizes: Sequence[int], launch: Launch, tell: Tell) -> None:
        self._task, self._launch, self._tell = task, launch, tell
        self._all = plan_starts(sizes, quick=True)
        self._traces: dict[tuple[int, str], list[Trace]] = {}
        self._reports: dict[int, list[RankReport]] = {}
        self._ended: dict[int, str] = {}
        self._done, self._total = 0, len(self._all)

    def gather(self, *, quick: bool) -> Evidence:
        """Return all that the starts hand back."""
        one, *several = self._all
        inexact = ""
        try:
            found = self._take(one, _LOOK)[0].found
        except _FailedError as failure:  # it may be that only float64 is the matter
            inexact = str(failure)
            self._task = replace(self._task, doubles=False)
            found = self._take(one, _LOOK)[0].found
        exact: Precision = found["precision"] if inexact else "fp64"
        rows: dict[Kind, str] = {"batchnorm": "BatchNorm", "dropout": "dropout", "state": "state"}
        present = frozenset(kind for kind, row in rows.items() if found[row])
        self._task = replace(self._task, statistics=found.get(STATISTICS, {}), precision=exact)
        free = [left_free(kind) for kind in KINDS if kind in present and several]
        alone = [_MAIN] * bool(present) + [ShortTraining(name=NUDGED, nudged=True)] * bool(inexact)
        for training in free:
            if len(present) > 1:
                alone.append(training)
            else:  # all that differs by itself was free already
                self._traces[0, training.name] = self._traces[0, MAIN]
        own = [] if inexact or quick else [_OWN]
        self._total = 1 + len(alone) + len(free) + len(several) + 2 * len(own)
        for training in alone:
            self._take(one, training)
        for start in several:
            for training in [_MAIN, *(free if start.place == 1 else ())]:
                self._take(start, training)
        chosen = exact
        for training in own:
            ours = self._take(one, training)[0].found
            chosen, found[NUDGED_IN_OWN] = ours["precision"], ours[OPTIMIZER_ROW]
            for start in several[-1:] if chosen != exact else ():
                self._take(start, training)
        evidence = Evidence(
            facts=RecipeFacts(
                num_samples=self._reports[0][0].num_samples,
                size=found["size"],
                evaluates="validation",
                exact=exact,
                inexact=inexact,
                present=present,
                found=found,
            ),
            starts=self._all,
            traces=self._traces,
            reports=self._reports,
            ended=self._ended,
            chosen=chosen,
            quick=quick,
        )
        self._measure(evidence, _MAIN, NUDGED_GRADIENT, found[OPTIMIZER_ROW])
        for training in own:
            self._measure(evidence, training, NUDGED_IN_OWN, found[NUDGED_IN_OWN])
        return replace(evidence, traces=self._traces)

    def _measure(
        self, evidence: Evidence, of: ShortTraining, name: str, arithmetic: Arithmetic | None
    ) -> None:
        """Train once more from gradients off by a rounding, if an optimizer may be what differs.

        What differs before an update has another cause.
        """
        one = evidence.trace(0, of.name)
        found = evidence.compare_starts(of.name, reference=one).values()
        if arithmetic and any(_after_update(each) for each in found):
            self._task, self._total = replace(self._task, arithmetic=arithmetic), self._total + 1
            self._take(self._all[0], replace(of, name=name, nudges_gradient=True))

    def _take(self, start: Start, training: ShortTraining) -> list[RankReport]:
        """Start the script once, and keep what its ranks hand back.

        Raises:
            UserError: it ended otherwise than by what all ranks have found out together.
        """
        place, size, task = start.place, start.world_size, self._task
        if place in self._ended:  # it fails in the same way again
            return []
        self._tell(self._done, self._total, count(size, "rank"))
        self._done += 1
        file = task.folder / f"start-{self._done}"
        own = replace(
            task,
            run=task.folder / f"run-{self._done}",
            start=start,
            training=training,
            doubles=task.doubles and not training.own_precision,
        )
        file.write_bytes(pickle.dumps(own))
        ended = self._launch(size, file, task.device)
        if ended.code > 128:
            raise KeyboardInterrupt
        values = [handed_back(file, rank) for rank in range(size)]
        reports = [v for each in values for v in each if isinstance(v, RankReport)]
        traces = [v for each in values for v in each if isinstance(v, Trace)]
        if training in (_LOOK, _MAIN):
            self._reports[place] = reports
        if not ended.code and len(traces) == size:
            self._traces[place, training.name] = traces
            return reports
        failures = sorted(
            (failure for report in reports for failure in report.failures),
            key=lambda failure: (failure.lost_peer, not failure.step),
        )
        message = failures[0].message if failures else ended.message.partition(_OTHERS)[0]
        mistake = failures[0].mistake if failures else ended.code == 2
        if size > 1 and mistake:
            self._ended[place] = message
            self._reports.setdefault(place, reports)
            return reports
        where = f"on {count(size, 'rank')}, though not in one process" if size > 1 else "by itself"
        if not mistake:
            message = f"{task.script} failed {where}: {message}"
            raise _FailedError(message) if size == 1 else UserError(message)
        raise UserError(message)


def _after_update(found: TrainingDifference) -> bool:
    step = found.first_step or 0
    return step > 1 or (step == 1 and found.what == "weight")
