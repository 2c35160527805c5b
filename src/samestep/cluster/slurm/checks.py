"""What can be seen to go wrong with a job before it is submitted: refusals, and advice."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.base.errors import UserError, did_you_mean
from samestep.base.settings import Settings
from samestep.cluster.slurm.options import JobOptions, interface_names, read_time
from samestep.cluster.slurm.queue import call, find_job

_GPUS = re.compile(r"gpu(?::[^:,(]+)*:([0-9]+)")
_IMPORT_WITHIN_S = 20.0
_MISSING = "import importlib.util as u; print(*(n for n in {names!r} if not u.find_spec(n)))"
_GIVES_CORES = re.compile(r"(?:^|\s)(-c|--cpus-per-|--exclusive)")
_GIVES_MEMORY = re.compile(r"(?:^|\s)--mem")
_GIVES_TIME = re.compile(r"(?:^|\s)(-t|--time\b)")


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The most that a partition gives to a job, on its largest node; `limit` is Slurm's text."""

    name: str
    nodes: int
    cores: int
    gpus: int
    limit: str


def check_partitions(options: JobOptions, partition: str | None) -> None:
    """Refuse what a partition, or each of several, can never give; None is for any partition."""
    # All, also hidden ones; without --exact, unlike nodes share a line with the least of each.
    text = call("sinfo", "--all", "--exact", "--noheader", "--format=%R|%D|%c|%l|%G")
    partitions = parse_partitions(text)
    names = partition.split(",") if partition else list(partitions)
    for name in names:
        if name not in partitions:
            raise UserError(
                f"This cluster has no partition {name!r}. {did_you_mean(name, partitions)}"
                f"The partitions are: {', '.join(sorted(partitions))}."
            )
    # The largest first: the user reads its refusal.
    largest_first = sorted((partitions[name] for name in names), key=lambda p: -p.nodes)
    refusals = [_refusal(options, partition) for partition in largest_first]
    if refusals and all(refusals):
        others = " No other partition allows it either." if len(refusals) > 1 else ""
        raise UserError(f"{refusals[0]}{others}")


def parse_partitions(text: str) -> dict[str, Partition]:
    """Return the partitions by name, from lines of name|nodes|cores|limit|resources."""
    rows: dict[str, list[Sequence[str]]] = {}
    for line in text.splitlines():
        name, *row = line.split("|")
        if len(row) == 4:  # with several clusters, a line names each
            rows.setdefault(name, []).append(row)
    return {
        name: Partition(
            name=name,
            nodes=sum(int(row[0]) for row in of_partition),
            cores=max(int(row[1].rstrip("+")) for row in of_partition),
            gpus=max(sum(map(int, _GPUS.findall(row[3]))) for row in of_partition),
            limit=of_partition[0][2],
        )
        for name, of_partition in rows.items()
    }


def _refusal(options: JobOptions, partition: Partition) -> str:
    """Return why a partition can never run the job; empty if it can."""
    name, cpus = partition.name, options.cpus_per_task or 1
    if options.node_range[0] > partition.nodes:  # of a range, Slurm gives what there is
        return f"--nodes {options.nodes}: partition {name} has only {partition.nodes}."
    if options.gpus_per_node > partition.gpus:
        return (
            f"--gpus-per-node {options.gpus_per_node}: sinfo says that nodes of partition {name} "
            f"have {partition.gpus or 'no'} GPUs each. Choose another --partition or fewer."
        )
    if (wanted := options.ranks_per_node * cpus) > partition.cores:
        return (
            f"{options.ranks_per_node} ranks per node × {cpus} cores = {wanted}, and the largest "
            f"node of partition {name} has {partition.cores}. Lower --ntasks-per-node or "
            "--cpus-per-task."
        )
    limit_s = read_time(partition.limit)  # None for "infinite"
    if options.time and limit_s is not None and (read_time(options.time) or 0) > limit_s:
        return f"--time {options.time}: partition {name} allows {partition.limit}."
    return ""


