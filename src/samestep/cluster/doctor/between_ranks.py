"""Meet the other ranks at rank 0's store, then measure with them.

A collective would hang if a rank is missing. So each rank first leaves its facts in the store
behind the master address; rank 0 collects them until the timeout and tells the ranks that came
whether to connect. Every failure becomes a finding of rank 0; only a rank that cannot reach rank
0 prints its own message.
"""

import contextlib
import datetime as dt
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
import torch

from samestep.base.errors import LOST_PEER, UserError
from samestep.cluster.doctor import measurements
from samestep.cluster.doctor.addresses import MEETING_CHECKS, announced_address
from samestep.cluster.doctor.all_ranks import ONE_ENVIRONMENT, sharing
from samestep.cluster.doctor.findings import Finding, green, red, run_checks, worst
from samestep.cluster.doctor.rank_facts import (
    Allocation,
    DoctorOptions,
    Measurements,
    RankFacts,
    call_within,
)
from samestep.cluster.doctor.run_directory import NFS_WAIT_S, find_shared_file
from samestep.launch.ranks.launch import Launch
from samestep.launch.ranks.world import Store, World, join, leave, open_store

T = TypeVar("T")
_CONNECT_MARGIN_S, _WATCHDOG_MARGIN_S = 2.0, 60.0
_ORDERS_MARGIN_S = 15.0
_FAREWELL_S = 3.0
_POLL_EVERY_S = 0.05


class Orders(msgspec.Struct, frozen=True):
    """What rank 0 tells the others after the roll call."""

    join: bool
    on_cpu: bool  # whether to connect by Gloo on the CPU, since not every rank has a GPU of its own
    first_ranks: tuple[int, ...]


class CutOffError(Exception):
    """This rank cannot reach rank 0. The message is empty if another rank prints it."""


class _LostError(Exception):
    """The ranks lost each other; the message names the stage."""


def lead(options: DoctorOptions, world: World, me: RankFacts) -> tuple[Allocation, list[Finding]]:
    """As rank 0, call the roll and measure with the others; return who came, and findings."""
    alone, findings = Allocation(ranks=(me,)), run_checks(MEETING_CHECKS, me)
    if worst(findings) == "red":
        return alone, findings
    try:
        store = _open_store(options, me.launch)
    except (RuntimeError, TimeoutError) as error:
        advice = "Set MASTER_PORT to another port on every rank, one that no firewall blocks."
        return alone, [*findings, red(_first_line(error), advice, "roll call")]
    ended = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        others = range(1, me.launch.world_size)
        facts_of = wait_for_all(store, "rank", others, options.timeout_s, ended)
    finally:
        signal.signal(signal.SIGTERM, previous)
    received = [msgspec.json.encode(me), *facts_of.values()]
    why = "when the launcher ended this" if ended.is_set() else f"within {options.timeout_s:g} s"
    ranks, roll = _read_roll(received, why)
    allocation = Allocation(ranks=ranks)
    announced = announced_address(allocation)
    orders = Orders(
        # Do not try what is sure to fail: Gloo would take minutes to say so.
        join=roll.status == "green" and not (announced and announced.status == "red"),
        on_cpu=bool(sharing(ranks)) or any(rank.device_uuid == "" for rank in ranks),
        first_ranks=allocation.first_ranks,
    )
    store.set("orders", msgspec.json.encode(orders).decode())
    # Wait until the others have read them: the store may end with this process.
    wait_for_all(store, "read", [n for n, facts in enumerate(received) if n and facts])
    findings.append(roll)
    if orders.join:
        measured, connection = _measure_or_explain(options, world, store, orders)
        findings.append(connection)
        allocation = replace(allocation, measured=measured)
    return allocation, findings


def follow(options: DoctorOptions, world: World, me: RankFacts) -> None:
    """As any other rank, send the facts to rank 0 and do what it orders."""
    launch = me.launch
    try:
        if red_one := next((f for f in run_checks(MEETING_CHECKS, me) if f.status == "red"), None):
            raise CutOffError(f"{red_one.name}: {red_one.found}. {red_one.advice}")
        store = _open_store(options, launch)
        orders = announce(store, launch.rank, msgspec.json.encode(me), options.timeout_s)
    except (CutOffError, RuntimeError, TimeoutError) as error:
        why = str(error)
        if not isinstance(error, CutOffError):
            why = (
                f"Rank 0 did not answer at {launch.master_addr}:{launch.master_port} within "
                f"{options.timeout_s:g} s: {_first_line(error)}. Check that rank 0 was started and "
                "that no firewall closes the port between the two nodes."
            )
        # Usually the whole node is cut off, and one message from it is enough.
        raise CutOffError(f"[{me.label}] {why}" if launch.local_rank == 0 else "") from error
    if orders.join:
        _measure_or_explain(options, world, store, orders)


def announce(store: Store, rank: int, facts: bytes, timeout_s: float) -> Orders:
    """Leave this rank's facts in the store; wait for rank 0's orders."""
    store.set(f"rank/{rank}", facts.decode())
    store.wait(["orders"], dt.timedelta(seconds=timeout_s + _ORDERS_MARGIN_S))
    orders = msgspec.json.decode(store.get("orders"), type=Orders)
    store.set(f"read/{rank}", "1")
    return orders


def _open_store(options: DoctorOptions, launch: Launch) -> Store:
    # PyTorch's own timeout does not help if some other program listens at the port.
    patience_s = options.timeout_s + _CONNECT_MARGIN_S
    return call_within(patience_s, lambda: open_store(launch, options.timeout_s))


