"""The whole examination: read the facts, meet the other ranks, check everything, report."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from operator import attrgetter

from rich.console import Console

from samestep.base.errors import UserError, escape
from samestep.base.table import Table, text_lines
from samestep.base.words import wrapped
from samestep.cluster.doctor import (
    addresses,
    all_ranks,
    gpu_health,
    measurements,
    node,
    run_directory,
    slurm_job,
)
from samestep.cluster.doctor.between_ranks import CutOffError, follow, lead
from samestep.cluster.doctor.findings import Finding, merge, red, run_checks, size_name, worst
from samestep.cluster.doctor.rank_facts import Allocation, AllReduce, DoctorOptions, RankFacts
from samestep.launch.ranks.launch import OPEN_MPI, PMI, TORCHRUN, detect_launch
from samestep.launch.ranks.world import find_world

_COLOURS = {"green": "green", "yellow": "bold yellow", "red": "bold red"}
_STATUS_WIDTH = 8
_OF_A_RANK = (
    *("launch.rank", "launch.local_rank", "launch.node", "machine.host", "device", "device_uuid"),
    *("machine.cores", "machine.python", "machine.torch", "machine.samestep", "machine.code"),
    "address.interface",
)  # facts of each rank in the JSON object

SIDE_BY_SIDE = [
    *all_ranks.CHECKS,
    *addresses.CHECKS,
    measurements.clock,
    run_directory.shared_folder,
    *(measurements.compute, measurements.links, measurements.all_reduce),
]  # checks of all ranks together, in the order of the table


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, and on which ranks."""

    findings: tuple[Finding, ...]
    ranks: tuple[RankFacts, ...] = ()
    all_reduce: tuple[AllReduce, ...] = ()

    def as_json(self) -> str:
        """Return everything as one JSON object."""
        table = {
            "status": worst(self.findings),
            "checks": [{"name": finding.name} | asdict(finding) for finding in self.findings],
            "all_reduce": [asdict(size) for size in self.all_reduce],
            "ranks": [
                {place.split(".")[-1]: attrgetter(place)(rank) for place in _OF_A_RANK}
                | {"address": rank.address.local}
                for rank in self.ranks
            ],
        }
        return json.dumps(table, indent=2)


def diagnose(
    options: DoctorOptions, environment: Mapping[str, str] = os.environ
) -> Diagnosis | None:
    """Examine this machine, and with several ranks all others; rank 0 gets the diagnosis."""
    try:
        launch = detect_launch(environment)
    except UserError as error:  # rank 0 reports it in its table, others in one line
        names = (TORCHRUN[0], OPEN_MPI[0], PMI[0], "SLURM_PROCID")
        number = next((environment[name] for name in names if environment.get(name)), "0")
        if number.isdecimal() and int(number):
            raise CutOffError(f"[rank {number}] {error}") from error
        what, _, advice = str(error).partition(". ")
        advice = advice or "Unset the variables you exported by hand, and start again."
        return Diagnosis(findings=(red(what, advice, "launcher"),))
    try:
        world = find_world(options.device, options.backend, environment)
        problem = ""
    except UserError as error:  # examine the rest on the CPU
        world = find_world("cpu", "auto", environment)
        problem = str(error).partition(". ")[0]
    first = launch.local_rank == 0  # it also reads the facts of its node
    machine = node.read_machine(options.recipe, environment, look_outside=first)
    folder = run_directory.read_folder(options.run_dir) if first else None
    of_run = folder.num_workers if folder else 0
    own = machine.gpus[world.device.index] if world.device.type == "cuda" else None
    me = RankFacts(
        launch=launch,
        machine=machine,
        address=addresses.read_address(launch.master_addr, environment),
        folder=folder,
        slurm=slurm_job.read_slurm(environment),
        device=str(world.device),
        device_uuid=own.uuid if own else "",
        device_problem=problem,
        gpu=gpu_health.read_gpu(world.device, own.uuid, own.name) if own else None,
        elastic=bool(environment.get("TORCHELASTIC_RUN_ID")),
        num_workers=of_run if options.num_workers is None else options.num_workers,
    )
    if launch.world_size == 1:
        return _check(Allocation(ranks=(me,)), [])
    if world.is_main:
        return _check(*lead(options, world, me))
    follow(options, world, me)
    return None


def _check(allocation: Allocation, findings: list[Finding]) -> Diagnosis:
    main, *others = allocation.ranks
    if main.slurm:
        main = replace(main, job=slurm_job.read_job(main.slurm))
    tables = []
    for rank in (main, *others):
        table = run_checks(slurm_job.CHECKS, rank) + run_checks(node.CHECKS, rank.machine)
        table += run_checks(gpu_health.CHECKS, rank.gpu) if rank.gpu else []
        table += run_checks(run_directory.CHECKS, rank.folder) if rank.folder else []
        tables.append((rank.label, table))
    return Diagnosis(
        findings=(*merge(tables), *findings, *run_checks(SIDE_BY_SIDE, allocation)),
        ranks=allocation.ranks,
        all_reduce=allocation.measured.all_reduce if allocation.measured else (),
    )


def print_report(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings, the all-reduce's sizes, and one sentence."""
    for line in _finding_lines(diagnosis.findings, console.width):
        console.print(line, soft_wrap=True)
    if diagnosis.all_reduce:
        rows = [
            (size_name(size.bytes), f"{size.latency_us:,.0f}", f"{size.bus_gb_s:.4f}")
            for size in diagnosis.all_reduce
        ]
        table = Table(columns=("all-reduce", "time, µs", "bus bandwidth, GB/s"), rows=rows, gap=3)
        console.print("", *text_lines(table, console.width), sep="\n")
    status = worst(diagnosis.findings)
    names = [finding.name for finding in diagnosis.findings if finding.status == status]
    sentence = f"[{_COLOURS[status]}]{len(names)} {status}:[/] {escape(', '.join(names))}"
    if status == "green":
        sentence = f"[green]All {len(names)} checks are green.[/]"
    console.print("", sentence, sep="\n")


def _finding_lines(findings: tuple[Finding, ...], width: int) -> Iterator[str]:
    """Yield the lines of the table; paths and addresses are never cut, so they can be copied."""
    label = max(len(finding.name) for finding in findings)
    indent = " " * (_STATUS_WIDTH + label + 2)
    room = max(20, width - len(indent))
    for finding in findings:
        colour = _COLOURS[finding.status]
        first, *more = wrapped(finding.found, "", room)
        name = f"{finding.name:<{label}}  "
        status = f"[{colour}]{finding.status:<{_STATUS_WIDTH}}[/]"
        yield f"{status}[bold]{escape(name)}[/]{escape(first)}"
        yield from (indent + escape(line) for line in more)
        if finding.advice:
            first, *more = wrapped(finding.advice, "", room - 2)
            yield f"{indent}[{colour}]→[/] {escape(first)}"
            yield from (f"{indent}  {escape(line)}" for line in more)
