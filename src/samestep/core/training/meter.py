"""Measure the steps of a training: losses, seconds and phases become records."""

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from samestep.base.errors import UserError
from samestep.base.phases import compute_of
from samestep.base.run.records import Record
from samestep.core.learner.apply import over_nothing
from samestep.core.learner.device import peak_memory_bytes
from samestep.core.learner.optimizer import rates_of
from samestep.core.training.work import Position, State, StepsTaken, Sums, Work, newest_lr
from samestep.launch.ranks.world import World

_PROGRESS_EVERY_S = 0.2


class Clock:
    """Count the seconds of training steps, without evaluations and checkpoints."""

    def __init__(self, position: Position) -> None:
        self._before, self._since = position.seconds, time.perf_counter()
        self._marked = (position.samples, position.seconds)
        self._shown = 0.0

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._before + time.perf_counter() - self._since

    def resume(self, position: Position) -> None:
        """Continue after a pause that began when the position was brought up to date."""
        self._before, self._since = position.seconds, time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Do not count these seconds, spent compiling."""
        self._since += seconds

    def rate(self, samples: int) -> Record:
        """Return the fields `seconds` and `samples_per_s`, the latter since the last mark."""
        (before, seconds), now = self._marked, self.seconds()
        return {"seconds": now, "samples_per_s": (samples - before) / max(now - seconds, 1e-9)}

    def mark(self, samples: int) -> None:
        """Measure the next rate from here."""
        self._marked = (samples, self.seconds())

    def shows(self) -> bool:
        """Whether a progress bar should move again."""
        now = time.perf_counter()
        if now - self._shown < _PROGRESS_EVERY_S:
            return False
        self._shown = now
        return True


_LONGEST = 1024


class Drained(NamedTuple):
    """What a `Window` held, on its way to the host."""

    first: int
    """The first of its steps, counted from 1."""
    sizes: Sequence[int]
    losses: Tensor | None
    terms: Tensor | None
    norms: Tensor | None
    copied: torch.cuda.Event | None
    """Says when the host has them; None if it has."""


KEPT = "Training stopped; earlier checkpoints are kept."
"""Only for runs that keep checkpoints."""

REMEDIES = "Try a smaller --lr, --warmup-steps, --clip-norm 1, or a wider --precision."


class Window:
    """Losses that the host has not read yet; reading is a collective, at the same steps."""

    def __init__(self, world: World, counts: object = None) -> None:
        """Begin an empty one; `counts` is the recipe's function that counts terms, if it has it."""
        self._world = world
        self._first_step = 0
        self._counts = counts
        self._losses: list[Tensor] = []
        self._sizes: list[int] = []
        self._terms: list[Tensor] = []

    @property
    def full(self) -> bool:
        """Whether it is time to read, so that the window stays small."""
        return len(self._sizes) >= _LONGEST

    def add(
        self, step: int, losses: Sequence[Tensor], size: int, terms: Sequence[Tensor] | None = None
    ) -> None:
        """Keep this rank's part of the mean losses of the steps from `step` on.

        They are means over `size` samples, or over the `terms` of each step.
        """
        if not self._sizes:
            self._first_step = step
        self._losses.extend(losses)
        self._sizes.extend([size] * len(losses))
        self._terms.extend(terms or ())

    def drain(
        self, norms: Sequence[Tensor] | Tensor | None = None, *, waits: bool = True
    ) -> "Drained":
        """Empty the window, with the gradient norms of its newest steps.

        Unless it `waits` a CUDA device copies them later, once it has computed them.
        """
        lists = (self._losses, self._terms, [] if norms is None else [*norms])
        columns = [torch.stack(of) if of else None for of in lists]
        losses, terms, norms_ = (
            None if c is None else c.to("cpu", non_blocking=not waits) for c in columns
        )
        copied = None
        if not waits and losses is not None and self._losses[0].is_cuda:
            copied = torch.cuda.current_stream(self._losses[0].device).record_event()
        drained = Drained(self._first_step + 1, self._sizes, losses, terms, norms_, copied)
        self._losses, self._sizes, self._terms = [], [], []
        return drained

    def read(
        self, drained: "Drained", wanted: Sequence[int], lr: float, sums: Sums
    ) -> tuple[list[list[float]], Sums]:
        """Return the mean losses of each wanted step, and the updated sums; all ranks call it.

        A step has one loss, followed by those by name that it is the sum of. Steps are counted from
        1. A NaN or infinite loss on any rank raises on all of them.
        """
        if drained.losses is None:
            return [], sums
        # The one place where the host waits for the device.
        if drained.copied is not None:
            drained.copied.synchronize()
        rows = drained.losses.to(torch.float64).view(len(drained.losses), -1).tolist()
        first = drained.first
        sizes: Sequence[float] = drained.sizes
        if drained.terms is not None:
            sizes = drained.terms.to(torch.float64).tolist()
        loss_sum, terms, parts = sums
        # Those of an epoch that began without names are not of all of it.
        parts = parts if terms else (0.0,) * (len(rows[0]) - 1)
        for (loss, *named), size in zip(rows, sizes, strict=True):
            loss_sum += loss * size
            parts = tuple(part + added * size for part, added in zip(parts, named, strict=False))
            terms += size
        sums = Sums(loss_sum, terms, parts)
        pairs = enumerate(zip(rows, sizes, strict=True))
        bad = next((first + i for i, (r, n) in pairs if not (math.isfinite(r[0]) and n > 0)), 0)
        mine = [value for step in wanted for value in rows[step - first]]
        *flat, num_bad = self._added_up([*mine, float(bad > 0)])
        losses = [flat[at : at + len(rows[0])] for at in range(0, len(flat), len(rows[0]))]
        if num_bad:
            # The largest of the negatives is the first bad step of any rank.
            latest = torch.tensor(-bad if bad else -(2**62))
            step = -int(latest if self._world.elastic else self._world.reduce(latest, "max"))
            problem = f"The loss is NaN or infinite at step {step} (learning rate {lr:.3g})."
            message, number = f"{problem} {KEPT} {REMEDIES}", sizes[step - first]
            if not number > 0:
                message = over_nothing(number, f"the global batch of step {step}", self._counts)
                message = f"{message} {KEPT}"
            raise UserError(message, on_all_ranks=True)
        return losses, sums

    def _added_up(self, mine: list[float]) -> list[float]:
        """Return the sums over the ranks; elastic ones have them, and a single one has its own."""
        if self._world.elastic or not self._world.connected:
            return mine
        sums: list[float] = self._world.reduce(torch.tensor(mine, dtype=torch.float64)).tolist()
        return sums


