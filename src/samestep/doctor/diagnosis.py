"""The whole examination: read the facts, meet the others if there are any, check everything."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from samestep.doctor.between_ranks import CutOffError, Met, Request, follow, lead
from samestep.doctor.check import Finding, merge, named, red, run_checks
from samestep.doctor.checks import folder, machine, network, ranks, slurm
from samestep.doctor.facts.rank import Rank, read_rank
from samestep.doctor.facts.slurm import read_job
from samestep.doctor.measure import AllReduce
from samestep.errors import UserError
from samestep.ranks.launch import OPEN_MPI, PMI, TORCHRUN, detect_launch
from samestep.ranks.world import World, find_world


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was found."""

    findings: tuple[Finding, ...]
    all_reduce: tuple[AllReduce, ...] = ()
    ranks: tuple[Rank, ...] = ()


def diagnose(request: Request, environment: Mapping[str, str] = os.environ) -> Report | None:
    """Examine this machine, and all others together with the other ranks.

    Returns:
        The report on rank 0, nothing on the others.

    Raises:
        CutOffError: this rank is not rank 0 and cannot reach it, or cannot know whom to reach.
    """
    try:
        launch = detect_launch(environment)
    except UserError as error:
        return _unreadable_launch(error, environment)
    world, problem = _find_device(request, environment)
    me = read_rank(
        world,
        launch,
        run_dir=request.run_dir,
        recipe=request.recipe,
        num_workers=request.num_workers,
        device_problem=problem,
        environment=environment,
    )
    if launch.world_size == 1:
        return _report(Met(ranks=[me]))
    if world.is_main:
        return _report(lead(request, world, me))
    follow(request, world, me)
    return None


def _unreadable_launch(error: UserError, environment: Mapping[str, str]) -> Report:
    """Tell of a launcher's contradicting variables; in a line if rank 0 prints the table."""
    names = (TORCHRUN[0], OPEN_MPI[0], PMI[0], "SLURM_PROCID")
    number = next((environment[name] for name in names if environment.get(name)), "0")
    if number.isdecimal() and int(number):
        raise CutOffError(f"[rank {number}] {error}")
    what, _, advice = str(error).partition(". ")
    finding = red(what, advice or "Unset what was exported by hand, and start again.")
    return Report(findings=(named("launcher", finding),))


def _find_device(request: Request, environment: Mapping[str, str]) -> tuple[World, str]:
    """Return this rank's world; on the CPU, with the reason, where its device is not to be had."""
    try:
        return find_world(request.device, request.backend, environment)[0], ""
    except UserError as error:
        return find_world("cpu", "auto", environment)[0], str(error).partition(". ")[0]


def _report(met: Met) -> Report:
    """Check every rank by itself, then all side by side."""
    main = met.ranks[0]
    job = read_job(main.slurm) if main.slurm else None
    tables = []
    for rank in met.ranks:
        place = slurm.Place(rank=rank, job=job if rank is main else None)
        table = run_checks(slurm.CHECKS, place) + run_checks(machine.CHECKS, rank.machine)
        if rank.folder is not None:
            table += run_checks(folder.CHECKS, rank.folder)
        tables.append((rank.label, table))
    allocation = ranks.Allocation(ranks=tuple(met.ranks), measured=met.measured)
    findings = (
        *merge(tables),
        *met.findings,
        *run_checks(ranks.CHECKS, allocation),
        *run_checks(network.CHECKS, allocation),
    )
    sizes = met.measured.all_reduce if met.measured else ()
    return Report(findings=findings, all_reduce=sizes, ranks=allocation.ranks)
