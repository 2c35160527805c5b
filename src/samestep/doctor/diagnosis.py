"""The whole examination: read the facts, meet the others if there are any, check everything."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from samestep.doctor import all_ranks, measurements, network, node, run_directory, slurm_job
from samestep.doctor.between_ranks import CutOffError, DoctorOptions, follow, lead
from samestep.doctor.facts import Allocation, AllReduce, RankFacts
from samestep.doctor.findings import Finding, merge, named, red, run_checks
from samestep.doctor.network import read_address
from samestep.doctor.shared_folder import shared_folder
from samestep.errors import UserError
from samestep.ranks.launch import OPEN_MPI, PMI, TORCHRUN, Launch, detect_launch
from samestep.ranks.world import World, find_world

SIDE_BY_SIDE = [*all_ranks.CHECKS, *network.CHECKS, measurements.clock, shared_folder]
SIDE_BY_SIDE += [measurements.compute, measurements.links, measurements.all_reduce]
"""Checks of all ranks together, in the order of the table."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found, and of whom."""

    findings: tuple[Finding, ...]
    ranks: tuple[RankFacts, ...] = ()
    all_reduce: tuple[AllReduce, ...] = ()


def diagnose(
    options: DoctorOptions, environment: Mapping[str, str] = os.environ
) -> Diagnosis | None:
    """Examine this machine, and all others with the other ranks; rank 0 returns the diagnosis.

    Raises:
        CutOffError: this rank is not rank 0 and cannot reach it, or cannot know whom to reach.
    """
    try:
        launch = detect_launch(environment)
    except UserError as error:
        return _unreadable_launch(error, environment)
    try:
        world, problem = find_world(options.device, options.backend, environment), ""
    except UserError as error:  # the rest can still be examined, on the CPU
        world = find_world("cpu", "auto", environment)
        problem = str(error).partition(". ")[0]
    me = replace(_read_rank(options, world, launch, environment), device_problem=problem)
    if launch.world_size == 1:
        return _check(Allocation(ranks=(me,)), [])
    if world.is_main:
        return _check(*lead(options, world, me))
    follow(options, world, me)
    return None


def _unreadable_launch(error: UserError, environment: Mapping[str, str]) -> Diagnosis:
    """Tell of a launcher's contradicting variables; in a line if rank 0 prints the table."""
    names = (TORCHRUN[0], OPEN_MPI[0], PMI[0], "SLURM_PROCID")
    number = next((environment[name] for name in names if environment.get(name)), "0")
    if number.isdecimal() and int(number):
        raise CutOffError(f"[rank {number}] {error}")
    what, _, advice = str(error).partition(". ")
    finding = red(what, advice or "Unset what was exported by hand, and start again.")
    return Diagnosis(findings=(named("launcher", finding),))


def _read_rank(
    options: DoctorOptions, world: World, launch: Launch, environment: Mapping[str, str]
) -> RankFacts:
    """Read the facts of this rank; those of its node are read by the first rank of the node."""
    first = launch.local_rank == 0
    machine = node.read_machine(options.recipe, environment, look_outside=first)
    folder = run_directory.read_folder(options.run_dir) if first else None
    of_run = folder.num_workers if folder else 0
    on_gpu = world.device.type == "cuda"
    return RankFacts(
        launch=launch,
        machine=machine,
        address=read_address(launch.master_addr, environment),
        folder=folder,
        slurm=slurm_job.read_slurm(environment),
        device=str(world.device),
        device_uuid=machine.gpus[world.device.index].uuid if on_gpu else "",
        elastic=bool(environment.get("TORCHELASTIC_RUN_ID")),
        num_workers=of_run if options.num_workers is None else options.num_workers,
    )


def _check(allocation: Allocation, findings: list[Finding]) -> Diagnosis:
    """Check every rank by itself, then all side by side."""
    main, *others = allocation.ranks
    if main.slurm:
        main = replace(main, job=slurm_job.read_job(main.slurm))
    tables = []
    for rank in (main, *others):
        table = run_checks(slurm_job.CHECKS, rank) + run_checks(node.CHECKS, rank.machine)
        table += run_checks(run_directory.CHECKS, rank.folder) if rank.folder else []
        tables.append((rank.label, table))
    rows = (*merge(tables), *findings, *run_checks(SIDE_BY_SIDE, allocation))
    all_reduce = allocation.measured.all_reduce if allocation.measured else ()
    return Diagnosis(findings=rows, ranks=allocation.ranks, all_reduce=all_reduce)
