"""A training that was run whole, and killed and resumed: what its starts did, step by step.

Steps are counted from 0 over all starts: `offset` is how many a start's first step comes after.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.seen import Seen

StepFact = Literal["rows", "loss", "groups"]
_ALMOST = 0.9  # of the tensors that a step changes


@dataclass(eq=False)
class Attempt:
    """One start of the script: how far it came, and in which states."""

    seen: Seen
    output: list[str]
    before: "Attempt | None" = None  # the start that it resumes from
    offset: int = 0

    @cached_property
    def steps(self) -> list[tuple[ev.StepBegun, ...]]:
        """Each step that all ranks took, an event of each; the last may not have been taken."""
        return [*self.seen.together(ev.StepBegun)]

    @property
    def span(self) -> range:
        """The steps of the training that are its own."""
        return range(self.offset, self.offset + len(self.steps))

    @property
    def end(self) -> int:
        """Steps of the training when it was stopped or ended."""
        waits = self.seen.any(ev.WaitsForKill)
        ends = [event.step for event in (*waits, *self.seen.any(ev.FinalState))]
        return self.offset + min(ends, default=max(0, len(self.steps) - 1))

    @cached_property
    def saves(self) -> list[ev.CheckpointSaved]:
        """The checkpoints that it wrote, or parts of them, by the step of the training."""
        saves: list[ev.CheckpointSaved] = []
        for event in self.seen.any(ev.CheckpointSaved, ev.FileRenamed):
            if isinstance(event, ev.CheckpointSaved):
                saves.append(structs.replace(event, step=self.offset + event.step))
            elif isinstance(event, ev.FileRenamed):
                for save in saves:
                    if Path(save.path).is_relative_to(event.old):  # it is whole by now
                        inside = Path(save.path).relative_to(event.old)
                        save.path = str(Path(event.path) / inside)
                        save.renamed = True
        return sorted(saves, key=lambda save: save.step)

    @property
    def newest(self) -> str:
        """The path of its newest checkpoint; of several files their folder, or the largest one."""
        named = [save for save in self.saves if save.path]
        last = [save for save in named if save.step == named[-1].step]
        folders = {Path(save.path).parent for save in last}
        others = {Path(save.path).parent for save in named if save.step != last[0].step}
        if len(last) > 1 and len(folders) == 1 and not folders & others:
            return str(folders.pop())
        return str(max(last, key=lambda save: len(save.leaves)).path) if last else ""

    def loaded(self, what: str = "file") -> list[ev.StateLoaded]:
        """Return the loads before its first step."""
        return [event for event in self.seen.any(ev.StateLoaded) if event.what == what]

    @cached_property
    def states(self) -> list[list[ev.TrainingState]]:
        """Of each rank the states in which its steps began, and which the last one made."""
        each = [rank.of(ev.TrainingState) for rank in self.seen.ranks]
        for states in each:  # averages of the weights are the copies that change in most steps
            pairs = [(a.copies, b.copies) for a, b in pairwise(states)]
            pairs = [(a, b) for a, b in pairs if len(a) == len(b)]
            changes = Counter(n for a, b in pairs for n in range(len(a)) if a[n] != b[n])
            most = {n for n, times in changes.items() if 2 * times > len(pairs)}
            for state in states:
                state.averages = {c for n, c in enumerate(state.copies) if n in most}
        return each

    def state(self, step: int, rank: int = 0) -> ev.TrainingState | None:
        """Return the state in which a step of the training begins."""
        events = self.states[rank] if rank < len(self.states) else []
        n = step - self.offset
        return events[n] if 0 <= n < len(events) else None

    def step_of(self, tensors: Iterable[Any], near: int) -> int | None:
        """Return the step that begins with these weights, the nearest; None if there is none."""
        digests, last = {*tensors}, self.offset + len(self.states[0])
        for step in sorted(range(self.offset, last), key=lambda n: (abs(n - near), n)):
            state, other = self.state(step), self.state(step - 1) or self.state(step + 1)
            if state is None or other is None:
                continue
            weights = state.weights
            moving = [a for a, b in zip(weights, other.weights, strict=False) if a != b]
            known = [digest in digests for digest in moving or weights]
            if known and sum(known) >= (_ALMOST if moving else 1.0) * len(known):
                return step
        return None

    def resumes(self, before: "Attempt", whole: "Attempt") -> None:
        """Find out which step it continues from: by its weights, else where it was killed."""
        known = [start for start in (before, before.before, whole) if start is not None]
        weights = self.steps[0][0].weights if self.steps else []
        steps = (start.step_of(weights, before.end) for start in known if weights)
        self.offset = next((step for step in steps if step is not None), before.end)
        self.before = before

    def begins(self, rank: int = 0) -> tuple[ev.TrainingState | None, ev.TrainingState | None]:
        """Return the state that it begins with, and the one that was there before the kill."""
        start = self.before
        before = None
        while start is not None and (before := start.state(self.offset, rank)) is None:
            start = start.before
        return self.state(self.offset, rank), before

    def changed(self, part: ev.StatePart, rank: int = 0) -> tuple[list[Any], list[Any]] | None:
        """Return a part of both states if it is not the same, or its averages are not all there."""
        own, before = self.begins(rank)
        if own is None or before is None:
            return None
        now, then = getattr(own, part), getattr(before, part)
        if now == then or (part == "copies" and before.averages <= {*now}):
            return None
        return now, then

    def samples(self, first: int, end: int | None = None, *, rows: bool = False) -> Counter[int]:
        """Return the samples of steps on all ranks, by index; if not all are known, by content."""
        by_index = self.numbered and not rows
        last = first + 1 if end is None else end
        steps = self.steps[max(0, first - self.offset) : max(0, last - self.offset)]
        ranks = (rank for step in steps for rank in step)
        return Counter(n for rank in ranks for n in (rank.indices if by_index else rank.rows))

    @cached_property
    def numbered(self) -> bool:
        """Whether the indices of all samples are known."""
        return bool(self.steps) and all(e.indices for step in self.steps for e in step)

    def at(self, step: int) -> ev.StepBegun:
        """Return a step of the training on rank 0."""
        return self.steps[step - self.offset][0]

    def differs_from(self, other: "Attempt", what: StepFact) -> int | None:
        """Return the first step of both in which they differ; None if there is none."""

        def fact(start: "Attempt", step: int) -> object:
            if what == "rows":
                return start.samples(step, rows=True)  # of all ranks together
            return start.at(step).loss if what == "loss" else start.at(step).groups

        both = (n for n in self.span if n in other.span)
        return next((n for n in both if fact(self, n) != fact(other, n)), None)

    @cached_property
    def one_pass(self) -> Counter[int]:
        """The samples of one epoch of a loop that has no loader to tell: they come each time."""
        steps = [self.samples(n).items() for n in range(self.end)]
        sums = [0, *accumulate(sum(hash((row,)) * n for row, n in step) for step in steps)]
        for length in range(1, self.end // 2 + 1):
            if len({after - before for before, after in pairwise(sums[::length])}) == 1:
                return self.samples(0, length)
        return Counter()

    def epochs(self, whole: "Attempt") -> list[tuple[int, int]]:
        """Return the first step of each of its epochs, and the one after the last."""
        loader_tells = len({step[0].epoch for step in whole.steps}) > 1 or not whole.one_pass
        firsts, trained = [self.offset], self.samples(self.offset)
        for n, (before, step) in enumerate(pairwise(self.steps), self.offset + 1):
            own = self.samples(n)
            trained += own
            again = any(trained[sample] > whole.one_pass[sample] for sample in own)
            if step[0].epoch != before[0].epoch if loader_tells else again:
                firsts.append(n)
                trained = own
        return [*pairwise([*firsts, self.span.stop])]

    def epoch_of(self, step: int, whole: "Attempt") -> tuple[int, int]:
        """Return the epoch of a step in the same way."""
        return next(epoch for epoch in self.epochs(whole) if epoch[0] <= step < epoch[1])


@dataclass(kw_only=True)
class Resumed:
    """All starts of `check --resume`."""

    whole: Attempt
    chain: list[Attempt]
    """The one that was killed first, and those that resume, each from the one before."""
    words: list[str]  # what resumes it
    again: Attempt | None = None
    """A second whole run, if anything was different: what the script itself does not repeat."""
    others: list[Attempt] = field(default_factory=list)
    """Resumed on other numbers of ranks, from the first kill."""
    torn: Attempt | None = None  # resumed from the first half of its checkpoint

    def unsteady(self, what: StepFact) -> bool:
        """Whether two starts from scratch differ in this."""
        return self.whole.differs_from(self.again or self.chain[0], what) is not None


@dataclass(frozen=True, kw_only=True)
class SeenResumed(Seen):
    """A training of which all starts were seen."""

    resumed: Resumed
