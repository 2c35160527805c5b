"""Checks of all ranks side by side: what must be the same, and what must not."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from samestep.doctor.check import Check, Finding, green, red, yellow
from samestep.doctor.facts.rank import Rank
from samestep.doctor.measure import Measured

K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The ranks that came, and what was measured between them if all could connect."""

    ranks: tuple[Rank, ...]
    measured: Measured | None = None

    @property
    def nodes(self) -> dict[int, list[Rank]]:
        """The ranks of each node."""
        return _by(self.ranks, lambda rank: rank.launch.node)

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each node, in the order of the nodes."""
        return [ranks[0].launch.rank for _, ranks in sorted(self.nodes.items())]

    @property
    def hosts(self) -> dict[str, list[Rank]]:
        """The ranks of each host; a Slurm for tests has several nodes on one."""
        return _by(self.ranks, lambda rank: rank.address.place)

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are on more than one host, or in several networks of one."""
        return len(self.hosts) > 1


def nodes(allocation: Allocation) -> Finding | None:
    """Which ranks are on which host, and whether all hosts have equally many."""
    if len(allocation.ranks) == 1:
        return None
    by_node = [ranks for _, ranks in sorted(allocation.nodes.items())]
    sizes = {len(ranks) for ranks in by_node}
    if len(sizes) == 1:
        each = f"{sizes.pop()} ranks" if len(by_node[0]) > 1 else "1 rank"
        shown = ", ".join(ranks[0].machine.host for ranks in by_node[:4])
        return green(f"{len(by_node)} × {each}: {shown}{' …' if len(by_node) > 4 else ''}")
    by_size = sorted(by_node, key=len)
    few, many = by_size[0], by_size[-1]
    return yellow(
        f"{len(few)} on {few[0].machine.host}, {len(many)} on {many[0].machine.host}",
        "Equally many on every node make the best use of it: --ntasks-per-node.",
    )


def same_versions(allocation: Allocation) -> Finding | None:
    """Whether Python, PyTorch, CUDA, NCCL and samestep are the same everywhere."""
    if len(allocation.ranks) == 1:
        return None
    for name in ("torch", "samestep", "cuda", "nccl", "python"):
        odd = _odd_ones(allocation.ranks, _version(name))
        if odd:
            return red(
                f"{name}: {odd}",
                "Start every rank from one environment, on a shared file system or in one image.",
            )
    machine = allocation.ranks[0].machine
    return green(f"torch {machine.torch}, samestep {machine.samestep} on all ranks")


def same_code(allocation: Allocation) -> Finding | None:
    """Whether samestep's source files are the same: the version alone does not tell."""
    if len(allocation.ranks) == 1:
        return None
    odd = _odd_ones(allocation.ranks, lambda rank: rank.machine.code)
    if odd:
        return red(f"samestep's source: {odd}", "Install the same copy on every node.")
    return green(f"source {allocation.ranks[0].machine.code} on all ranks")


def recipe(allocation: Allocation) -> Finding | None:
    """Whether the recipe file is there and the same on every rank."""
    hashes = {rank.machine.recipe for rank in allocation.ranks}
    if hashes == {""}:
        return None
    missing = [rank for rank in allocation.ranks if rank.machine.recipe == "missing"]
    if missing:
        return red(
            f"the file is not there for {_some(missing)}",
            "Give its path on a file system that all nodes share.",
        )
    odd = _odd_ones(allocation.ranks, lambda rank: rank.machine.recipe)
    if odd:
        return red(f"the file differs: {odd}", "Copy it to every node, or share it.")
    return green(f"the same file for every rank ({hashes.pop()})")


def device(allocation: Allocation) -> Finding:
    """Whether every rank has a device, of one kind, and no two share a GPU."""
    without = [rank for rank in allocation.ranks if rank.device_problem]
    if without:
        return red(
            f"{_some(without)}: {without[0].device_problem}",
            "Start as many ranks as there are GPUs that each of them sees, or use --device cpu.",
        )
    shared = sharing(allocation.ranks)
    if shared:
        return red(
            f"{_some(shared)} share one GPU",
            "Give each rank its own: one rank for each GPU, and CUDA_VISIBLE_DEVICES and "
            "--gpu-bind left alone.",
        )
    odd = _odd_ones(allocation.ranks, _kind)
    if odd:
        return yellow(odd, "Every step waits for the slowest; take nodes of one kind.")
    kind = _kind(allocation.ranks[0])
    return green(f"{kind} on all ranks" if len(allocation.ranks) > 1 else kind)


def loader_workers(allocation: Allocation) -> Finding:
    """Whether each host has a core for every rank and every loader worker."""
    workers = allocation.ranks[0].num_workers
    ranks = max(allocation.hosts.values(), key=lambda ranks: len(ranks) / cores_together(ranks))
    there = cores_together(ranks)
    plural = "s" if len(ranks) > 1 else ""
    found = f"{len(ranks)} rank{plural} × (1 + {workers} workers) on {there:.3g} cores"
    if len(ranks) * (1 + workers) <= there:
        return green(found)
    where = f"{ranks[0].machine.host}: " if allocation.spans_hosts else ""
    fitting = max(0, int(there / len(ranks)) - 1)
    fewer = f"Use --num-workers {fitting}" if fitting < workers else "Start fewer ranks"
    return yellow(where + found, f"{fewer}, or ask for more cores (--cpus-per-task).")


CHECKS: list[Check[Allocation]] = [
    *(nodes, device, loader_workers, same_versions, same_code, recipe)
]


def sharing(ranks: Sequence[Rank]) -> list[Rank]:
    """Return the ranks that share a GPU with another one."""
    counts = Counter(rank.device_uuid for rank in ranks if rank.device_uuid)
    return [rank for rank in ranks if counts[rank.device_uuid] > 1]


def cores_together(ranks: Sequence[Rank]) -> float:
    """Return the cores that the ranks of one host may use together."""
    # srun may give each task cores of its own; a quota is mostly one container's, for all of them.
    together = float(len({core for rank in ranks for core in rank.machine.cores}))
    quotas = [rank.machine.quota_cores for rank in ranks if rank.machine.quota_cores is not None]
    return min([together, *quotas])


def _by(ranks: Sequence[Rank], key: Callable[[Rank], K]) -> dict[K, list[Rank]]:
    groups: dict[K, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups


def _version(name: str) -> Callable[[Rank], str]:
    return lambda rank: str(getattr(rank.machine, name))


def _kind(rank: Rank) -> str:
    used = [gpu.name for gpu in rank.machine.gpus if gpu.uuid == rank.device_uuid]
    return used[0] if used else rank.device.partition(":")[0]


def _odd_ones(ranks: Sequence[Rank], value: Callable[[Rank], str]) -> str:
    """Say which ranks differ from the most; nothing if none does."""
    counts = Counter(value(rank) for rank in ranks)
    if len(counts) == 1:
        return ""
    usual = counts.most_common(1)[0][0]
    odd = [rank for rank in ranks if value(rank) != usual]
    return f"{value(odd[0]) or 'none'} for {_some(odd)}, {usual or 'none'} for the others"


def _some(ranks: Sequence[Rank]) -> str:
    """Name a few ranks."""
    if len(ranks) == 1:
        return ranks[0].label
    numbers = ", ".join(str(rank.launch.rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    hosts = sorted({rank.machine.host for rank in ranks})
    return f"ranks {numbers}{more} on {', '.join(hosts[:3])}{' …' if len(hosts) > 3 else ''}"
