"""Which training of a sweep comes next: Optuna chooses by those that have ended.

It needs no database: after a kill its study is made again from the directories of the runs.
"""

import math
from typing import Any

from samestep.base.errors import UserError, what_to_install
from samestep.base.run.files import read_object
from samestep.cluster.sweeping.sweep_plan import SweepPlan

_TRIES = 100


class OptunaChoice:
    """Chooses `sweep.num_trainings` of a sweep's points, by a tree-structured Parzen estimator.

    Each flag is a categorical parameter: Bergstra et al. 2011, "Algorithms for Hyper-Parameter
    Optimization", as Optuna has it.

    Raises UserError if Optuna is not installed.
    """

    def __init__(self, sweep: SweepPlan) -> None:
        try:
            import optuna  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise UserError(f"--optuna needs Optuna. {what_to_install(error)}") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._sweep, self._failed = sweep, optuna.trial.TrialState.FAIL
        # Trainings that still run count as bad, lest the next are all next to them.
        sampler = optuna.samplers.TPESampler(seed=sweep.seed, constant_liar=True)
        self._study = optuna.create_study(sampler=sampler)
        self._space: dict[str, Any] = {
            flag: optuna.distributions.CategoricalDistribution(values)
            for flag, values in sweep.axes.items()
        }
        self._names = {tuple(point.values()): name for name, point in sweep.points.items()}
        self._trials: dict[str, Any] = {}
        self._again: list[str] = []
        for name in [name for name in sweep.points if sweep.run_dir(name).is_dir()]:
            if sweep.status(name) == "completed":
                self._take(name)
                self.ended(name)
            else:
                self._again.append(name)

    def next(self) -> str:
        """Return the training to start next; an empty text if there are enough."""
        if self._again:
            return self._take(self._again.pop(0))
        if len(self._trials) == self._sweep.num_trainings:
            return ""
        for _ in range(_TRIES):
            trial = self._study.ask(self._space)
            name = self._names[tuple(trial.params[flag] for flag in self._space)]
            if name not in self._trials:
                self._trials[name] = trial
                return name
            self._study.tell(trial, state=self._failed)  # it would be the same training
        return self._take(next(name for name in self._sweep.points if name not in self._trials))

    def ended(self, name: str) -> None:
        """Note how good a training became."""
        best = read_object(self._sweep.run_dir(name) / "result.json").get("best") or {}
        value = best.get("value")
        if isinstance(value, int | float) and math.isfinite(value):
            self._study.tell(self._trials[name], -value if best.get("mode") == "max" else value)
        else:
            self._study.tell(self._trials[name], state=self._failed)

    def _take(self, name: str) -> str:
        self._study.enqueue_trial(dict(self._sweep.points[name]))
        self._trials[name] = self._study.ask(self._space)
        return name
