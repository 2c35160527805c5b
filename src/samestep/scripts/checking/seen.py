"""All that the ranks of a script were seen to do: what the rules may look at."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from samestep.scripts.checking import events as ev

E = TypeVar("E", bound=ev.Event)
M = TypeVar("M", bound=ev.OfModel)
_STEPPED = re.compile(r"\bstep\(([\w.]+)\)|([\w.]+)\.step\(\)")


@dataclass(frozen=True, kw_only=True)
class RankSeen:
    """All that one rank did, in order, and how it ended."""

    rank: int
    events: list[ev.Event]
    exit_code: int | None = None
    """As its process ended; negative for a signal, None if `check` itself ended it."""

    def of(self, *kinds: type[E]) -> list[E]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]

    def of_model(self, kind: type[M], model_id: int) -> list[M]:
        """Return the events of a kind that are of a model, in order."""
        return [event for event in self.of(kind) if event.model_id == model_id]

    def first(self, kind: type[E]) -> E | None:
        """Return the first event of a kind."""
        return next((event for event in self.events if isinstance(event, kind)), None)

    @property
    def steps(self) -> int:
        """How many optimizer steps it took."""
        return max((event.step for event in self.events), default=0)

    @property
    def epochs(self) -> int:
        """In how many epochs it trained."""
        return max((event.epoch for event in self.events), default=0)


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Why the ranks hung, or failed in calls that did not meet; and the line that is to blame."""

    where: str
    sentence: str
    gone: bool = False  # whether the rank to blame has ended, and nothing says how


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What all ranks did."""

    ranks: list[RankSeen]
    folder: Path
    """The user's own folder, for lines of source code in remedies; rules never judge by them."""
    asked: bool = True
    """Whether the user asked for this number of ranks, rather than took the default."""
    notes: list[str] = field(default_factory=list)
    stall: Stall | None = None

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def is_of_one_process(self) -> bool:
        """Whether the script knows nothing of ranks, and no setting says that it should."""
        asks = any(variable.own for variable in self.any(ev.VariableRead))
        knows = asks or self.any(ev.GroupMade, ev.CollectiveCalled)
        return self.world_size > 1 and not (self.asked or knows)

    @property
    def complete(self) -> bool:
        """Whether every rank came to its own good end, so that what did not come never would."""
        return all(rank.exit_code == 0 for rank in self.ranks) and not self.any(ev.EpochRanOut)

    def any(self, *kinds: type[E]) -> list[E]:
        """Return the events of these kinds of all ranks, rank by rank."""
        return [event for rank in self.ranks for event in rank.of(*kinds)]

    def together(self, kind: type[E]) -> Iterator[tuple[E, ...]]:
        """Yield the n-th event of a kind of every rank, as far as all ranks have one."""
        yield from zip(*(rank.of(kind) for rank in self.ranks), strict=False)

    def line(self, where: str) -> str:
        """Return the user's line of code at `file.py:41`, without its indent; empty if unread."""
        name, _, number = where.rpartition(":")
        return source_line(self.folder, name, int(number)) if name else ""

    def optimizer_at(self, step: str) -> str:
        """Return the name in the user's code of the optimizer stepped at `file.py:41`."""
        call = _STEPPED.search(self.line(step))
        return call[1] or call[2] if call else "optimizer"


def why_apart(seen: Seen) -> str:
    """Return what shows that each rank is meant to train a model of its own; empty if nothing."""
    models = [model for rank in seen.ranks if (model := rank.first(ev.ModelTrained))]
    saved = [{e.path for e in rank.of(ev.FileSaved) if e.tensors > 2} for rank in seen.ranks]
    rates = {step.lr for rank in seen.ranks if (step := rank.first(ev.OptimizerStep))}
    reasons = {
        "the ranks train models of other shapes": any(m.shapes != models[0].shapes for m in models),
        "each rank has a part of a weight": any(e.sharded for e in seen.any(ev.WeightSums)),
        "each rank saves a model of its own": all(saved) and not set.intersection(*saved),
        "the learning rates of the ranks differ": len(rates) > 1,
    }
    return "" if seen.any(ev.ModelWrapped) else next((why for why in reasons if reasons[why]), "")


def asks_for_gpu(seen: Seen) -> bool:
    """Whether the script asks for a GPU."""
    return bool(seen.any(ev.CudaAsked) or seen.any(ev.DeviceAsked))


def source_line(folder: Path, name: str, number: int) -> str:
    """Return a line of a file, without its indent; empty if it cannot be read."""
    try:
        return (folder / name).read_text().splitlines()[number - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def events_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's events."""
    return folder / f"events-{rank}.jsonl"


def read_events(folder: Path, rank: int) -> list[ev.Event]:
    """Return a rank's events; its last line may be torn if it was killed."""
    path = events_path(folder, rank)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    # Not checked against the fields' types: a script's own samplers may have any seed.
    fields = map(msgspec.json.decode, lines)
    return [vars(ev)[given.pop("kind")](**given) for given in fields]
