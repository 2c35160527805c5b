"""Checks of all ranks together: what must be the same, and what must not."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from samestep.base.words import count
from samestep.cluster.doctor.findings import Check, Finding, green, red, yellow
from samestep.cluster.doctor.rank_facts import Allocation, RankFacts, cores_together


def nodes(allocation: Allocation) -> Finding | None:
    """Check that all nodes have equally many ranks."""
    if len(allocation.ranks) == 1:
        return None
    by_node = allocation.nodes
    few, many = min(by_node, key=len), max(by_node, key=len)
    if len(few) == len(many):
        shown = ", ".join(ranks[0].machine.host for ranks in by_node[:4])
        more = " …" if len(by_node) > 4 else ""
        return green(f"{len(by_node)} × {count(len(few), 'rank')}: {shown}{more}")
    return yellow(
        f"{len(few)} on {few[0].machine.host}, {len(many)} on {many[0].machine.host}",
        "Start the same number of ranks on every node: --ntasks-per-node.",
    )


def device(allocation: Allocation) -> Finding:
    """Check that every rank has a device, of one kind, and that no two share a GPU."""
    ranks, kind = allocation.ranks, _kind(allocation.ranks[0])
    if without := [rank for rank in ranks if rank.device_problem]:
        return red(
            f"{_names(without)}: {without[0].device_problem}",
            "Start as many ranks per node as each rank sees GPUs, or use --device cpu.",
            hosts=tuple(dict.fromkeys(rank.machine.host for rank in without)),
        )
    if shared := sharing(ranks):
        return red(
            f"{_names(shared)} share one GPU",
            "Start one rank per GPU, without CUDA_VISIBLE_DEVICES or --gpu-bind.",
        )
    if odd := _odd_ones(ranks, _kind):
        return yellow(odd, "Every step waits for the slowest; use nodes of one kind.")
    return green(f"{kind} on all ranks" if len(ranks) > 1 else kind)


def threads(allocation: Allocation) -> Finding | None:
    """Check that there is a core for each thread that OMP_NUM_THREADS asks for."""
    ranks = max(
        allocation.hosts.values(),
        key=lambda ranks: sum(r.machine.omp_threads or 0 for r in ranks) / cores_together(ranks),
    )
    each, cores = ranks[0].machine.omp_threads, cores_together(ranks)
    if each is None:
        return None
    found = f"OMP_NUM_THREADS={each}: {count(len(ranks), 'rank')} × {each} on {cores:.3g} cores"
    if sum(rank.machine.omp_threads or 0 for rank in ranks) <= cores:
        return green(found)
    where = f"{ranks[0].machine.host}: " if allocation.spans_hosts else ""
    return yellow(
        f"{where}{found}",
        f"Threads would wait for cores: export OMP_NUM_THREADS={max(1, int(cores / len(ranks)))}, "
        "or unset it (each rank then takes its share of the cores).",
    )


def loader_workers(allocation: Allocation) -> Finding:
    """Check that each host has a core for every rank and every loader worker."""
    workers = allocation.ranks[0].num_workers
    ranks = max(allocation.hosts.values(), key=lambda ranks: len(ranks) / cores_together(ranks))
    cores = cores_together(ranks)
    found = f"{count(len(ranks), 'rank')} × (1 + {workers} workers) on {cores:.3g} cores"
    if len(ranks) * (1 + workers) <= cores:
        return green(found)
    fitting = max(0, int(cores / len(ranks)) - 1)
    fewer = f"Use --num-workers {fitting}" if fitting < workers else "Start fewer ranks"
    where = f"{ranks[0].machine.host}: " if allocation.spans_hosts else ""
    return yellow(f"{where}{found}", f"{fewer}, or ask for more cores (--cpus-per-task).")


def same_versions(allocation: Allocation) -> Finding | None:
    """Check that Python, PyTorch, CUDA, NCCL and samestep are the same everywhere."""
    for name in ("torch", "samestep", "cuda", "nccl", "python"):
        if odd := _odd_ones(allocation.ranks, attrgetter(f"machine.{name}")):
            return red(f"{name}: {odd}", ONE_ENVIRONMENT)
    machine = allocation.ranks[0].machine
    found = f"torch {machine.torch}, samestep {machine.samestep} on all ranks"
    return green(found) if len(allocation.ranks) > 1 else None


def same_code(allocation: Allocation) -> Finding | None:
    """Check that samestep's source files are the same: the version does not show that."""
    if odd := _odd_ones(allocation.ranks, attrgetter("machine.code")):
        return red(f"samestep's source: {odd}", "Install the same copy on every node.")
    found = f"source {allocation.ranks[0].machine.code} on all ranks"
    return green(found) if len(allocation.ranks) > 1 else None


def recipe(allocation: Allocation) -> Finding | None:
    """Check that the recipe file exists and is the same on every rank."""
    here = allocation.ranks[0].machine.recipe
    if missing := [rank for rank in allocation.ranks if rank.machine.recipe == "missing"]:
        advice = "Pass its path on a file system that all nodes share."
        return red(f"the file is not there for {_names(missing)}", advice)
    if odd := _odd_ones(allocation.ranks, attrgetter("machine.recipe")):
        return red(f"the file differs: {odd}", "Copy it to every node, or to a shared file system.")
    return green(f"the same file for every rank ({here})") if here else None


CHECKS: list[Check[Allocation]] = [
    *(nodes, device, threads, loader_workers, same_versions, same_code, recipe)
]
ONE_ENVIRONMENT = "Start every rank from one environment, on a shared file system or in one image."


def sharing(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the ranks that share a GPU with another one."""
    counts = Counter(rank.device_uuid for rank in ranks if rank.device_uuid)
    return [rank for rank in ranks if counts[rank.device_uuid] > 1]


def _kind(rank: RankFacts) -> str:
    used = [gpu.name for gpu in rank.machine.gpus if gpu.uuid == rank.device_uuid]
    return used[0] if used else rank.device.partition(":")[0]


def _odd_ones(ranks: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> str:
    """Name the ranks that differ from the majority; return an empty text if none does."""
    usual = Counter(map(value, ranks)).most_common(1)[0][0]
    odd = [rank for rank in ranks if value(rank) != usual]
    if not odd:
        return ""
    return f"{value(odd[0]) or 'none'} for {_names(odd)}, {usual or 'none'} for the others"


def _names(ranks: Sequence[RankFacts]) -> str:
    if len(ranks) == 1:
        return ranks[0].label
    numbers = ", ".join(str(rank.launch.rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    hosts = sorted({rank.machine.host for rank in ranks})
    return f"ranks {numbers}{more} on {', '.join(hosts[:3])}{' …' if len(hosts) > 3 else ''}"
