"""A training that was run whole, and killed and resumed: what its starts did, step by step.

Steps are counted from 0 over all starts: `offset` is how many a start's first step comes after.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise

from samestep.scripts.checking.events import Event, RankSeen


@dataclass(frozen=True)
class Save:
    """A checkpoint that was written, or a part of one."""

    step: int
    """Steps of the training before it."""
    event: Event
    path: str
    """Empty if it has no name."""
    renamed: bool = False
    """Whether it got its name once it was whole."""

    @property
    def digests(self) -> set[int]:
        """Its tensors."""
        return {value[0] for value in self.event["leaves"].values() if isinstance(value, list)}

    def is_twin(self, other: "Save") -> bool:
        """Whether another run wrote the same parts after the same step."""
        same = self.step == other.step and self.event.where == other.event.where
        return same and {*self.event["leaves"]} == {*other.event["leaves"]}

    def alike(self, names: Sequence[str], path: str) -> bool:
        """Whether a file that was loaded has the same parts, or lies where this one does."""
        same = {*names} == {*self.event["leaves"]}
        return same or bool(self.path and path.startswith(self.path))


@dataclass(kw_only=True)
class Attempt:
    """One start of the script: how far it came, and in which states."""

    ranks: list[RankSeen]
    output: list[str]
    offset: int = 0
    ended: bool = True
    """Whether it came to its own end."""

    @cached_property
    def steps(self) -> list[tuple[Event, ...]]:
        """Each step that all ranks took, an event of each; the last may not have been taken."""
        return [*zip(*(rank.of("trained") for rank in self.ranks), strict=False)]

    @property
    def taken(self) -> int:
        """Steps that it took, where it was stopped or ended."""
        stops = [event.step for rank in self.ranks for event in rank.of("stopped", "final")]
        return min(stops, default=len(self.steps)) if stops else max(0, len(self.steps) - 1)

    @cached_property
    def saves(self) -> list[Save]:
        """What it saved, by the step of the training."""
        found: list[Save] = []
        for rank in self.ranks:
            for event in rank.of("saved", "renamed"):
                if event.kind == "saved":
                    found.append(Save(self.offset + event.step, event, event["path"]))
                    continue
                for at, one in enumerate(found):
                    if one.path and (one.path + os.sep).startswith(event["old"] + os.sep):
                        path = event["path"] + one.path.removeprefix(event["old"])
                        found[at] = replace(one, path=path, renamed=True)
        return sorted(found, key=lambda one: one.step)

    @property
    def newest(self) -> str:
        """Return the path of its newest checkpoint: a file, or the folder of one that has several.

        Of several files of a step it is the one that holds most.
        """
        named = [save for save in self.saves if save.path]
        last = [save for save in named if save.step == named[-1].step]
        folders = {save.path.rpartition(os.sep)[0] for save in last}
        others = {save.path.rpartition(os.sep)[0] for save in named if save.step != last[0].step}
        if len(last) > 1 and len(folders) == 1 and not folders & others:
            return folders.pop()
        return max(last, key=lambda save: len(save.event["leaves"])).path if last else ""

    def loaded(self, what: str = "file") -> list[Event]:
        """Return what it loaded before its first step."""
        return [e for rank in self.ranks for e in rank.of("loaded") if e["what"] == what]

    def state(self, step: int, rank: int = 0) -> Event | None:
        """Return the state in which a step of the training begins, or which the last one made."""
        events = self.ranks[rank].of("trained", "final") if rank < len(self.ranks) else []
        at = step - self.offset
        return events[at] if 0 <= at < len(events) else None

    def changing_copies(self, rank: int) -> set[int]:
        """Return which copies of the model change in most steps: the averages of the weights."""
        each = [event["copies"] for event in self.ranks[rank].of("trained", "final")]
        pairs = [(a, b) for a, b in pairwise(each) if len(a) == len(b)]
        changes = Counter(n for a, b in pairs for n in range(len(a)) if a[n] != b[n])
        return {n for n, times in changes.items() if 2 * times > len(pairs)}

    def samples(self, first: int, end: int) -> Counter[int]:
        """Return the samples that all ranks trained in steps of the training, each how often."""
        found: Counter[int] = Counter()
        for step in range(first, end):
            found += self.of_step(step)
        return found

    def of_step(self, step: int) -> Counter[int]:
        """Return the samples of one step, by their index in the data set, or by their content."""
        at = step - self.offset
        events = self.steps[at] if 0 <= at < len(self.steps) else ()
        each = [event["indices"] if self.numbered else event["rows"] for event in events]
        return Counter(one for some in each for one in some)

    @cached_property
    def numbered(self) -> bool:
        """Whether the indices of all samples are known."""
        each = [event for events in self.steps for event in events]
        return bool(each) and all(event["indices"] for event in each)

    def epochs(self) -> Iterator[tuple[int, int]]:
        """Yield the first step of each epoch of its loader, and the one after its last."""
        begin = 0
        for at in range(1, len(self.steps) + 1):
            if at == len(self.steps) or self.steps[at][0].epoch != self.steps[begin][0].epoch:
                yield self.offset + begin, self.offset + at
                begin = at


@dataclass(kw_only=True)
class Resumed:
    """All starts of `check --resume`."""

    whole: Attempt
    chain: list[Attempt]
    """The one that was killed first, and those that resume, each from the one before."""
    again: Attempt | None = None
    """A second whole run, if anything was different: what the script itself does not repeat."""
    words: list[str] = field(default_factory=list)
    """What resumes it."""
    others: list[tuple[int, Attempt]] = field(default_factory=list)
    """Resumed on other numbers of ranks, from the first kill."""
    torn: Attempt | None = None
    """Resumed from the first half of its checkpoint."""

    @property
    def total(self) -> int:
        """How many steps are compared."""
        return self.whole.taken if self.whole.ended else len(self.whole.steps) - 1

    @cached_property
    def _one_pass(self) -> Counter[int]:
        """The samples of one epoch of a loop that has no loader to tell: they come each time."""
        steps = [self.whole.of_step(n).items() for n in range(self.total)]
        sums = [0, *accumulate(sum(hash((row,)) * n for row, n in step) for step in steps)]
        for length in range(1, self.total // 2 + 1):
            if len({after - before for before, after in pairwise(sums[::length])}) == 1:
                return self.whole.samples(0, length)
        return Counter()

    def epochs(self, start: Attempt) -> list[tuple[int, int]]:
        """Return the first step of each epoch of a start, and the one after its last."""
        if len([*self.whole.epochs()]) > 1 or not self._one_pass:
            return [*start.epochs()]
        firsts, seen = [start.offset], Counter[int]()
        for step in range(start.offset, start.offset + len(start.steps)):
            own = start.of_step(step)
            seen += own
            if any(seen[row] > self._one_pass[row] for row in own):
                firsts.append(step)
                seen = own
        return [*pairwise([*firsts, start.offset + len(start.steps)])]

    def align(self, start: Attempt, before: Attempt) -> None:
        """Find out which step a start continues from: by its weights, else where it was killed."""
        begins = start.steps[0][0]["weights"] if start.steps else None
        known = [before, *self.chain[::-1], self.whole]
        steps = [
            step
            for one in known
            for step in range(one.offset + len(one.steps) - 1, one.offset - 1, -1)
            if (state := one.state(step)) is not None and state["weights"] == begins
        ]
        killed_at = before.offset + before.taken
        within = [step for step in steps if step <= killed_at]
        start.offset = within[0] if within else killed_at

    def before(self, start: Attempt, rank: int = 0) -> Event | None:
        """Return the state that a start continues from, as the training had it before the kill."""
        states = (one.state(start.offset, rank) for one in self._earlier(start))
        return next((state for state in states if state is not None), None)

    def _earlier(self, start: Attempt) -> list[Attempt]:
        place = self.chain.index(start) if start in self.chain else 1
        return self.chain[:place][::-1]

    def differs(self, start: Attempt, kind: str, rank: int = 0) -> bool:
        """Whether a start begins with another state of a kind than the training had."""
        own, before = start.state(start.offset, rank), self.before(start, rank)
        if own is None or before is None:
            return False
        if kind != "copies":
            return bool(own[kind] != before[kind])
        known = next(one for one in self._earlier(start) if one.state(start.offset, rank) is before)
        changing = known.changing_copies(rank)
        return not {value for n, value in enumerate(before[kind]) if n in changing} <= {*own[kind]}

    def unsteady(self, what: str) -> bool:
        """Whether two starts from scratch differ in something of a step."""
        both = self.whole.steps[: self.total], (self.again or self.chain[0]).steps
        return any(a[0][what] != b[0][what] for a, b in zip(*both, strict=False))
