"""Rules about evaluation: whose samples a number is of, who takes part, in which mode."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from samestep.scripts.checking.events import Event, RankSeen, Seen
from samestep.scripts.checking.findings import Found, NotSeen, rule

_JOINING = ("all_reduce", "reduce", "all_gather", "gather", "all_to_all", "reduce_scatter")
_IN_A_ROW = 2
_EXACT = 1e-5


@dataclass(frozen=True)
class _Evaluation:
    """What one rank did from its first forward pass without training to its next with it."""

    step: int
    forwards: list[Event] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    """All that came from the first forward pass on."""

    def until_joined(self) -> list[Event]:
        """Return the events before the first collective that could join numbers."""
        for number, event in enumerate(self.events):
            if event.kind == "collective" and str(event["kind"]).startswith(_JOINING):
                # What a library counts, to end an epoch on all ranks, is noted right after it.
                reduced = next(iter(self.events[number + 1 : number + 2]), None)
                if reduced is None or reduced.kind != "reduced" or reduced["metric"]:
                    return self.events[:number]
        return self.events


@rule("SS401")
def shows_one_shard(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a number that is shown after an evaluation of shards that nothing joined."""
    if (alone := _alone_on_a_shard(seen)) is not None:
        yield alone
        return
    if not any(evaluations(seen, rank) for rank in seen.ranks):
        yield NotSeen("no evaluation was seen")
    for parts in _pairs(seen):
        joined = any(part.until_joined() is not part.events for part in parts)
        if joined or not _are_shards(seen, parts):
            continue
        read = [next((e for e in reversed(p.events) if e.kind == "item"), None) for p in parts]
        told = [
            [e for e in part.events if e.kind == "report" and not e["labelled"]] for part in parts
        ]
        if not any(read):
            continue
        shown = next((events[-1] for events in told if events), None)
        if shown is None and any(e.kind == "report" for part in parts for e in part.events):
            continue  # each with its rank next to it
        event = shown or next(event for event in read if event is not None)
        verb = "shown" if shown is not None else "read"
        yield Found(
            event.where,
            f"after step {parts[0].step} {_counted(parts)}; no collective joined anything before "
            f"a number was {verb} here"
            + (f": {', '.join(shown['numbers'])}" if shown is not None else ""),
            "All-reduce the sum and the count on every rank, then divide once.",
            None if shown is not None else "advice",
        )
        return


