"""Meet the other ranks, measure with them, and part: whatever goes wrong becomes a finding.

Rank 0 tells the user; only a rank that cannot reach rank 0 has to do that itself.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from samestep.doctor import measure
from samestep.doctor.bounded import call_within
from samestep.doctor.check import Finding, green, named, red, run_checks, worst
from samestep.doctor.checks import rendezvous
from samestep.doctor.checks.network import announced_address
from samestep.doctor.checks.ranks import Allocation, sharing
from samestep.doctor.facts.rank import Rank, decode, encode, share_workers
from samestep.doctor.facts.rendezvous import read_rendezvous
from samestep.doctor.measure import Measured
from samestep.doctor.rollcall import (
    Orders,
    answer,
    call_roll,
    confess,
    confessions,
    give_orders,
    noticing_sigterm,
)
from samestep.doctor.shared import NFS_WAIT_S, look_for_token
from samestep.errors import LOST_PEER, UserError
from samestep.ranks.launch import Launch
from samestep.ranks.world import Backend, Device, Store, World, join, leave, open_store

T = TypeVar("T")

_CONNECT_MARGIN_S = 2.0
_WATCHDOG_MARGIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to look at, and for how long."""

    recipe: Path | None = None
    run_dir: Path = Path("runs")
    num_workers: int | None = None
    """Loader workers per rank; those of the run if not given."""
    timeout_s: float = 30.0
    """Seconds to wait for the other ranks."""
    budget_s: float = 20.0
    """Seconds for the all-reduce."""
    device: Device = "auto"
    backend: Backend = "auto"


@dataclass(frozen=True, kw_only=True)
class Met:
    """What rank 0 learnt from meeting the others."""

    ranks: list[Rank]
    """Those that came."""
    findings: list[Finding] = field(default_factory=list)
    """Of how the meeting went."""
    measured: Measured | None = None
    """None if not all came, or they lost each other."""


class CutOffError(Exception):
    """This rank is not rank 0 and cannot reach it: nobody else can tell the user why.

    Without a message another rank tells.
    """


class _LostError(Exception):
    """The ranks lost each other; the message says at what."""


def lead(request: Request, world: World, me: Rank) -> Met:
    """Be rank 0: call the roll, measure with the others."""
    launch = me.launch
    here = run_checks(rendezvous.CHECKS, read_rendezvous(me))
    if worst(here) == "red":
        return Met(ranks=[me], findings=here)
    try:
        store = _open_store(request, launch)
    except (RuntimeError, TimeoutError) as error:
        advice = "Set MASTER_PORT to another port on every rank, and see that no firewall closes it"
        here.append(named("roll call", red(_first_line(error), f"{advice}.")))
        return Met(ranks=[me], findings=here)
    with noticing_sigterm() as ended:
        came = call_roll(store, encode(me), launch.world_size, request.timeout_s, ended)
        why = (
            "when the launcher ended this" if ended.is_set() else f"within {request.timeout_s:g} s"
        )
    found, roll = _read_roll(came, why)
    everyone = Allocation(ranks=tuple(found))
    others = [number for number, facts in enumerate(came) if facts and number]
    orders = Orders(
        # What is sure to fail is not tried: Gloo would take minutes to say so.
        join=roll.status == "green" and not _is_red(announced_address(everyone)),
        on_cpu=bool(sharing(found)) or any(r.device_uuid == "" for r in found),
        first_ranks=tuple(everyone.first_ranks),
    )
    give_orders(store, orders, others)
    here.append(named("roll call", roll))
    if not orders.join:
        return Met(ranks=found, findings=here)
    measured, connection = _measure_or_explain(request, world, me, store, orders)
    here.append(named("connection", connection))
    return Met(ranks=found, findings=here, measured=measured)


