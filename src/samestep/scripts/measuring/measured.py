"""What a profile measures, per step, as plain numbers: the verdict is a function of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from samestep.base.run.records import COMPUTE, WAITS


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of a training to profile; the verb's flags."""

    epoch: int | None = None
    """Trace this whole epoch, counted from 1; by default only a few steps are traced."""
    seconds: float = 3.0
    """Measure for at least this many seconds."""
    steps: int | None = None
    """Measure this many steps instead of --seconds."""
    record_shapes: bool = False
    """Write the shapes of each operation's inputs into the trace."""
    with_stack: bool = False
    """Write the Python calls that lead to each operation into the trace. This slows the traced
    steps, so the verdict's shares are less exact."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """What the operations of the traced steps were, as shares of what a step computes."""

    launch: float = 0.0  # overhead: Python and starting operations, while none works
    matmul: float = 0.0  # matrix products, convolutions, attention: limited by arithmetic
    memory: float = 0.0  # all others: limited by moving numbers to and from memory
    sync: float = 0.0  # the host waited for the device, which then idled
    count: float = 0.0  # operations per step
    gpu_busy: float | None = None
    """Seconds per step in which a GPU ran at least one kernel; None if no GPU was traced."""
    syncs: float = 0.0
    """Times per step that the host read a number: `.item()`, `float(tensor)`, `.cpu()`."""
    collate: float = 0.0  # share of the wait for data in which samples were collated
    top_matmul: tuple[tuple[str, float], ...] = ()
    """The longest operations limited by arithmetic, each with its share."""
    top_memory: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MeasuredRank:
    """One rank's seconds per step, by phase."""

    phases: Mapping[str, float]
    operations: Operations | None = None
    starved: float = 0.0  # seconds per step that its most delayed thread waited for a core
    wanted_cores: float = 0.0
    """Cores that its threads and loader processes used or waited for, on average."""
    memory: tuple[float, str] | None = None
    """Peak MiB of PyTorch in a traced step, beyond what it holds between steps, and its phase."""

    @property
    def busy(self) -> float:
        """Seconds per step until it has its gradients, whatever the others do."""
        return sum(self.phases.get(phase, 0.0) for phase in (*WAITS, *COMPUTE))

    @property
    def step(self) -> float:
        """Seconds per step, all phases together."""
        return sum(self.phases.values())


@dataclass(frozen=True, kw_only=True)
class MeasuredSteps:
    """Some steps of a training, measured without the profiler; `operations` are from the trace."""

    ranks: tuple[MeasuredRank, ...]
    steps: int
    wall: float = 0.0  # seconds per step by the clock, to which the phases add up
    samples: float = 0.0  # samples per step over all ranks; 0 if unknown
    evaluation: float = 0.0
    """Seconds per step, if evaluations are shared out over the steps between them."""
    checkpoint: float = 0.0
    worker_start: float = 0.0
    """Part of the wait for data in which loader processes were being started."""
    device: str = "cpu"
    cores: int = 1  # cores that these ranks may use on their node
    local_ranks: int = 1
    threads: int = 1  # CPU threads per rank
    workers: int = 0  # loader processes per rank
    iterable: bool = False
    """Whether the data is an IterableDataset, which each worker reads by itself."""
    in_memory: bool = False  # whether the data is held in memory, so that no worker could read it
    gradient_bytes: int = 0  # per rank
    script: bool = False  # whether it was a user's script, not a recipe
    profiled_itself: bool = False
    """Whether the script ran a profiler of its own in some steps, which are left out."""
    compiled: bool = False
    stopped: bool = False  # whether a signal ended it before all was measured
    counts: Mapping[str, int] = field(default_factory=dict)
    """Steps between two evaluations and two checkpoints, by the settings."""

    @property
    def slowest(self) -> int:
        """The rank that the others wait for."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].busy)

    @property
    def excess(self) -> float:
        """Seconds per step that the slowest rank takes longer than the others' median."""
        others = [rank.busy for rank in self._other_ranks]
        return self.ranks[self.slowest].busy - median(others) if others else 0.0

    @property
    def typical(self) -> MeasuredRank:
        """The rank nearest to the median, without the slowest."""
        others = self._other_ranks or list(self.ranks)
        middle = median(rank.busy for rank in others)
        return min(others, key=lambda rank: abs(rank.busy - middle))

    @property
    def _other_ranks(self) -> list[MeasuredRank]:
        return [rank for number, rank in enumerate(self.ranks) if number != self.slowest]

    @property
    def traced(self) -> Operations:
        """The typical rank's operations; all shares are 0 if no step was traced."""
        return self.typical.operations or Operations()

    @property
    def gpu_idle(self) -> float | None:
        """Share of a step in which the typical rank's GPU ran no kernel; None without a GPU.

        The profiler slows down the host, not the kernels. So the steps are those measured without
        it, and only the kernels' time is from the trace.
        """
        busy = self.traced.gpu_busy
        if busy is None or not self.wall:
            return None
        return max(0.0, 1 - busy / self.wall)

    @property
    def wanted_cores(self) -> float:
        """Cores that the ranks of the node used or waited for, on average."""
        return self.local_ranks * max(rank.wanted_cores for rank in self.ranks)
