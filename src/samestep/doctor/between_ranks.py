"""Meet the other ranks, measure with them, and part: whatever goes wrong becomes a finding.

Rank 0 tells the user; only a rank that cannot reach rank 0 has to do that itself.
"""

import contextlib
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from tyro.conf import Positional, arg

from samestep.doctor import measurements, rendezvous, roll_call
from samestep.doctor.all_ranks import sharing
from samestep.doctor.facts import Allocation, Measurements, RankFacts
from samestep.doctor.findings import Finding, green, named, red, run_checks, worst
from samestep.doctor.network import announced_address
from samestep.doctor.shared_folder import NFS_WAIT_S, look_for_token
from samestep.doctor.timeouts import call_within
from samestep.errors import LOST_PEER, UserError
from samestep.ranks.launch import Launch
from samestep.ranks.world import Backend, Device, Store, World, join, leave, open_store

T = TypeVar("T")
_CONNECT_MARGIN_S, _WATCHDOG_MARGIN_S = 2.0, 60.0


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What to look at, and for how long."""

    recipe: Annotated[Positional[Path | None], arg(metavar="[RECIPE.py]")] = None
    """A recipe file, which must be the same for every rank."""
    run_dir: Annotated[Path, arg(metavar="DIR")] = Path("runs")
    """Where runs will be written; the directory of a run gives its checkpoints' size and more."""
    num_workers: int | None = None
    """Loader workers per rank in training; by default the run's, or 0."""
    timeout_s: float = 30.0
    """Seconds to wait for the other ranks."""
    budget_s: float = 20.0
    """Seconds that the all-reduce's measurements may take."""
    device: Device = "auto"
    """Where training will be; auto takes the best device here."""
    backend: Backend = "auto"
    """What connects the ranks; auto chooses by platform and device."""


class CutOffError(Exception):
    """This rank cannot reach rank 0, and tells why; without a message another rank does."""


class _LostError(Exception):
    """The ranks lost each other; the message says at what."""


def lead(options: DoctorOptions, world: World, me: RankFacts) -> tuple[Allocation, list[Finding]]:
    """Be rank 0: call the roll, measure with the others; return who came and how that went."""
    alone = Allocation(ranks=(me,))
    findings = run_checks(rendezvous.CHECKS, me)
    if worst(findings) == "red":
        return alone, findings
    try:
        store = _open_store(options, me.launch)
    except (RuntimeError, TimeoutError) as error:
        advice = "Set MASTER_PORT to another port on every rank, and see that no firewall closes it"
        return alone, [*findings, named("roll call", red(_first_line(error), f"{advice}."))]
    ended = threading.Event()  # the launcher asks this process to end
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        mine = msgspec.json.encode(me)
        received = roll_call.collect_facts(
            store, mine, me.launch.world_size, options.timeout_s, ended
        )
    finally:
        signal.signal(signal.SIGTERM, previous)
    waited = f"within {options.timeout_s:g} s"
    ranks, roll = _read_roll(received, "when the launcher ended this" if ended.is_set() else waited)
    came = Allocation(ranks=ranks)
    announced = announced_address(came)
    instructions = roll_call.Instructions(
        # What is sure to fail is not tried: Gloo would take minutes to say so.
        join=roll.status == "green" and not (announced and announced.status == "red"),
        on_cpu=bool(sharing(ranks)) or any(rank.device_uuid == "" for rank in ranks),
        first_ranks=came.first_ranks,
    )
    roll_call.instruct(store, instructions, [n for n, facts in enumerate(received) if facts and n])
    findings.append(named("roll call", roll))
    if instructions.join:
        measured, connection = _measure_or_explain(options, world, store, instructions)
        findings.append(named("connection", connection))
        came = replace(came, measured=measured)
    return came, findings


def follow(options: DoctorOptions, world: World, me: RankFacts) -> None:
    """Be another rank: say that this one is here, and do as rank 0 says."""
    launch = me.launch
    for finding in run_checks(rendezvous.CHECKS, me):
        if finding.status == "red":
            raise _cut_off(me, f"{finding.name}: {finding.found}. {finding.advice}")
    try:
        store = _open_store(options, launch)
        mine = msgspec.json.encode(me)
        instructions = roll_call.announce(store, launch.rank, mine, options.timeout_s)
    except (RuntimeError, TimeoutError) as error:
        where = f"{launch.master_addr}:{launch.master_port} within {options.timeout_s:g} s"
        message = (
            f"Rank 0 did not answer at {where}: {_first_line(error)}. Check that rank 0 was "
            "started and that no firewall closes the port between the two nodes."
        )
        raise _cut_off(me, message) from error
    if instructions.join:
        _measure_or_explain(options, world, store, instructions)


def _cut_off(me: RankFacts, message: str) -> CutOffError:
    # Mostly it is so for the whole node, and one line from each is enough.
    return CutOffError(f"[{me.label}] {message}" if me.launch.local_rank == 0 else "")


