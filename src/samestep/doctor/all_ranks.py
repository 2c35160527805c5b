"""All ranks side by side: what must be the same, and what must not."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter

from samestep.doctor.facts import Allocation, RankFacts, cores_together
from samestep.doctor.findings import Check, Finding, green, red, yellow
from samestep.screen.words import count


def nodes(allocation: Allocation) -> Finding | None:
    """Which ranks are on which host, and whether all hosts have equally many."""
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
        "Equally many on every node make the best use of it: --ntasks-per-node.",
    )


def same_versions(allocation: Allocation) -> Finding | None:
    """Whether Python, PyTorch, CUDA, NCCL and samestep are the same everywhere."""
    advice = "Start every rank from one environment, on a shared file system or in one image."
    for name in ("torch", "samestep", "cuda", "nccl", "python"):
        if odd := _odd_ones(allocation.ranks, attrgetter(f"machine.{name}")):
            return red(f"{name}: {odd}", advice)
    machine = allocation.ranks[0].machine
    found = f"torch {machine.torch}, samestep {machine.samestep} on all ranks"
    return green(found) if len(allocation.ranks) > 1 else None


def same_code(allocation: Allocation) -> Finding | None:
    """Whether samestep's source files are the same: the version alone does not tell."""
    if odd := _odd_ones(allocation.ranks, attrgetter("machine.code")):
        return red(f"samestep's source: {odd}", "Install the same copy on every node.")
    found = f"source {allocation.ranks[0].machine.code} on all ranks"
    return green(found) if len(allocation.ranks) > 1 else None


def recipe(allocation: Allocation) -> Finding | None:
    """Whether the recipe file is there and the same on every rank."""
    here = allocation.ranks[0].machine.recipe
    if missing := [rank for rank in allocation.ranks if rank.machine.recipe == "missing"]:
        advice = "Give its path on a file system that all nodes share."
        return red(f"the file is not there for {_some(missing)}", advice)
    if odd := _odd_ones(allocation.ranks, attrgetter("machine.recipe")):
        return red(f"the file differs: {odd}", "Copy it to every node, or share it.")
    return green(f"the same file for every rank ({here})") if here else None


def device(allocation: Allocation) -> Finding:
    """Whether every rank has a device, of one kind, and no two share a GPU."""
    if without := [rank for rank in allocation.ranks if rank.device_problem]:
        return red(
            f"{_some(without)}: {without[0].device_problem}",
            "Start as many ranks as there are GPUs that each of them sees, or use --device cpu.",
        )
    if shared := sharing(allocation.ranks):
        return red(
            f"{_some(shared)} share one GPU",
            "Start one rank for each GPU, and leave CUDA_VISIBLE_DEVICES and --gpu-bind alone.",
        )
    if odd := _odd_ones(allocation.ranks, _kind):
        return yellow(odd, "Every step waits for the slowest; take nodes of one kind.")
    everywhere = " on all ranks" if len(allocation.ranks) > 1 else ""
    return green(_kind(allocation.ranks[0]) + everywhere)


def threads(allocation: Allocation) -> Finding | None:
    """Whether the threads that OMP_NUM_THREADS asks of each rank have a core each."""
    wishes = {
        host: sum(rank.machine.omp_threads or 0 for rank in ranks) / cores_together(ranks)
        for host, ranks in allocation.hosts.items()
    }
    host = max(wishes, key=lambda name: wishes[name])
    ranks = allocation.hosts[host]
    each, there = ranks[0].machine.omp_threads, cores_together(ranks)
    if each is None:
        return None
    found = f"OMP_NUM_THREADS={each}: {count(len(ranks), 'rank')} × {each} on {there:.3g} cores"
    if wishes[host] <= 1:
        return green(found)
    where = f"{ranks[0].machine.host}: " if allocation.spans_hosts else ""
    fitting = max(1, int(there / len(ranks)))
    return yellow(
        where + found,
        f"More threads than cores wait for each other: export OMP_NUM_THREADS={fitting}, or unset "
        "it (samestep then takes each rank's share of the cores).",
    )


def loader_workers(allocation: Allocation) -> Finding:
    """Whether each host has a core for every rank and every loader worker."""
    workers = allocation.ranks[0].num_workers
    ranks = max(allocation.hosts.values(), key=lambda ranks: len(ranks) / cores_together(ranks))
    there = cores_together(ranks)
    found = f"{count(len(ranks), 'rank')} × (1 + {workers} workers) on {there:.3g} cores"
    if len(ranks) * (1 + workers) <= there:
        return green(found)
    where = f"{ranks[0].machine.host}: " if allocation.spans_hosts else ""
    fitting = max(0, int(there / len(ranks)) - 1)
    fewer = f"Use --num-workers {fitting}" if fitting < workers else "Start fewer ranks"
    return yellow(where + found, f"{fewer}, or ask for more cores (--cpus-per-task).")


CHECKS: list[Check[Allocation]] = [
    nodes,
    device,
    threads,
    loader_workers,
    same_versions,
    same_code,
    recipe,
]


def sharing(ranks: Sequence[RankFacts]) -> list[RankFacts]:
    """Return the ranks that share a GPU with another one."""
    counts = Counter(rank.device_uuid for rank in ranks if rank.device_uuid)
    return [rank for rank in ranks if counts[rank.device_uuid] > 1]


def _kind(rank: RankFacts) -> str:
    used = [gpu.name for gpu in rank.machine.gpus if gpu.uuid == rank.device_uuid]
    return used[0] if used else rank.device.partition(":")[0]


def _odd_ones(ranks: Sequence[RankFacts], value: Callable[[RankFacts], str]) -> str:
    """Say which ranks differ from the most; nothing if none does."""
    usual = Counter(map(value, ranks)).most_common(1)[0][0]
    odd = [rank for rank in ranks if value(rank) != usual]
    if not odd:
        return ""
    return f"{value(odd[0]) or 'none'} for {_some(odd)}, {usual or 'none'} for the others"


def _some(ranks: Sequence[RankFacts]) -> str:
    if len(ranks) == 1:
        return ranks[0].label
    numbers = ", ".join(str(rank.launch.rank) for rank in ranks[:4])
    more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
    hosts = sorted({rank.machine.host for rank in ranks})
    return f"ranks {numbers}{more} on {', '.join(hosts[:3])}{' …' if len(hosts) > 3 else ''}"