def follow(request: Request, world: World, me: Rank) -> None:
    """Be another rank: say that this one is here, and do as rank 0 orders."""
    launch = me.launch
    where = f"{launch.master_addr}:{launch.master_port}"
    for finding in run_checks(rendezvous.CHECKS, read_rendezvous(me)):
        if finding.status == "red":
            raise _cut_off(me, f"{finding.name}: {finding.found}. {finding.advice}")
    try:
        store = _open_store(request, launch)
        orders = answer(store, launch.rank, encode(me), request.timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise _cut_off(
            me,
            f"Rank 0 did not answer at {where} within {request.timeout_s:g} s: "
            f"{_first_line(error)}. Check that rank 0 was started and that no firewall closes "
            "the port between the two nodes.",
        ) from error
    if orders.join:
        _measure_or_explain(request, world, me, store, orders)


def _cut_off(me: Rank, message: str) -> CutOffError:
    # Mostly it is so for the whole node, and one line from each is enough.
    return CutOffError(f"[{me.label}] {message}" if me.launch.local_rank == 0 else "")


def _open_store(request: Request, launch: Launch) -> Store:
    """Open the store in a bounded time: PyTorch's own bound ends where anything at all listens."""
    patience_s = request.timeout_s + _CONNECT_MARGIN_S
    return call_within(patience_s, lambda: open_store(launch, request.timeout_s))


def _measure_or_explain(
    request: Request, world: World, me: Rank, store: Store, orders: Orders
) -> tuple[Measured | None, Finding]:
    """Connect, measure and disconnect; or say at which of these the ranks lost each other."""
    launch, patience_s = me.launch, request.timeout_s + request.budget_s
    if orders.on_cpu:
        world = replace(world, device=torch.device("cpu"), backend="gloo")
    # Gloo itself waits five times as long for a host that does not answer. And NCCL, once its
    # time is over, ends the process before a word is said: so it has more than any stage below.
    connect = partial(join, world, launch, patience_s + _WATCHDOG_MARGIN_S, store)
    try:
        _stage("connecting", world, request.timeout_s + _CONNECT_MARGIN_S, connect)
        measured = _measure(request, world, orders, patience_s)
        _stage("disconnecting", world, patience_s, partial(leave, world))
    except _LostError as error:
        if not world.is_main:
            with contextlib.suppress(RuntimeError):  # rank 0 may be gone
                confess(store, launch.rank, str(error))
            raise CutOffError from error
        others = range(1, launch.world_size)
        return None, _lost({0: str(error)} | confessions(store, others), launch.world_size)
    return measured, green(f"{launch.world_size} ranks by {world.backend}")


def _stage(name: str, world: World, seconds: float, function: Callable[[], T]) -> T:
    """Return a function's value, or say at which stage the ranks lost each other."""

    def on_device() -> T:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # it counts for one thread
        return function()

    try:
        return call_within(seconds, on_device)
    except (RuntimeError, UserError, TimeoutError) as error:
        raise _LostError(f"{name}: {_first_line(error)}") from error


def _lost(told: dict[int, str], world_size: int) -> Finding:
    """Find the cause in what the ranks told, and who could not even tell."""
    # Who lost contact with another rank tells of the effect.
    cause = next((rank for rank in told if not LOST_PEER.search(told[rank])), 0)
    who = f"rank {cause} " if cause else ""
    silent = [rank for rank in range(world_size) if rank not in told]
    missed = f"; {_numbers(silent)} said nothing" if silent else ""
    return red(
        f"{who}lost at {told[cause]}{missed}",
        "If the rows below are green, see whether a firewall closes ports between the nodes "
        "(Gloo and NCCL take any), whether GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an "
        "interface between them, and what NCCL_DEBUG=INFO tells; who said nothing may have been "
        "killed.",
    )


def _measure(request: Request, world: World, orders: Orders, patience_s: float) -> Measured:
    """Measure one thing after the other."""

    def stage(name: str, function: Callable[[World], T]) -> T:
        return _stage(name, world, patience_s, lambda: function(world))

    wait_s = min(NFS_WAIT_S, request.timeout_s / 2)
    clock_s = stage("comparing clocks", measure.clocks)
    unshared = stage(
        "looking for a file", lambda world: look_for_token(world, request.run_dir, wait_s)
    )
    matmul_s = stage("timing products", measure.products)
    links = [
        stage(f"timing ranks {a} and {b}", partial(measure.link, first=a, second=b))
        for a, b in measure.ring(orders.first_ranks)
    ]
    sizes, skipped = stage(
        "timing the all-reduce", lambda world: measure.all_reduce(world, request.budget_s)
    )
    return Measured(
        clock_s=clock_s,
        unshared=unshared,
        matmul_s=matmul_s,
        links=tuple(links),
        all_reduce=sizes,
        skipped_bytes=skipped,
    )


def _read_roll(came: list[bytes | None], why: str) -> tuple[list[Rank], Finding]:
    """Return the ranks that came, and the finding of who did not."""
    found: list[Rank] = []
    missing, foreign = [], []
    for number, facts in enumerate(came):
        try:
            found += [decode(facts)] if facts else []
        except msgspec.MsgspecError:
            foreign.append(number)
        if not facts:
            missing.append(number)
    if foreign:
        return found, red(
            f"{_numbers(foreign)} cannot be understood: another samestep runs there",
            "Start every rank from one environment, on a shared file system or in one image.",
        )
    if missing:
        seen = {rank.machine.host.partition(".")[0] for rank in found}
        listed = found[0].slurm.hosts if found[0].slurm else ()
        silent = [host for host in listed if host.partition(".")[0] not in seen]
        where = f" (none came from {', '.join(silent[:4])})" if silent else ""
        return found, red(
            f"{_numbers(missing)} of {len(came)} never came {why}{where}",
            "See their own messages above; check that they were started, and that their nodes "
            f"reach {found[0].launch.master_addr}:{found[0].launch.master_port}.",
        )
    return share_workers(found), green(f"all {len(came)} ranks came")


def _is_red(finding: Finding | None) -> bool:
    return finding is not None and finding.status == "red"


def _numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" …" if len(numbers) > 6 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