def check_place(options: JobOptions, kind: Literal["recipe", "script"]) -> None:
    """Check that the ranks' virtual environment or image is there and has what a recipe needs."""
    if options.venv is not None:
        venv = Path(options.venv)
        if not (venv / "bin" / "activate").is_file():
            raise UserError(f"--venv {venv}: it has no bin/activate. Pass a virtual environment.")
        if kind == "recipe" and (lacks := _lacking(venv)):
            raise UserError(
                f"--venv {venv}: {' and '.join(lacks)} cannot be imported there, so no rank would "
                f"start. Install what is missing: {venv}/bin/python -m pip install "
                f"{' '.join(lacks)}; or leave --venv out to use the environment of this command."
            )
    image = options.container
    if image and "://" in image:
        file = f"{image.rpartition('/')[2].partition(':')[0] or 'image'}.sif"
        raise UserError(
            f"--container {image}: every rank would download it at each start. Build a file once, "
            f"on a file system that all nodes share (apptainer build {file} {image}), and pass "
            f"--container {file}."
        )
    if image and not Path(image).exists():
        raise UserError(
            f"--container {image}: there is no such file. Pass the path of an Apptainer image "
            "(.sif) on a file system that this machine and all nodes share."
        )


def check_ranks(options: JobOptions, settings: Settings) -> None:
    """Check that the training is the same on every number of ranks that the job may have."""
    virtual, most = settings.virtual_ranks, options.most_ranks
    if virtual is not None and virtual < most:
        raise UserError(
            f"--virtual-ranks {virtual}: the job may have {most} ranks ({options.size}), and each "
            f"computes at least one. Use --virtual-ranks {most} or more, or request fewer nodes."
        )
    if options.has_range and virtual is None and settings.batch_size_per_rank is not None:
        raise UserError(
            f"--nodes {options.nodes}: with --batch-size-per-rank the global batch would depend on "
            "how many nodes happen to be free at the first start. Use a setting that is the same "
            "on any number of nodes: --batch-size N (equal to rounding), or --virtual-ranks "
            f"{most} or more (equal to the last bit)."
        )
    if options.elastic is not None:
        from samestep.launch.ranks.keeper import elastic_of  # noqa: PLC0415 - it imports torch

        elastic_of(options.elastic, most, settings)
    if settings.batch_size is not None and settings.batch_size < most:
        raise UserError(
            f"--batch-size {settings.batch_size}: the job may have {most} ranks ({options.size}), "
            "and each needs a sample in every step. Use a larger batch, or request fewer nodes."
        )


def check_after(options: JobOptions) -> None:
    """Check that Slurm knows the jobs that must end first: sbatch would accept any number."""
    for after in options.after:
        number = int(re.split("[:_]", after)[0])
        if find_job(number) is None:
            raise UserError(
                f"--after {after}: Slurm does not know job {number} (it forgets jobs some minutes "
                "after they end). samestep slurm status lists yours; omit --after if it has ended."
            )


def advice(
    options: JobOptions,
    kind: Literal["recipe", "script"],
    environment: Mapping[str, str] = os.environ,
    interfaces: Path = Path("/sys/class/net"),
) -> list[str]:
    """Return notes on a job that may still work, of a sentence or two each."""
    more = " ".join(options.sbatch)
    notes = []
    if options.gpus_per_node and not (options.cpus_per_task or _GIVES_CORES.search(more)):
        notes.append(
            "Without --cpus-per-task Slurm gives each rank one core, and loader workers starve. "
            "Set it to a node's cores ÷ its ranks, such as --cpus-per-task 8."
        )
    if not (options.time or _GIVES_TIME.search(more) or environment.get("SBATCH_TIMELIMIT")):
        notes.append(
            "Without --time the partition's limit applies (sinfo -o '%P %L %l' shows it), and "
            "Slurm cannot backfill the job. Set the time of one start: the job continues after it."
        )
    if options.gpus_per_node and not (options.mem or _GIVES_MEMORY.search(more)):
        notes.append(
            "Without --mem the partition's default memory applies, which may be small (scontrol "
            "show config | grep DefMem). Loader workers and checkpoints need memory too."
        )
    here = {path.name for path in interfaces.glob("*")}
    if here and (absent := [n for n in interface_names(options.interface) if n not in here]):
        notes.append(
            f"--interface {absent[0]}: this machine has no such interface, only "
            f"{', '.join(sorted(here))}. The job fails at once if its first node lacks it too."
        )
    if kind == "script" and options.venv and "torch" in _lacking(Path(options.venv)):
        notes.append(f"--venv {options.venv}: torch cannot be imported there.")
    return notes


def _lacking(venv: Path) -> list[str]:
    try:
        done = subprocess.run(
            [venv / "bin" / "python", "-c", _MISSING.format(names=("torch", "samestep"))],
            capture_output=True,
            text=True,
            check=True,
            timeout=_IMPORT_WITHIN_S,
        )
    except (OSError, subprocess.SubprocessError):
        return []  # it may be for other machines than this one
    return done.stdout.split()