def wait_for_all(
    store: Store,
    stage: str,
    ranks: Sequence[int],
    timeout_s: float = _FAREWELL_S,
    ended: threading.Event | None = None,
) -> dict[int, bytes | None]:
    """Poll for `WHAT/RANK` of each rank: while PyTorch's store waits, no signal is handled."""
    deadline, ended = time.monotonic() + timeout_s, ended or threading.Event()
    values: dict[int, bytes | None] = {}
    for rank in ranks:
        key = f"{stage}/{rank}"
        while not (is_there := store.check([key])):
            if time.monotonic() > deadline or ended.wait(_POLL_EVERY_S):
                break
        values[rank] = bytes(store.get(key)) if is_there else None
    return values


def _measure_or_explain(
    options: DoctorOptions, world: World, store: Store, orders: Orders
) -> tuple[Measurements | None, Finding]:
    """Connect, measure and disconnect; or say in which stage the ranks lost each other."""
    patience_s = options.timeout_s + options.budget_s
    if orders.on_cpu:
        world = replace(world, device=torch.device("cpu"), backend="gloo")
    # Gloo waits five times as long for a host that does not answer. NCCL kills the process once
    # its own timeout is over, so that has to be longer than any stage here.
    connect = partial(join, world, patience_s + _WATCHDOG_MARGIN_S, store)
    try:
        _stage("connecting", world, options.timeout_s + _CONNECT_MARGIN_S, connect)
        measured = _measure(options, world, orders.first_ranks, patience_s)
        _stage("disconnecting", world, patience_s, partial(leave, world))
    except _LostError as error:
        if not world.is_main:
            with contextlib.suppress(RuntimeError):  # rank 0 may be gone
                store.set(f"failed/{world.rank}", str(error))
            raise CutOffError from error
        others = wait_for_all(store, "failed", range(1, world.world_size))
        failures = {rank: why.decode() for rank, why in others.items() if why is not None}
        return None, _lost({0: str(error)} | failures, world.world_size)
    return measured, green(f"{world.world_size} ranks by {world.backend}", name="connection")


def _measure(
    options: DoctorOptions, world: World, first_ranks: tuple[int, ...], patience_s: float
) -> Measurements:
    def stage(name: str, function: Callable[..., T], *arguments: object) -> T:
        return _stage(name, world, patience_s, partial(function, world, *arguments))

    wait_s = min(NFS_WAIT_S, options.timeout_s / 2)
    return Measurements(  # one after the other, on all ranks in this order
        clock_s=stage("comparing clocks", measurements.measure_clocks),
        unshared=stage("looking for a file", find_shared_file, options.run_dir, wait_s),
        matmul_s=stage("timing products", measurements.time_products),
        links=tuple(
            stage(f"timing ranks {a} and {b}", measurements.measure_link, a, b)
            for a, b in measurements.ring(first_ranks)
        ),
        all_reduce=stage("timing all-reduce", measurements.time_all_reduce, options.budget_s),
    )


def _stage(name: str, world: World, seconds: float, function: Callable[[], T]) -> T:
    def on_device() -> T:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # it is set per thread
        return function()

    try:
        return call_within(seconds, on_device)
    except (RuntimeError, UserError, TimeoutError) as error:
        raise _LostError(f"{name}: {_first_line(error)}") from error


def _lost(failures: dict[int, str], world_size: int) -> Finding:
    # A rank that lost contact with another reports the effect, not the cause.
    cause = next((rank for rank, why in failures.items() if not LOST_PEER.search(why)), 0)
    who = f"rank {cause} " if cause else ""
    silent = [rank for rank in range(world_size) if rank not in failures]
    missed = f"; {_numbers(silent)} sent nothing" if silent else ""
    return red(
        f"{who}lost at {failures[cause]}{missed}",
        "If the rows below are green, check whether a firewall blocks ports between the nodes "
        "(Gloo and NCCL use any), whether GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an "
        "interface between them, and what NCCL_DEBUG=INFO prints; silent ranks may have been "
        "killed.",
        "connection",
    )


def _read_roll(received: list[bytes | None], why: str) -> tuple[tuple[RankFacts, ...], Finding]:
    ranks: list[RankFacts] = []
    foreign = []
    missing = [number for number, facts in enumerate(received) if not facts]
    for number, facts in enumerate(received):
        try:
            ranks += [msgspec.json.decode(facts, type=RankFacts)] if facts else []
        except msgspec.MsgspecError:
            foreign.append(number)
    if foreign:
        problem = f"{_numbers(foreign)} cannot be understood: a different samestep runs there"
        return tuple(ranks), red(problem, ONE_ENVIRONMENT, "roll call")
    main = ranks[0]
    if missing:
        hosts = {rank.machine.host.partition(".")[0] for rank in ranks}
        listed = main.slurm.hosts if main.slurm else ()
        silent = [host for host in listed if host.partition(".")[0] not in hosts]
        where = f" (none came from {', '.join(silent[:4])})" if silent else ""
        return tuple(ranks), red(
            f"{_numbers(missing)} of {len(received)} never came {why}{where}",
            "See their messages above; check that they were started, and that their nodes can "
            f"reach {main.launch.master_addr}:{main.launch.master_port}.",
            "roll call",
            hosts=tuple(silent),
        )
    # Rank 0 knows the number of workers from the run's settings.
    same = tuple(replace(rank, num_workers=main.num_workers) for rank in ranks)
    return same, green(f"all {len(received)} ranks came", name="roll call")


def _numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" …" if len(numbers) > 6 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
