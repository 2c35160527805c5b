"""What the steps of a training gave and took: their losses, seconds and phases, as records."""

from collections.abc import Sequence

import torch

from samestep.run.records import Record
from samestep.training.clock import Clock
from samestep.training.phases import compute_of
from samestep.training.plan import learning_rate
from samestep.training.window import Window
from samestep.training.work import State, Taken, Work


class Meter:
    """Count steps, and bring the state up to date wherever something else comes between them.

    It is the one place that reads the window, the clock and the phases of a training.
    """

    def __init__(self, work: Work, state: State) -> None:
        self._work, self._state = work, state
        self._window = Window(work.world)
        self._clock = Clock(state.position)
        work.phases.earlier = dict(state.position.phases)
        work.phases.begin()

    def count(self, taken: Taken) -> list[Record]:
        """Count the steps just taken; return `compile`, `step` and `progress` records.

        Most steps have none: a list costs less than a generator that yields nothing.

        Raises:
            UserError: a loss is NaN or infinite; it shows when the host reads it.
        """
        first, size, lrs, logged, result, _block = taken
        position, clock = self._state.position, self._clock
        records = list(result.notes)
        for note in records:
            clock.leave_out(note["seconds"])
        if result.seen:
            self._state.measured.add(result.seen)
        self._window.add(first, result.losses, size, result.terms)
        if logged or self._window.full:
            losses = self._read(logged, lrs[-1])
            for step, loss in zip(logged, losses, strict=True):
                norms, place = result.grad_norms, step - first - 1
                records.append(
                    {
                        "event": "step",
                        "step": step,
                        "epoch": position.epoch + 1,
                        "loss": loss,
                        "grad_norm": None if norms is None else float(norms[place]),
                        "lr": lrs[place],
                        "samples": position.samples - (len(lrs) - place - 1) * size,
                        **clock.rate(position),
                    }
                )
            if logged:
                clock.mark(position)
        if clock.shows():
            progress = {"event": "progress", "step": position.step, "samples": position.samples}
            records.append(progress | clock.rate(position))
        return records

    def settle(self) -> None:
        """Bring the state up to date with what the steps gathered; all ranks call it.

        Raises:
            UserError: a loss is NaN or infinite: nothing is saved that is not known to be finite.
        """
        work, position = self._work, self._state.position
        self._read([], learning_rate(work.plan, work.settings, position.step - 1))
        self._state.measured.settle()
        work.phases.lap("other")
        position.seconds = self._clock.seconds()
        position.phases = work.phases.total()

    def resume(self) -> None:
        """Go on after a pause that began with `settle`: what came between is no training."""
        self._clock.resume(self._state.position)
        self._work.phases.begin()

    def _read(self, logged: Sequence[int], lr: float) -> list[float]:
        losses, self._state.sums = self._window.read(logged, lr, self._state.sums)
        return losses


def epoch_record(work: Work, state: State) -> Record:
    """Return the `epoch` record of what is trained of the running epoch; all ranks call it."""
    plan, position = work.plan, state.position
    samples = min(position.step_in_epoch * plan.global_batch_size, plan.num_samples)
    if plan.is_stream:
        samples = position.samples - position.samples_before
    # Each rank fills its own row, so that the sum over the ranks is all of them.
    rows = torch.zeros(plan.world_size, 4, dtype=torch.float64)
    mine = [state.sums.loss, *_spread(work.phases.seconds()).values()]
    rows[work.world.rank] = torch.tensor(mine, dtype=torch.float64)
    losses, *columns = work.world.reduce(rows).T.tolist()
    seconds = position.seconds - position.epoch_started_s
    metrics = state.measured.means(work.world, samples)
    return {
        "event": "epoch",
        "epoch": position.epoch + 1,
        "step": position.step,
        "loss": sum(losses) / (state.sums.terms if work.trainee.terms else samples),
        "samples": samples,
        "train_seconds": seconds,
        "samples_per_s": samples / max(seconds, 1e-9),
        "phases": position.phases,
        **({"metrics": metrics} if metrics else {}),
        **({"ranks": dict(zip(_spread({}), columns, strict=True))} if plan.world_size > 1 else {}),
    }


def _spread(phases: dict[str, float]) -> dict[str, float]:
    """Return what tells a slow rank from those that wait for it."""
    data = phases.get("data", 0.0) + phases.get("to_device", 0.0)
    return {"data": data, "compute": compute_of(phases), "all_reduce": phases.get("all_reduce", 0)}
