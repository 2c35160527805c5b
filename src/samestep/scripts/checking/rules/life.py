"""Rules about the life of a rank: its number, the order of its collectives, how it ends."""

from collections import defaultdict
from collections.abc import Iterator

from samestep.scripts.checking.events import Event, RankSeen, Seen
from samestep.scripts.checking.findings import Found, NotSeen, rule
from samestep.scripts.checking.rules.data import uneven_batches
from samestep.scripts.checking.rules.evaluation import evaluates_alone
from samestep.scripts.checking.rules.files import named

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
_CALL = ("kind", "op", "root", "shapes", "dtype")


@rule("SS601")
def other_collectives(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find the first collective of each group that is not the same call on its ranks."""
    if seen.stall is not None and any(rank.exit_code for rank in seen.ranks):
        causes = (uneven_batches, evaluates_alone, wrong_variables)
        if any(isinstance(said, Found) for cause in causes for said in cause(seen)):
            return  # they say why
        yield Found(seen.stall.where, seen.stall.sentence, _ALIKE)
        return
    groups: dict[str, dict[int, list[Event]]] = defaultdict(dict)
    for rank in seen.ranks:
        for event in rank.of("collective"):
            groups[event["group"]].setdefault(rank.rank, []).append(event)
    for group, ranks in groups.items():
        for number, calls in enumerate(zip(*ranks.values(), strict=False), 1):
            pairs = zip(ranks, calls, strict=True)
            first, call = next(pairs)
            other = next(((r, c) for r, c in pairs if _call(c) != _call(call)), None)
            if other is not None:
                of = f" of group {group}" if group else ""
                yield Found(
                    other[1].where,
                    f"collective {number}{of}: rank {first} calls {_text(call)} at {call.where}, "
                    f"rank {other[0]} calls {_text(other[1])} at {other[1].where}",
                    _ALIKE,
                )
                break


def _call(event: Event) -> list[object]:
    return [event.get(fact) for fact in _CALL]


def _text(event: Event) -> str:
    said = [f"{event['dtype']}{event['shapes'][0]}"] if event["shapes"] else []
    said += [event["op"]] if event.get("op") else []
    said += [f"root {event['root']}"] if event.get("root") is not None else []
    return f"{event['kind']}({', '.join(said)})"


@rule("SS603")
def no_destroy(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find a group that the script itself makes and that no rank destroys."""
    begun = [event for event in seen.any("init") if event["own"]]
    if not begun:
        return
    if not seen.complete or any(rank.exit_code for rank in seen.ranks):
        yield NotSeen("the script did not come to its own end")
    elif not seen.any("destroy") and not _failures(seen):
        yield Found(
            begun[0].where,
            f"init_process_group was called on {named(rank.rank for rank in seen.ranks)}, and "
            "destroy_process_group on none",
            "Call `dist.destroy_process_group()` as the last line of the training.",
        )


@rule("SS604")
def wrong_variables(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find groups whose ranks are not 0 to N-1, and scripts that read another launcher's."""
    begun = {rank.rank: event for rank in seen.ranks if (event := rank.first("init"))}
    if any(len({event["rank"] for event in rank.of("init")}) > 1 for rank in seen.ranks):
        yield NotSeen("the script starts its ranks itself")
        return
    numbers = [(event["rank"], event["world_size"]) for event in begun.values()]
    if any(None in pair for pair in numbers):
        return  # given with the address, or by a store
    right = {(rank, seen.world_size) for rank in range(seen.world_size)}
    if set(numbers) - right or len(set(numbers)) < len(numbers):
        said = [f"process {r}: rank {e['rank']} of {e['world_size']}" for r, e in begun.items()]
        yield Found(
            _read_at(seen) or next(iter(begun.values())).where,
            f"{seen.world_size} processes were started, and init_process_group got "
            f"{'; '.join(said)}{_read_text(seen)}",
            "Read RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets, or under srun "
            "SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.",
        )
    asked = {event["name"] for event in seen.any("environment") if event["value"] is not None}
    if not begun and not asked and (where := _read_at(seen)):
        yield Found(
            where,
            f"{seen.world_size} processes were started, each with RANK and WORLD_SIZE"
            f"{_read_text(seen)}; no process group was made",
            "Read RANK and WORLD_SIZE where another launcher than srun or mpirun may start it.",
        )


def _missing(seen: Seen) -> list[Event]:
    """Return where the user's code asked for variables of a launcher that is not here."""
    read = [event for event in seen.any("environment") if event["own"]]
    return [event for event in read if event["name"] in _OTHERS and event["value"] is None]


def _read_at(seen: Seen) -> str:
    return next((event.where for event in _missing(seen)), "")


def _read_text(seen: Seen) -> str:
    names = sorted({event["name"] for event in _missing(seen)})
    return f"; the script asked for {', '.join(names)}, not set here" if names else ""


@rule("SS605", least_ranks=1)
def swallowed(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find exceptions out of the training that a rank caught, before it ended with 0."""
    if failures := _failures(seen):
        # The first to fail; those that only miss another come behind it.
        lost = "connection"
        first, error = min(
            failures, key=lambda one: (one[0].steps, lost in one[1]["text"].lower(), one[1].time)
        )
        alike = [rank.rank for rank, other in failures if other["raised"] == error["raised"]]
        yield Found(
            error["raised"],
            f"{named(alike)} ended with exit code 0 after {error['error']} ({error['text']}) in "
            f"step {first.steps + 1}",
            "Raise the exception again where it is caught (`raise`), or exit with another code "
            "than 0: `sys.exit(1)`.",
        )


@rule("SS606", least_ranks=1)
def hangs(seen: Seen) -> Iterator[Found | NotSeen]:
    """Tell who is missing where, as the stacks and the last collectives of all ranks show it."""
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
    for event in seen.ranks[0].of("collective"):
        if event.where and event["strides"] and event["kind"] in _IN_PLACE:
            yield Found(
                event.where,
                f"{_text(event)} writes into a view with gaps (strides {event['strides']})",
                "Give it `view.contiguous()`, and copy what it returns back into the view.",
            )
            return


def _failures(seen: Seen) -> list[tuple[RankSeen, Event]]:
    """Return the ranks that ended with 0 after an exception, and it, if one was a failure."""
    found = []
    for rank in seen.ranks:
        error = next(reversed(rank.of("caught")), None)
        # After one that it could do without, it trains on.
        if error is not None and rank.exit_code == 0 and rank.steps == error.step:
            found.append((rank, error))
    most = max(rank.steps for rank in seen.ranks)
    is_failure = any(error["training"] or rank.steps < most for rank, error in found)
    return found if is_failure else []
