"""Rules about the life of a rank: its number, the order of its collectives, how it ends."""

import signal
from collections import defaultdict
from collections.abc import Iterator

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, rule
from samestep.scripts.checking.rules.data import uneven_batches
from samestep.scripts.checking.rules.evaluation import evaluates_alone
from samestep.scripts.checking.rules.files import named
from samestep.scripts.checking.seen import RankSeen, Seen

# Those that Slurm, Open MPI and MPICH give, and torchrun does not.
_OTHERS = ("SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_ALIKE = (
    "Let all ranks call the same collectives in the same order, on tensors of the same shape and "
    "type."
)
_ARRIVE = (
    "Every rank has to reach the call that the others wait in: give all ranks equally many "
    "batches, and put no collective under a condition on the rank."
)
_IN_PLACE = ("all_reduce", "broadcast", "reduce")


@rule("SS601")
def other_collectives(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find the first collective of each group that is not the same call on its ranks."""
    if seen.stall is not None and any(rank.exit_code for rank in seen.ranks):
        causes = (uneven_batches, evaluates_alone, wrong_variables)
        if any(isinstance(result, Found) for cause in causes for result in cause(seen)):
            return  # they say why
        if any(rank.exit_code == -signal.SIGSEGV for rank in seen.ranks):
            return  # no collective did that
        yield Found(seen.stall.where, seen.stall.sentence, _ALIKE)
        return
    groups: dict[str, dict[int, list[ev.CollectiveCalled]]] = defaultdict(dict)
    for rank in seen.ranks:
        for event in rank.of(ev.CollectiveCalled):
            groups[event.group].setdefault(rank.rank, []).append(event)
    for group, ranks in groups.items():
        for number, calls in enumerate(zip(*ranks.values(), strict=False), 1):
            pairs = zip(ranks, calls, strict=True)
            first, call = next(pairs)
            other = next(((r, c) for r, c in pairs if _call(c) != _call(call)), None)
            if other is not None:
                of = f" of group {group}" if group else ""
                text = f"collective {number}{of}: rank {first} calls {_text(call)} at "
                text += f"{call.where}, rank {other[0]} calls {_text(other[1])} at {other[1].where}"
                yield Found(other[1].where, text, _ALIKE)
                break


def _call(event: ev.CollectiveCalled) -> tuple[object, ...]:
    """Return the properties of a collective that must be the same on all ranks."""
    return event.name, event.op, event.root, event.shapes, event.dtype


def _text(event: ev.CollectiveCalled) -> str:
    arguments = [f"{event.dtype}{event.shapes[0]}"] if event.shapes else []
    arguments += [event.op] if event.op else []
    arguments += [f"root {event.root}"] if event.root is not None else []
    return f"{event.name}({', '.join(arguments)})"


@rule("SS603")
def no_destroy(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find a group that the script itself makes and that no rank destroys."""
    begun = [event for event in seen.any(ev.GroupMade) if event.own]
    if not begun:
        return
    if not seen.complete or any(rank.exit_code for rank in seen.ranks):
        yield NotSeen("the script did not come to its own end")
    elif not seen.any(ev.GroupDestroyed) and not _failures(seen):
        text = f"init_process_group was called on {named(rank.rank for rank in seen.ranks)}, and "
        text += "destroy_process_group on none"
        remedy = "Call `dist.destroy_process_group()` as the last line of the training."
        yield Found(begun[0].where, text, remedy)


@rule("SS604")
def wrong_variables(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find groups whose ranks are not 0 to N-1, and scripts that read another launcher's."""
    begun = {rank.rank: event for rank in seen.ranks if (event := rank.first(ev.GroupMade))}
    if any(len({event.rank for event in rank.of(ev.GroupMade)}) > 1 for rank in seen.ranks):
        yield NotSeen("the script starts its ranks itself")
        return
    numbers = [(event.rank, event.world_size) for event in begun.values()]
    if any(None in pair for pair in numbers):
        return  # given with the address, or by a store
    read = (event for event in seen.any(ev.VariableRead) if event.own and event.name in _OTHERS)
    missing = [event for event in read if event.value is None]
    names = ", ".join(sorted({event.name for event in missing}))
    asks = f"; the script asked for {names}, not set here" if names else ""
    right = {(rank, seen.world_size) for rank in range(seen.world_size)}
    if set(numbers) - right or len(set(numbers)) < len(numbers):
        got = [f"process {r}: rank {e.rank} of {e.world_size}" for r, e in begun.items()]
        text = f"{seen.world_size} processes were started, and init_process_group got "
        text += f"{'; '.join(got)}{asks}"
        remedy = "Read RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets, or under srun "
        remedy += "SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID."
        yield Found(next(event.where for event in (*missing, *begun.values())), text, remedy)
    is_launched = any(event.value is not None for event in seen.any(ev.VariableRead))
    if missing and not begun and not is_launched:
        text = f"{seen.world_size} processes were started, each with RANK and WORLD_SIZE{asks}; no "
        text += "process group was made"
        remedy = "Read RANK and WORLD_SIZE where another launcher than srun or mpirun may start it."
        yield Found(missing[0].where, text, remedy)


@rule("SS605", least_ranks=1)
def swallowed(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find exceptions out of the training that a rank caught, before it ended with 0."""
    if failures := _failures(seen):
        # The first to fail; those that only miss another come behind it.
        first, error = min(
            failures,
            key=lambda failure: (
                failure[0].steps,
                "connection" in failure[1].text.lower(),
                failure[1].time,
            ),
        )
        same = [rank.rank for rank, other in failures if other.raised == error.raised]
        text = f"{named(same)} ended with exit code 0 after {error.error} ({error.text}) in step "
        text += f"{first.steps + 1}"
        remedy = "Raise the exception again where it is caught (`raise`), or exit with another "
        remedy += "code than 0: `sys.exit(1)`."
        yield Found(error.raised, text, remedy)


@rule("SS606", least_ranks=1)
def hangs(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find the ranks missing in a collective, by all ranks' stacks and last collectives."""
    if seen.stall is None or any(rank.exit_code for rank in seen.ranks):
        return
    if seen.stall.gone and not any(rank.steps for rank in seen.ranks):
        # A script that starts its ranks ends them itself where one of them fails.
        yield NotSeen("why a rank ended before the first step")
    else:
        remedy = _ARRIVE if seen.world_size > 1 else ""
        yield Found(seen.stall.where, seen.stall.sentence, remedy)


@rule("SS607")
def collective_with_gaps(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find a collective that writes into a view whose elements do not lie side by side."""
    for event in seen.ranks[0].of(ev.CollectiveCalled):
        if event.where and event.strides and event.name in _IN_PLACE:
            text = f"{_text(event)} writes into a view with gaps (strides {event.strides})"
            remedy = "Give it `view.contiguous()`, and copy what it returns back into the view."
            yield Found(event.where, text, remedy)
            return


def _failures(seen: Seen) -> list[tuple[RankSeen, ev.ErrorCaught]]:
    """Return the ranks that ended with 0 after an exception, and it, if one was a failure."""
    # After an error that it could do without, a rank trains on.
    failures = [
        (rank, error)
        for rank in seen.ranks
        for error in rank.of(ev.ErrorCaught)[-1:]
        if rank.exit_code == 0 and rank.steps == error.step
    ]
    most = max(rank.steps for rank in seen.ranks)
    is_failure = any(error.training or rank.steps < most for rank, error in failures)
    return failures if is_failure else []
