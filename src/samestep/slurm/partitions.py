"""Whether a cluster can ever give what a job asks for, by what sinfo says of its partitions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from samestep.errors import UserError, did_you_mean
from samestep.slurm.options import JobOptions, read_time
from samestep.slurm.programs import call

_GPUS = re.compile(r"gpu(?::[^:,(]+)*:([0-9]+)")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The most that one partition gives to a job, on its largest node; the time as Slurm has it."""

    name: str
    nodes: int
    cores: int
    gpus: int
    limit: str


def check_partitions(options: JobOptions, partition: str | None) -> None:
    """Refuse what a partition, or all of several with commas between, can never give.

    None is for any partition: then Slurm, or the site's own rules, choose.

    Raises:
        UserError: a partition is unknown, or none has nodes that are that many or that large.
    """
    # All, also hidden ones; exact, or unlike nodes are one line with the least of each number.
    text = call("sinfo", "--all", "--exact", "--noheader", "--format=%R|%D|%c|%l|%G")
    known = parse_partitions(text)
    names = partition.split(",") if partition else list(known)
    for name in names:
        if name not in known:
            raise UserError(
                f"There is no partition {name!r} here. {did_you_mean(name, known)}"
                f"The partitions are: {', '.join(sorted(known))}."
            )
    # The largest first: of several refusals its is told.
    largest = sorted((known[name] for name in names), key=lambda p: p.nodes, reverse=True)
    refusals = [_refusal(options, one) for one in largest]
    if refusals and all(refusals):
        others = " No other partition can give it either." if len(refusals) > 1 else ""
        raise UserError(f"{refusals[0]}{others}")


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions by name, from lines of name|nodes|cores|limit|resources."""
    rows: dict[str, list[Sequence[str]]] = {}
    for line in text.splitlines():
        name, *row = line.split("|")
        if len(row) == 4:  # of several clusters, a line names each
            rows.setdefault(name, []).append(row)
    return {
        name: Partition(
            name=name,
            nodes=sum(int(row[0]) for row in mine),
            cores=max(int(row[1].rstrip("+")) for row in mine),
            gpus=max(sum(map(int, _GPUS.findall(row[3]))) for row in mine),
            limit=mine[0][2],
        )
        for name, mine in rows.items()
    }


def _refusal(options: JobOptions, partition: Partition) -> str:
    """Return why a partition can never run the job; empty if it can."""
    name, cpus = partition.name, options.cpus_per_task or 1
    if options.fewest_nodes > partition.nodes:  # of a range Slurm gives what there is
        return f"--nodes {options.nodes}: partition {name} has {partition.nodes} in all."
    if options.gpus_per_node > partition.gpus:
        return (
            f"--gpus-per-node {options.gpus_per_node}: sinfo says that nodes of partition {name} "
            f"have {partition.gpus or 'no'} GPUs each. Choose another --partition or fewer."
        )
    if (wanted := options.ranks_per_node * cpus) > partition.cores:
        return (
            f"{options.ranks_per_node} ranks a node × {cpus} cores = {wanted} cores, and the "
            f"largest node of partition {name} has {partition.cores}. Lower --ntasks-per-node or "
            "--cpus-per-task."
        )
    limit_s = read_time(partition.limit)  # none for "infinite"
    if options.time and limit_s is not None and (read_time(options.time) or 0) > limit_s:
        return f"--time {options.time}: partition {name} allows {partition.limit}."
    return ""