@rule("SS402")
def averages_means(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a reduced number that becomes the plain mean over ranks with unequal counts."""
    yield from _divides_counts(seen)
    for parts in _pairs(seen):
        reduced = [list(_with_samples(part)) for part in parts]
        # A count that is reduced too is what the sum is then divided by.
        known = {float(count) for events in reduced for _, count in events}
        if any(v in known for events in reduced for e, _ in events for v in e["values"]):
            continue
        columns = (
            ([event for event, _ in events], [count for _, count in events], column)
            for events in zip(*reduced, strict=False)
            for column in zip(*(event["values"] for event, _ in events), strict=False)
        )
        for events, counts, values in columns:
            mean = sum(values) / len(values)
            plain = all(value.is_integer() for value in values)  # counts of right answers
            if plain or len(set(values)) == 1 or len(set(counts)) == 1:
                continue
            if events[0]["op"] == "AVG" or _is_told(mean, parts):
                numbers = " and ".join(f"{value:.4g}" for value in values)
                samples = " and ".join(map(str, counts))
                whole = sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)
                yield Found(
                    events[0].where,
                    f"{numbers} of {samples} samples became {mean:.4g}, where all samples "
                    f"together have {whole:.4g}",
                    "Reduce the sum and the count on every rank, then divide once.",
                )
                return


def _divides_counts(seen: Seen) -> Iterator[Found]:
    """Yield a mean that was read, whose count was cut to a whole number of samples per rank."""
    read = [event["value"] for event in seen.ranks[0].of("item")]
    for sums, counts in pairwise(seen.together("reduced")):
        values = [value for event in sums for value in event["values"]]
        numbers = [number for event in counts for number in event["values"]]
        total, ranks = sum(numbers), seen.world_size
        if len(values) != ranks or len(numbers) != ranks or not total % ranks or total < ranks:
            continue
        if all(map(float.is_integer, values)) or not all(map(float.is_integer, numbers)):
            continue
        right, wrong = sum(values) / total, sum(values) / ranks / (total // ranks)
        near = [any(abs(one - x) <= _EXACT * abs(x) for one in read) for x in (wrong, right)]
        if near == [True, False]:
            yield Found(
                sums[0].where,
                f"the mean over {total:g} samples was read as {wrong:.5g}, where it is "
                f"{right:.5g}: the count became {total:g} / {ranks} = {total // ranks:g} per rank, "
                "a whole number",
                "Reduce the sum and the count, as `torchmetrics.MeanMetric` does, or give all "
                "ranks equally many samples.",
            )
            return


def _with_samples(part: _Evaluation) -> Iterator[tuple[Event, int]]:
    """Yield what a rank reduced, and how many samples of the same set it had evaluated by then.

    A forward pass after a reduction begins another set.
    """
    samples, begins = 0, True
    for event in part.events:
        if event.kind == "forward":
            samples = (0 if begins else samples) + (event.get("n") or 0)
            begins = False
        elif event.kind == "reduced":
            begins = True
            yield event, samples


@rule("SS403")
def evaluates_alone(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for evaluation through a wrapper that communicates, on some of the ranks."""
    inside: list[list[Event]] = []
    for rank in seen.ranks:
        parts = [event for part in evaluations(seen, rank) for event in part.forwards]
        inside.append([event for event in parts if event["wrapped"]])
    alone = next((n for n, events in enumerate(inside) if events), None)
    if alone is None:
        return
    event = inside[alone][0]
    others = [
        rank.rank
        for rank, events in zip(seen.ranks, inside, strict=True)
        if not events and _went_on(rank, event, seen.ranks[alone])
    ]
    wait = _waits_for(seen.ranks[alone], event)
    if others and wait:
        names = ", ".join(map(str, others))
        yield Found(
            event.where,
            f"after step {event.step} rank {alone} calls the wrapped {event['model']}, which "
            f"{wait}; rank {names} does not evaluate",
            "Evaluate on every rank, or call `model.module(...)` under `torch.no_grad()` here.",
        )


@rule("SS404")
def chooses_by_one_shard(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a save as the best, by its name, that nothing was joined before."""
    for parts in _pairs(seen):
        if not _are_shards(seen, parts):
            continue
        for number, part in enumerate(parts):
            before = part.until_joined()
            saves = (e for e in before if e.kind == "save" and "best" in str(e["path"]).lower())
            saved = next(saves, None)
            if saved is None or not any(event.kind == "item" for event in before):
                continue
            yield Found(
                saved.where,
                f"after step {part.step} {_counted(parts)}; rank {number} saved {saved['path']} "
                f"with no collective since",
                "All-reduce the metric first, so that every rank decides by the same number.",
            )
            return


@rule("SS405")
def evaluates_other_weights(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare what the ranks evaluate, where the weights that they train are equal."""
    trained = list(seen.together("weights"))
    if not trained or any(e["parameters"] != one[0]["parameters"] for one in trained for e in one):
        return
    each: list[dict[Hashable, Event]] = []
    for rank in seen.ranks:
        times: Counter[Hashable] = Counter()
        each.append({})
        for event, foreign in with_loader(seen, rank, "inference"):
            key = (event.step, event["model"], event["shapes"])
            times[key] += 1
            each[-1] |= {(*key, times[key]): event} if foreign else {}
    keys = [key for key in each[0] if all(key in own for own in each)]
    apart = [[own[key] for own in each] for key in keys]
    apart = [events for events in apart if len({event["weights"] for event in events}) > 1]
    if len({events[0].step for events in apart}) >= _IN_A_ROW:
        event = apart[0][0]
        yield Found(
            event.where,
            f"after step {event.step} the ranks evaluate {event['model']} with different weights, "
            f"and so in {len(apart)} evaluations; those that they train are equal",
            "Change what is evaluated (an average of weights?) on every rank in the same steps.",
        )


def evaluations(seen: Seen, rank: RankSeen) -> list[_Evaluation]:
    """Return a rank's evaluations."""
    found: list[_Evaluation] = []
    now: _Evaluation | None = None
    others = {id(event) for event, foreign in with_loader(seen, rank) if foreign}
    for event in rank.events:
        if event.kind == "forward":
            aside = not event["grad"] and id(event) in others
            if event["training"] and not aside:
                now = None
            else:
                if now is None:
                    now = _Evaluation(event.step)
                    found.append(now)
                now.forwards.append(event)
        elif event.kind in ("backward", "step"):
            # What came just before was not an evaluation but a step in evaluation mode.
            while now is not None and now.forwards and now.forwards[-1]["grad"]:
                now.forwards.pop()
            now = None
        if now is not None:
            now.events.append(event)
    return [part for part in found if part.forwards]


def _pairs(seen: Seen) -> Iterator[tuple[_Evaluation, ...]]:
    """Yield the evaluations in which all ranks took part."""
    each = [evaluations(seen, rank) for rank in seen.ranks]
    if len({len(parts) for parts in each}) == 1 or not seen.complete:
        yield from zip(*each, strict=False)


def with_loader(seen: Seen, rank: RankSeen, kind: str = "forward") -> Iterator[tuple[Event, bool]]:
    """Yield each forward pass, and whether its batch is of samples that no rank trains on."""
    trained: dict[int, set[int]] = {}  # indices, by data set
    own: set[int] = set()
    for one in seen.ranks:
        loaders = {loader for loader, _ in _with_latest(one, "backward") if loader is not None}
        own = loaders if one is rank else own
        data = _data_of(one)
        for event in one.of("order"):
            if event["loader_id"] in loaders:
                trained.setdefault(data[event["loader_id"]], set()).update(event["indices"])
    data = _data_of(rank)
    foreign = {
        event["loader_id"]
        for event in rank.of("order")
        if event["loader_id"] not in own
        and trained.get(data[event["loader_id"]], set()).isdisjoint(event["indices"])
    }
    for loader, event in _with_latest(rank, kind, "backward"):
        if event.kind == kind:
            yield event, loader in foreign


def _with_latest(rank: RankSeen, *kinds: str) -> Iterator[tuple[int | None, Event]]:
    """Yield the events of these kinds, each with the loader of the latest batch before it."""
    loader: int | None = None
    for event in rank.of("batch", *kinds):
        if event.kind == "batch":
            loader = event["loader_id"]
            continue
        yield loader, event
        if event.kind == "backward":
            loader = None  # not all batches of a long epoch are noted


def _data_of(rank: RankSeen) -> dict[int, int]:
    """Return what tells the data set of each loader from others."""
    return {event["loader_id"]: event["data"] for event in rank.of("loader")}


def _are_shards(seen: Seen, parts: Sequence[_Evaluation]) -> bool:
    """Whether the ranks evaluated different samples, rather than each of them all."""
    rows = [{row for event in part.forwards for row in event.get("rows", ())} for part in parts]
    if not all(rows):
        return False
    fewest = min(map(len, rows))
    overlap = max(len(one & other) for n, one in enumerate(rows) for other in rows[n + 1 :])
    return 2 * overlap < fewest and not _reads_all(seen, parts)


def _reads_all(seen: Seen, parts: Sequence[_Evaluation]) -> bool:
    """Whether each rank would read the same samples to the end, in an order of its own."""
    orders = []
    for rank, part in zip(seen.ranks, parts, strict=True):
        loader = _loader_of(rank, part.forwards[0])
        read = [e for e in rank.of("order") if e["loader_id"] == loader and e.get("indices")]
        orders.append({index for event in read[:1] for index in event["indices"]})
    return all(orders) and all(order == orders[0] for order in orders)


def _alone_on_a_shard(seen: Seen) -> Found | None:
    """Return what is wrong if only one rank evaluates, with a sampler that leaves samples out."""
    each = [(rank, parts) for rank in seen.ranks if (parts := evaluations(seen, rank))]
    if len(each) != 1 or not seen.complete:
        return None
    ((rank, parts),) = each
    loader = _loader_of(rank, parts[0].forwards[0])
    order = next((e for e in rank.of("order") if e["loader_id"] == loader), None)
    made = next((e for e in rank.of("loader") if e["loader_id"] == loader), None)
    shown = next((e for e in reversed(parts[0].events) if e.kind in ("report", "item")), None)
    if order is None or made is None or shown is None or not order["distributed"]:
        return None
    if order["truncated"] or not made["length"] or order["count"] >= made["length"]:
        return None
    return Found(
        shown.where,
        f"only rank {rank.rank} evaluates, and its sampler gives it {order['count']} of "
        f"{made['length']} samples; no rank evaluates the others",
        "Evaluate with a loader of the whole set there, or on every rank and join the counts.",
    )


def _loader_of(rank: RankSeen, forward: Event) -> int | None:
    """Return the loader of the batch that a forward pass was called with."""
    return next(loader for loader, one in _with_latest(rank, "forward") if one is forward)


def _counted(parts: Sequence[_Evaluation]) -> str:
    first, *others = [sum(e.get("n") or 0 for e in part.forwards) for part in parts]
    more = (f"rank {number} another {count}" for number, count in enumerate(others, 1))
    return ", ".join([f"rank 0 evaluated {first} samples", *more])


def _is_told(mean: float, parts: Sequence[_Evaluation]) -> bool:
    """Whether a number was read or shown, as it is or in percent."""
    for event in (event for part in parts for event in part.events):
        value = event["value"] if event.kind in ("item", "averaged") else None  # of NaN, too
        if value is not None and abs(value - mean) <= _EXACT * abs(mean):
            return True
        for number in event["numbers"] if event.kind == "report" else ():
            digits = len(number.partition(".")[2])
            shown = (mean, 100 * mean)
            if (
                digits > 1
                and "e" not in number
                and f"{float(number):.{digits}f}" in (f"{one:.{digits}f}" for one in shown)
            ):
                return True
    return False


def _went_on(rank: RankSeen, call: Event, caller: RankSeen) -> bool:
    """Whether a rank did something else than to come to a call that another rank has made."""
    joined = sum(e.step == call.step and e.time < call.time for e in caller.of("collective"))
    own = [event for event in rank.of("collective") if event.step == call.step]
    left = rank.exit_code is not None and bool(rank.of("destroy", "end"))  # else `check` ended it
    return len(own) > joined or rank.steps > call.step or left


def _waits_for(rank: RankSeen, event: Event) -> str:
    """Return what a wrapper's forward pass sends to the other ranks; empty if nothing."""
    wraps = [wrap for wrap in rank.of("wrap") if wrap["model_id"] == event["model_id"]]
    if not wraps:
        return ""
    if wraps[-1]["wrapper"] == "fsdp":
        return "gathers its parameters from all ranks"
    weights = [one for one in rank.of("weights") if one["model_id"] == event["model_id"]]
    buffers = len(weights[-1]["buffers"]) if weights else 0
    sends = buffers and wraps[-1].get("broadcast_buffers")
    return f"broadcasts its {buffers} buffers to all ranks" if sends else ""