def _open_store(options: DoctorOptions, launch: Launch) -> Store:
    # PyTorch's own bound of time ends where anything at all listens.
    patience_s = options.timeout_s + _CONNECT_MARGIN_S
    return call_within(patience_s, lambda: open_store(launch, options.timeout_s))


def _measure_or_explain(
    options: DoctorOptions, world: World, store: Store, instructions: roll_call.Instructions
) -> tuple[Measurements | None, Finding]:
    """Connect, measure and disconnect; or say at which of these the ranks lost each other."""
    patience_s = options.timeout_s + options.budget_s
    if instructions.on_cpu:
        world = replace(world, device=torch.device("cpu"), backend="gloo")
    # Gloo itself waits five times as long for a host that does not answer. And NCCL, once its
    # time is over, ends the process before a word is said: so it has more than any stage below.
    connect = partial(join, world, patience_s + _WATCHDOG_MARGIN_S, store)
    try:
        _stage("connecting", world, options.timeout_s + _CONNECT_MARGIN_S, connect)
        measured = _measure(options, world, instructions.first_ranks, patience_s)
        _stage("disconnecting", world, patience_s, partial(leave, world))
    except _LostError as error:
        if not world.is_main:
            with contextlib.suppress(RuntimeError):  # rank 0 may be gone
                store.set(f"failed/{world.rank}", str(error))
            raise CutOffError from error
        failures = {0: str(error)} | roll_call.read_failures(store, world.world_size)
        return None, _lost(failures, world.world_size)
    return measured, green(f"{world.world_size} ranks by {world.backend}")


def _stage(name: str, world: World, seconds: float, function: Callable[[], T]) -> T:
    def on_device() -> T:
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)  # it counts for one thread
        return function()

    try:
        return call_within(seconds, on_device)
    except (RuntimeError, UserError, TimeoutError) as error:
        raise _LostError(f"{name}: {_first_line(error)}") from error


def _lost(failures: dict[int, str], world_size: int) -> Finding:
    # Who lost contact with another rank tells of the effect.
    cause = next((rank for rank, why in failures.items() if not LOST_PEER.search(why)), 0)
    who = f"rank {cause} " if cause else ""
    silent = [rank for rank in range(world_size) if rank not in failures]
    missed = f"; {_numbers(silent)} said nothing" if silent else ""
    return red(
        f"{who}lost at {failures[cause]}{missed}",
        "If the rows below are green, see whether a firewall closes ports between the nodes "
        "(Gloo and NCCL take any), whether GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name an "
        "interface between them, and what NCCL_DEBUG=INFO tells; who said nothing may have been "
        "killed.",
    )


def _measure(
    options: DoctorOptions, world: World, first_ranks: tuple[int, ...], patience_s: float
) -> Measurements:
    def stage(name: str, function: Callable[..., T], *arguments: object) -> T:
        return _stage(name, world, patience_s, partial(function, world, *arguments))

    wait_s = min(NFS_WAIT_S, options.timeout_s / 2)
    time_all_reduce = measurements.time_all_reduce
    return Measurements(  # one after the other, on all ranks in this order
        clock_s=stage("comparing clocks", measurements.measure_clocks),
        unshared=stage("looking for a file", look_for_token, options.run_dir, wait_s),
        matmul_s=stage("timing products", measurements.time_products),
        links=tuple(
            stage(f"timing ranks {a} and {b}", measurements.measure_link, a, b)
            for a, b in measurements.ring(first_ranks)
        ),
        all_reduce=stage("timing the all-reduce", time_all_reduce, options.budget_s),
    )


def _read_roll(received: list[bytes | None], why: str) -> tuple[tuple[RankFacts, ...], Finding]:
    found: list[RankFacts] = []
    foreign = []
    missing = [number for number, facts in enumerate(received) if not facts]
    for number, facts in enumerate(received):
        try:
            found += [msgspec.json.decode(facts, type=RankFacts)] if facts else []
        except msgspec.MsgspecError:
            foreign.append(number)
    if foreign:
        advice = "Start every rank from one environment, on a shared file system or in one image."
        what = f"{_numbers(foreign)} cannot be understood: another samestep runs there"
        return tuple(found), red(what, advice)
    if missing:
        seen = {rank.machine.host.partition(".")[0] for rank in found}
        listed = found[0].slurm.hosts if found[0].slurm else ()
        silent = [host for host in listed if host.partition(".")[0] not in seen]
        where = f" (none came from {', '.join(silent[:4])})" if silent else ""
        return tuple(found), red(
            f"{_numbers(missing)} of {len(received)} never came {why}{where}",
            "See their own messages above; check that they were started, and that their nodes "
            f"reach {found[0].launch.master_addr}:{found[0].launch.master_port}.",
        )
    # Rank 0 knows the number of workers from the run's settings.
    ranks = tuple(replace(rank, num_workers=found[0].num_workers) for rank in found)
    return ranks, green(f"all {len(received)} ranks came")


def _numbers(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:6])) + (" …" if len(numbers) > 6 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")[:200]
