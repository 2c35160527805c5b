"""What `check` and the ranks tell each other: the job that they run, and the events that they note.

A watched rank appends events to a file of its own (`recorder.py`); once all have ended, the rules
read them (`rules/`). There is nothing between the two but these files, so a rank may die any time.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a script under watch."""

    script: str
    """A file in the scratch copy, or with `module` the name of a module."""
    arguments: list[str] = []
    module: bool = False
    scratch: str = ""
    """The copy of the user's folder in which the script runs."""
    place: str = ""
    """Where the scratch copy of all that it may reach begins; empty if nothing is guarded."""
    began: float = 0.0
    """When the ranks were started, in seconds since 1970: newer files are the script's own."""
    folder: str = ""
    """Where the ranks write what was seen."""
    steps: int = 10
    """Batches of each of the first two epochs; then comes the last one of the epoch."""
    nproc: int = 1
    """How many devices there seem to be, with `substitute` or `alone`."""
    substitute: bool = False
    """Whether calls for CUDA are answered by the CPU."""
    one_per_node: bool = False
    """Whether each rank seems to have a node, and a GPU, of its own."""
    alone: bool = False
    """Whether the script starts its ranks itself."""
    resumes: bool = False
    """Whether the training is compared with itself after a kill: its epochs have their length."""
    kill_from: int | None = None
    """Then each rank stops before the first step after a checkpoint of this step or a later one."""
    stop_at: int | None = None
    """Then each rank stops after this many steps at the latest."""


def write_job(job: Job) -> Path:
    """Write a job into its folder."""
    path = Path(job.folder) / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def read_job(path: Path) -> Job:
    """Return a job that was written."""
    return msgspec.json.decode(path.read_bytes(), type=Job)


class Event(msgspec.Struct, omit_defaults=True):
    """One thing that a rank did."""

    kind: str
    """What it was; the module of `watch/` that notes a kind says what its facts are."""
    where: str = ""
    """The innermost line of the user's code, `file.py:41`; empty if there was none."""
    step: int = 0
    """Optimizer steps that the rank had taken."""
    epoch: int = 0
    """How often its training had begun to read from its loader."""
    evaluating: bool = False
    time: float = 0.0
    """Seconds since the rank was started."""
    facts: dict[str, Any] = {}

    def __getitem__(self, fact: str) -> Any:
        return self.facts[fact]

    def get(self, fact: str, otherwise: Any = None) -> Any:
        """Return a fact, or something else if it was not noted."""
        return self.facts.get(fact, otherwise)


@dataclass(frozen=True, kw_only=True)
class RankSeen:
    """All that one rank did, in order, and how it ended."""

    rank: int
    events: list[Event]
    exit_code: int | None = None
    """As its process ended; negative for a signal, None if `check` itself ended it."""

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, in order."""
        return [event for event in self.events if event.kind in kinds]

    def first(self, *kinds: str) -> Event | None:
        """Return the first event of these kinds."""
        return next((event for event in self.events if event.kind in kinds), None)

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
    gone: bool = False
    """Whether the rank to blame has ended, and nothing says how."""


_STEPPED = re.compile(r"\bstep\(([\w.]+)\)|([\w.]+)\.step\(\)")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What all ranks did: all that a rule may look at."""

    ranks: list[RankSeen]
    folder: Path
    """The user's own folder, for lines of source code in remedies; rules never judge by them."""
    asked: bool = True
    """Whether the user asked for this number of ranks, rather than took the default."""
    notes: list[str] = field(default_factory=list)
    stall: Stall | None = None
    resumed: Any = None
    """What `check --resume` ran instead, a `Resumed` of `starts.py`."""

    @property
    def world_size(self) -> int:
        """Return how many ranks there were."""
        return len(self.ranks)

    @property
    def is_of_one_process(self) -> bool:
        """Whether the script knows nothing of ranks, and no setting says that it should."""
        knows = self.any("init", "collective") or any(e["own"] for e in self.any("environment"))
        return self.world_size > 1 and not (self.asked or knows)

    @property
    def complete(self) -> bool:
        """Whether every rank came to its own good end, so that what did not come never would."""
        return all(rank.exit_code == 0 for rank in self.ranks) and not self.any("ran_out")

    def each(self, *kinds: str) -> list[list[Event]]:
        """Return the events of these kinds of each rank, in rank order."""
        return [rank.of(*kinds) for rank in self.ranks]

    def any(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds of all ranks, rank by rank."""
        return [event for rank in self.ranks for event in rank.of(*kinds)]

    def together(self, *kinds: str) -> Iterator[tuple[Event, ...]]:
        """Yield the n-th event of these kinds of every rank, as far as all ranks have one."""
        yield from zip(*self.each(*kinds), strict=False)

    def line(self, where: str) -> str:
        """Return the user's line of code at `file.py:41`, without its indent; empty if unread."""
        name, _, number = where.rpartition(":")
        return source_line(self.folder, name, int(number)) if name else ""

    def optimizer_at(self, step: str) -> str:
        """Return what the user's code calls the optimizer that it steps at `file.py:41`."""
        found = _STEPPED.search(self.line(step))
        return found[1] or found[2] if found else "optimizer"


def source_line(folder: Path, name: str, number: int) -> str:
    """Return a line of a file, without its indent; empty if it cannot be read."""
    try:
        return (folder / name).read_text().splitlines()[number - 1].strip()
    except (OSError, ValueError, IndexError):
        return ""


def events_path(folder: Path, rank: int) -> Path:
    """Return where a rank notes what it does."""
    return folder / f"events-{rank}.jsonl"


def read_events(folder: Path, rank: int) -> list[Event]:
    """Return what a rank noted; its last line may be torn where it was killed."""
    path = events_path(folder, rank)
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    decoder = msgspec.json.Decoder(Event)
    return [decoder.decode(line) for line in lines]


def encode(event: Event) -> bytes:
    """Return an event as a line; a fact that JSON does not know becomes its text."""
    try:
        return msgspec.json.encode(event) + b"\n"
    except (TypeError, ValueError, OverflowError):
        return json.dumps(msgspec.structs.asdict(event), default=str).encode() + b"\n"