class Meter:
    """Count steps, and update the state before anything else happens between them.

    One that `lags` reads the losses of steps with a record when the next steps are under way, so
    that the device has something to do while the host waits for them.
    """

    def __init__(self, work: Work, state: State, *, lags: bool = False) -> None:
        self._work, self._state, self._lags = work, state, lags
        self._window = Window(work.world, work.learner.terms)
        self._unread: Callable[[], list[Record]] | None = None
        self._clock = Clock(state.position)
        work.phases.earlier = dict(state.position.phases)
        work.phases.begin()

    def count(self, taken: StepsTaken) -> list[Record]:
        """Count the steps just taken; return `compile`, `step` and `progress` records.

        Most steps have none: a list costs less than a generator that yields nothing.
        """
        first, size, lrs, logged, result, _block = taken
        position, clock = self._state.position, self._clock
        records = list(result.notes)
        for note in records:
            clock.leave_out(note["seconds"])
        if result.seen:
            self._state.measured.add(result.seen)
        if self._unread is not None:
            records += self._read()
        self._window.add(first, result.losses, size, result.terms)
        if logged or self._window.full:
            on_way = self._window.drain(result.grad_norms, waits=not self._lags)
            samples = [position.samples - later * size for later in reversed(range(len(lrs)))]
            self._unread = lambda: self._records(on_way, first, logged, lrs, samples)
            if not self._lags:
                records += self._read()
        if clock.shows():
            progress = {"event": "progress", "step": position.step, "samples": position.samples}
            records.append(progress | clock.rate(position.samples))
        return records

    def behind(self, error: Exception) -> list[Record]:
        """Return the records that one that `lags` has not read yet, as a step fails.

        To read them takes all ranks, which are here if the error is `on_all_ranks`.
        """
        with contextlib.suppress(Exception):  # the device may be what has failed
            if not self._work.world.connected or getattr(error, "on_all_ranks", False):
                return self._read()
        return []

    def _read(self) -> list[Record]:
        unread, self._unread = self._unread, None
        return unread() if unread else []

    def _records(
        self,
        drained: Drained,
        first: int,
        logged: Sequence[int],
        lrs: Sequence[float],
        samples: Sequence[int],
    ) -> list[Record]:
        """Return the `step` records of some steps behind the first ones."""
        learner = self._work.learner
        state = self._state
        records = []
        names = ("loss", *learner.parts)
        rates = partial(rates_of, learner.optimizer, scheduled=learner.scheduler is not None)
        losses, state.sums = self._window.read(drained, logged, lrs[-1], state.sums)
        for step, values in zip(logged, losses, strict=True):
            place = step - first - 1
            record = {"event": "step", "step": step, "epoch": state.position.epoch + 1}
            record |= zip(names, values, strict=True)
            record["grad_norm"] = None if drained.norms is None else float(drained.norms[place])
            record |= {"lr": lrs[place], **rates(lrs[place]), "samples": samples[place]}
            records.append(record | self._clock.rate(samples[-1]))
        if logged:
            self._clock.mark(samples[-1])
        return records

    def settle(self) -> list[Record]:
        """Update the state from the steps since; all ranks call it. Only finite losses pass.

        Returns the records of steps that had none yet, if it `lags`.
        """
        work, position = self._work, self._state.position
        records = self._read()
        lr = newest_lr(work, self._state)
        _, self._state.sums = self._window.read(self._window.drain(), [], lr, self._state.sums)
        self._state.measured.settle()
        work.phases.lap("other")
        position.seconds = self._clock.seconds()
        position.phases = work.phases.total()
        return records

    def resume(self) -> None:
        """Continue after a pause that began with `settle`, and do not count the pause."""
        self._clock.resume(self._state.position)
        self._work.phases.begin()


