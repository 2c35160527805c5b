"""Rules about how ranks live: their numbers, the order of their collectives, their end."""

from collections import defaultdict
from collections.abc import Iterator

from samestep.checking.events import Event, RankSeen, Seen
from samestep.checking.findings import Found, NotSeen, rule
from samestep.checking.rules.files import named

# Those that Slurm, Open MPI and MPICH give, and torchrun does not.
_OTHERS = ("SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_CALL = ("kind", "op", "root", "shapes", "dtype")


@rule(
    "SS601",
    "error",
    "collectives in different order or shape on the ranks",
    "The n-th collective of a rank meets the n-th of the others, whatever each meant by it: they "
    "mix up numbers, fail or wait forever.",
)
def other_collectives(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find the first collective of each group that is not the same call on its ranks."""
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
                    "Let all ranks call the same collectives in the same order, on tensors of the "
                    "same shape and type.",
                )
                break


def _call(event: Event) -> list[object]:
    return [event.get(fact) for fact in _CALL]


def _text(event: Event) -> str:
    said = [f"{event['dtype']}{event['shapes'][0]}"] if event["shapes"] else []
    said += [event["op"]] if event.get("op") else []
    said += [f"root {event['root']}"] if event.get("root") is not None else []
    return f"{event['kind']}({', '.join(said)})"


@rule(
    "SS603",
    "advice",
    "no destroy_process_group",
    "A rank that exits while others still talk to it makes them fail, and PyTorch warns of "
    "resources that leak.",
)
def no_destroy(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find a group that the script itself makes and that no rank destroys."""
    begun = [event for event in seen.any("init") if event["own"]]
    if not begun:
        return
    if not seen.complete:
        yield NotSeen("the script was ended before its own end")
    elif not seen.any("destroy") and not any(rank.exit_code for rank in seen.ranks):
        yield Found(
            begun[0].where,
            f"init_process_group was called on {named(rank.rank for rank in seen.ranks)}, and "
            "destroy_process_group on none",
            "Call `dist.destroy_process_group()` as the last line of the training.",
        )


@rule(
    "SS604",
    "error",
    "ranks read from the wrong variables",
    "Each process takes itself for another rank than its launcher started it as: several train as "
    "rank 0, or wait for ranks that do not exist.",
)
def wrong_variables(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find groups whose ranks are not 0 to N-1, and scripts that read another launcher's."""
    begun = [(rank.rank, event) for rank in seen.ranks if (event := rank.first("init"))]
    numbers = [(event["rank"], event["world_size"]) for _, event in begun]
    if begun and all(None not in pair for pair in numbers):
        right = {(rank, seen.world_size) for rank in range(seen.world_size)}
        # A rank that was ended before it began is no evidence; two that are the same one are.
        if set(numbers) - right or len(set(numbers)) < len(numbers):
            said = "; ".join(f"process {r}: rank {n} of {of}" for (r, _), (n, of) in _zip(begun))
            yield Found(
                _read_at(seen) or begun[0][1].where,
                f"{seen.world_size} processes were started, and init_process_group got {said}"
                f"{_read_text(seen)}",
                "Read RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets, or under srun "
                "SLURM_PROCID, SLURM_NTASKS and SLURM_LOCALID.",
            )
        return
    asked = {event["name"] for event in seen.any("environment") if event["value"] is not None}
    if not begun and not asked and (where := _read_at(seen)):
        yield Found(
            where,
            f"{seen.world_size} processes were started, each with RANK and WORLD_SIZE"
            f"{_read_text(seen)}; no process group was made",
            "Read RANK and WORLD_SIZE where another launcher than srun or mpirun may start it.",
        )


def _zip(begun: list[tuple[int, Event]]) -> Iterator[tuple[tuple[int, Event], tuple[int, int]]]:
    for one in begun:
        yield one, (one[1]["rank"], one[1]["world_size"])


def _missing(seen: Seen) -> list[Event]:
    """Return where the user's code asked for variables of a launcher that is not here."""
    read = [event for event in seen.any("environment") if event["own"]]
    return [event for event in read if event["name"] in _OTHERS and event["value"] is None]


def _read_at(seen: Seen) -> str:
    return next((event.where for event in _missing(seen)), "")


def _read_text(seen: Seen) -> str:
    names = sorted({event["name"] for event in _missing(seen)})
    return f"; the script asked for {', '.join(names)}, not set here" if names else ""


@rule(
    "SS605",
    "error",
    "exit code 0 after a failed rank",
    "The launcher takes the rank for finished: the others wait for it, the job counts as done, "
    "and nothing starts it again.",
    least_ranks=1,
)
def swallowed(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find exceptions out of the training that a rank caught, before it ended with 0."""
    most = max(rank.steps for rank in seen.ranks)
    failed: dict[str, list[tuple[RankSeen, Event]]] = defaultdict(list)
    for rank in seen.ranks:
        error = next(reversed(rank.of("caught")), None)
        # After one that it could do without, it trains on.
        ended = error is not None and rank.exit_code == 0 and rank.steps == error.step
        if error is not None and ended and (error["training"] or rank.steps < most):
            failed[error["raised"]].append((rank, error))
    if failed:
        # The first to fail: what others raise is that this one is gone.
        where, ranks = min(failed.items(), key=lambda one: min(r.steps for r, _ in one[1]))
        rank, error = ranks[0]
        yield Found(
            where,
            f"{named(r.rank for r, _ in ranks)} ended with exit code 0 after {error['error']} "
            f"({error['text']}) in step {error.step + 1}",
            "Raise the exception again where it is caught (`raise`), or exit with another code "
            "than 0: `sys.exit(1)`.",
        )
