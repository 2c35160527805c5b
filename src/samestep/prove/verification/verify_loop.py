"""Verify a script with a loop of its own: start it on 1 and N ranks, once per short training."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.settings import Precision, Settings
from samestep.base.words import count
from samestep.core.learner.side_effects import ALL_KINDS, KINDS, Kind
from samestep.prove.verification import harness
from samestep.prove.verification.evidence import Evidence
from samestep.prove.verification.loop_on_rank import STATISTICS, LoopTask
from samestep.prove.verification.rows.trainings import Arithmetic
from samestep.prove.verification.rows.user_loop import LOOP_ROWS
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

_MAIN = ShortTraining(name=MAIN)
_OWN = ShortTraining(name=OWN_PRECISION, own_precision=True)
_UNCHANGED = ShortTraining(name=MAIN, free=ALL_KINDS)
"""What the first start runs: everything as it is, so that it shows what has to be fixed."""
_ROWS: dict[Kind, str] = {"batchnorm": "BatchNorm", "dropout": "dropout", "state": "state"}


class _FailedError(UserError):
    """The script has failed in one process, by no mistake that samestep knows."""


def verify_loop(
    script: Path,
    arguments: Sequence[str],
    options: harness.VerifyOptions,
    launch: harness.Launch,
    *,
    progress: harness.Progress = lambda *_: None,
) -> harness.Verification:
    """Run the first steps of a script's own loop on several numbers of ranks, and compare.

    `launch` starts ranks that call `run_script`.
    """
    with harness.starting(options, Settings(), launch, progress) as starts:
        task = LoopTask(
            script=script,
            arguments=tuple(arguments),
            folder=starts.folder,
            run=starts.folder,
            start=Start(place=0, world_size=1),
            training=_UNCHANGED,
            most_ranks=max(starts.sizes),
            device=starts.device,
            doubles=True,
        )
        evidence = _Loop(task, starts).gather()
    return starts.answer(script.name, evidence, rows=LOOP_ROWS)


class _Loop:
    """A loop under verification: its starts, and what they are to do by what is known of it."""

    def __init__(self, task: LoopTask, starts: harness.Starts) -> None:
        self._task, self._starts = task, starts

    def gather(self) -> Evidence:
        starts, quick = self._starts, self._starts.options.quick
        planned = plan_starts(starts.sizes, quick=True)
        starts.total = len(planned)
        one_process, *several = planned
        inexact = ""
        try:
            results = self._run(one_process, _UNCHANGED)[0].results
        except _FailedError as failure:  # it may be that only float64 is the matter
            inexact = str(failure)
            del starts.ended[0]
            self._task = replace(self._task, doubles=False)
            results = self._run(one_process, _UNCHANGED)[0].results
        exact: Precision = results["precision"] if inexact else "fp64"
        present = frozenset(kind for kind, row in _ROWS.items() if results[row])
        self._task = replace(self._task, statistics=results.get(STATISTICS, {}), precision=exact)
        free = [left_free(kind) for kind in KINDS if kind in present and several]
        alone = [_MAIN] if present else []
        if inexact:
            alone.append(ShortTraining(name=NUDGED, nudged=True))
        if len(present) > 1:
            alone += free
        else:  # all that differs by itself was free already
            starts.traces |= {(0, training.name): starts.traces[0, MAIN] for training in free}
        has_own_precision = not (inexact or quick)
        starts.total = 1 + len(alone) + len(free) + len(several) + 2 * has_own_precision
        for training in alone:
            self._run(one_process, training)
        for start in several:
            for training in [_MAIN, *(free if start.place == 1 else ())]:
                self._run(start, training)
        chosen = exact
        if has_own_precision:
            in_own = self._run(one_process, _OWN)[0].results
            chosen, results[NUDGED_IN_OWN] = in_own["precision"], in_own[OPTIMIZER_ROW]
            if several and chosen != exact:
                self._run(several[-1], _OWN)
        facts = RecipeFacts(
            num_samples=starts.reports[0][0].num_samples,
            size=results["size"],
            evaluates="validation",
            exact=exact,
            inexact=inexact,
            present=present,
            results=results,
        )
        evidence = starts.evidence(facts, planned, chosen)
        self._measure_rounding(evidence, _MAIN, NUDGED_GRADIENT, results[OPTIMIZER_ROW])
        if has_own_precision:
            self._measure_rounding(evidence, _OWN, NUDGED_IN_OWN, results[NUDGED_IN_OWN])
        return evidence

    def _measure_rounding(
        self, evidence: Evidence, of: ShortTraining, name: str, arithmetic: Arithmetic | None
    ) -> None:
        """Train once more from gradients off by a rounding, if an optimizer may be what differs.

        What differs before an update has another cause.
        """
        differences = evidence.compare_starts(of.name, reference=evidence.trace(0, of.name))
        after_update = any(
            (d.first_step or 0) > 1 or (d.first_step == 1 and d.what == "weight")
            for d in differences.values()
        )
        if arithmetic and after_update:
            self._task = replace(self._task, arithmetic=arithmetic)
            self._starts.total += 1
            self._run(evidence.starts[0], replace(of, name=name, nudges_gradient=True))

    def _run(self, start: Start, training: ShortTraining) -> list[RankReport]:
        """Start the script once, and keep what its ranks hand back; return their reports.

        Raises:
            UserError: it ended otherwise than by what all ranks have found out together.
        """
        task = self._task
        if start.place in self._starts.ended:  # it fails in the same way again
            return []
        task = replace(
            task,
            run=task.folder / f"run-{self._starts.done}",
            start=start,
            training=training,
            doubles=task.doubles and not training.own_precision,
        )
        reports, failure = self._starts.run(start, task)
        alone = start.world_size == 1
        if failure is None or (failure.mistake and not alone):
            return reports
        if failure.mistake:
            raise UserError(failure.message)
        if alone:
            raise _FailedError(f"{task.script} failed by itself: {failure.message}")
        raise UserError(
            f"{task.script} failed on {count(start.world_size, 'rank')}, though not in one "
            f"process: {failure.message}"
        )