def epoch_record(work: Work, state: State) -> Record:
    """Return the `epoch` record of the running epoch so far; all ranks call it."""
    plan, position = work.plan, state.position
    samples = min(position.step_in_epoch * plan.global_batch_size, plan.num_samples)
    if plan.is_stream or plan.by_tokens is not None:
        samples = position.samples - position.samples_before
    # Each rank fills its own row, so that the sum over the ranks is all of them.
    peak = peak_memory_bytes(work.world.device)
    # The sums of elastic ranks are those of all.
    counts = work.world.is_main or not work.world.elastic
    mine = [state.sums.loss * counts, float(peak or 0), *_spread(work.phases.seconds()).values()]
    mine += [part * counts for part in state.sums.parts]
    rows = torch.zeros(plan.world_size, len(mine), dtype=torch.float64)
    rows[work.world.rank] = torch.tensor(mine, dtype=torch.float64)
    losses, peaks, *columns = work.world.reduce(rows).T.tolist()
    seconds = position.seconds - position.epoch_started_s
    terms = state.sums.terms if work.learner.terms else samples
    parts = zip(work.learner.parts, columns[3:], strict=False)
    metrics = {name: sum(column) / terms for name, column in parts}
    metrics |= state.measured.means(work.world, samples)
    return {
        "event": "epoch",
        "epoch": position.epoch + 1,
        "step": position.step,
        "loss": sum(losses) / terms,
        "samples": samples,
        "train_seconds": seconds,
        "samples_per_s": samples / max(seconds, 1e-9),
        **({"terms_per_s": terms / max(seconds, 1e-9)} if work.learner.terms else {}),
        **work.cost.rates(samples / max(seconds, 1e-9)),
        **({} if peak is None else {"peak_memory_bytes": int(max(peaks))}),
        "phases": position.phases,
        **({"metrics": metrics} if metrics else {}),
        **({"ranks": dict(zip(_spread({}), columns, strict=False))} if plan.world_size > 1 else {}),
    }


def _spread(phases: dict[str, float]) -> dict[str, float]:
    """Return the seconds per phase by which a slow rank differs from those that wait for it."""
    data = phases.get("data", 0.0) + phases.get("to_device", 0.0)
    return {"data": data, "compute": compute_of(phases), "all_reduce": phases.get("all_reduce", 0)}
