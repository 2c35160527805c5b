"""Rules about evaluation: whose samples a number is of, who takes part, in which mode."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, replaced, rule
from samestep.scripts.checking.readings import few, same_data, together
from samestep.scripts.checking.seen import E, RankSeen, Seen

_JOINING = ("all_reduce", "reduce", "all_gather", "gather", "all_to_all", "reduce_scatter")
_IN_A_ROW = 2
_EXACT = 1e-5
_WHOLE_EPOCHS = 2  # those that are not cut to one batch
_DECIMALS = 7  # of a number that is read
_FLOAT = 1e-7  # the error of a single-precision number below 1
_SHARE = 0.01  # of a sample, within which a share is hardly by chance a whole number of them


@dataclass(frozen=True)
class _Evaluation:
    """What one rank did from its first forward pass without training to its next with it."""

    step: int
    forwards: list[ev.ForwardPass] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    """All that came from the first forward pass on."""

    def until_joined(self) -> list[ev.Event]:
        """Return the events before the first collective that could join numbers."""
        for number, event in enumerate(self.events):
            if isinstance(event, ev.CollectiveCalled) and event.name.startswith(_JOINING):
                # What a library counts, to end an epoch on all ranks, is noted right after it.
                following = self.events[number + 1 : number + 2]
                if not any(isinstance(e, ev.NumbersReduced) and not e.metric for e in following):
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
        read = [e for part in parts for e in part.events[::-1] if isinstance(e, ev.NumberRead)]
        shown = [[e for e in part.events if isinstance(e, ev.NumbersShown)] for part in parts]
        last = next((e for events in shown for e in events[::-1] if not e.labelled), None)
        if not read or (last is None and any(shown)):  # each with its rank next to it
            continue
        event, verb = (read[0], "read") if last is None else (last, "shown")
        numbers = f": {', '.join(last.numbers)}" if last is not None else ""
        text = f"after step {parts[0].step} {_counted(parts)}; no collective joined anything "
        text += f"before a number was {verb} here{numbers}"
        remedy = "All-reduce the sum and the count on every rank, then divide once."
        yield Found(event.where, text, remedy, "advice" if last is None else None)
        return


@rule("SS402")
def averages_means(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a reduced number that becomes the plain mean over ranks with unequal counts."""
    yield from _divides_counts(seen)
    for parts in _pairs(seen):
        reduced = [list(_with_samples(part)) for part in parts]
        # A count that is reduced too is what the sum is then divided by.
        known = {float(count) for events in reduced for _, count in events}
        if any(v in known for events in reduced for e, _ in events for v in e.values):
            continue
        for events in zip(*reduced, strict=False):
            first, counts = events[0][0], [count for _, count in events]
            each = (zip(e.values, e.bent, strict=True) for e, _ in events)
            for values, kinds in (zip(*of_all, strict=True) for of_all in zip(*each, strict=False)):
                bent = _of_the_part(kinds, counts)
                plain = all(value.is_integer() for value in values)  # counts of right answers
                mean = sum(values) / len(values)
                same = len(set(values)) == 1 or (len(set(counts)) == 1 and not bent)
                whole = sum(v * n for v, n in zip(values, counts, strict=True))
                whole /= max(1, sum(counts))
                # A rounded number may be both.
                right = not bent and _is_shown(whole, parts)
                shown = first.op == "AVG" or (_is_shown(mean, parts) and not right)
                if plain or same or not shown:
                    continue
                numbers = " and ".join(f"{value:.4g}" for value in values)
                samples = " and ".join(map(str, counts))
                says = bent or f"where all samples together have {whole:.4g}"
                text = f"{numbers} of {samples} samples became {mean:.4g}, {says}"
                remedy = "Reduce the sum and the count on every rank, then divide once."
                yield Found(first.where, text, remedy)
                return


def _of_the_part(kinds: Sequence[dict[str, float]], counts: Sequence[int]) -> str:
    """Return what each rank did of which the mean is not that of the whole; empty if nothing."""
    common = [kind for kind in kinds[0] if all(kind in own for own in kinds)]  # else it is chance
    if f"mean of {counts[0]} quotients" in common:  # one for each sample
        return ""
    divisors = {kind: {own[kind] for own in kinds} for kind in common}
    if bent := next((kind for kind in common if divisors[kind] == {0.0}), ""):
        return f"each rank took the {bent} of its own samples"
    unlike = len(set(counts)) == 1 and common and all(len(own) > 1 for own in divisors.values())
    return f"each rank took a {common[0]} with a divisor of its own" if unlike else ""


def _divides_counts(seen: Seen) -> Iterator[Found]:
    """Yield a mean that was read, whose count was cut to a whole number of samples per rank."""
    read = [event.value for event in seen.ranks[0].of(ev.NumberRead) if event.value is not None]
    reduced = (events for events in seen.together(ev.NumbersReduced) if events[0].op != "GATHER")
    for sums, counts in pairwise(reduced):
        values = [value for event in sums for value in event.values]
        numbers = [number for event in counts for number in event.values]
        total, ranks = sum(numbers), seen.world_size
        if len(values) != ranks or len(numbers) != ranks or not total % ranks or total < ranks:
            continue
        if all(map(float.is_integer, values)) or not all(map(float.is_integer, numbers)):
            continue
        right, wrong = sum(values) / total, sum(values) / ranks / (total // ranks)
        # The right one may be read too, next to it; the two are the same where the sum is 0.
        if wrong != right and any(abs(value - wrong) <= _EXACT * abs(wrong) for value in read):
            text = f"the mean over {total:g} samples was read as {wrong:.5g}, where it is "
            text += f"{right:.5g}: the count became {total:g} / {ranks} = {total // ranks:g} per "
            text += "rank, a whole number"
            remedy = "Reduce the sum and the count, as `torchmetrics.MeanMetric` does, or give all "
            remedy += "ranks equally many samples."
            yield Found(sums[0].where, text, remedy)
            return


def _with_samples(part: _Evaluation) -> Iterator[tuple[ev.NumbersReduced, int]]:
    """Yield a rank's reductions, each with the samples evaluated since those before it."""
    samples, begins = 0, True
    for event in part.events:
        if isinstance(event, ev.ForwardPass):
            samples = (0 if begins else samples) + (event.n or 0)
            begins = False
        elif isinstance(event, ev.NumbersReduced):
            begins = True
            yield event, samples


@rule("SS403")
def evaluates_alone(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for evaluation through a wrapper that communicates, on some of the ranks."""
    inside = [
        [event for part in evaluations(seen, rank) for event in part.forwards if event.wrapped]
        for rank in seen.ranks
    ]
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
        text = f"after step {event.step} rank {alone} calls the wrapped {event.model}, which "
        text += f"{wait}; rank {names} does not evaluate"
        remedy = "Evaluate on every rank, or call `model.module(...)` under `torch.no_grad()` here."
        yield Found(event.where, text, remedy)


@rule("SS404")
def chooses_by_one_shard(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for a save as the best, by its name, that nothing was joined before."""
    for parts in _pairs(seen):
        if not _are_shards(seen, parts):
            continue
        for number, part in enumerate(parts):
            before = part.until_joined()
            saves = (event for event in before if isinstance(event, ev.FileSaved))
            saved = next((save for save in saves if "best" in str(save.path).lower()), None)
            if saved is None or not any(isinstance(event, ev.NumberRead) for event in before):
                continue
            text = f"after step {part.step} {_counted(parts)}; rank {number} saved {saved.path} "
            text += "with no collective since"
            remedy = "All-reduce the metric first, so that every rank decides by the same number."
            yield Found(saved.where, text, remedy)
            return


@rule("SS405")
def evaluates_other_weights(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare what the ranks evaluate, where the weights that they train are equal."""
    trained = list(seen.together(ev.WeightSums))
    if not trained or any(e.parameters != sums[0].parameters for sums in trained for e in sums):
        return
    each: list[dict[Hashable, ev.InferencePass]] = []
    for rank in seen.ranks:
        times: Counter[Hashable] = Counter()
        each.append({})
        latest = _with_latest(rank, ev.InferencePass)
        passes = with_loader(seen, rank, ev.InferencePass)
        for (event, other), (loader, _) in zip(passes, latest, strict=True):
            # Without a loader, its samples are cut by hand.
            foreign = other or (loader is None and not event.training)
            key = (event.step, event.model_id, event.shapes)
            times[key] += 1
            each[-1] |= {(*key, times[key]): event} if foreign else {}
    keys = [key for key in each[0] if all(key in own for own in each)]
    apart = [[own[key] for own in each] for key in keys]
    apart = [events for events in apart if len({event.weights for event in events}) > 1]
    # Ranks that share out several models change all of them.
    still = [len({event.weights for event in own}) == 1 for own in zip(*apart, strict=True)]
    if len({e[0].step for e in apart}) >= _IN_A_ROW and any(still) and not all(still):
        event = apart[0][0]
        text = f"after step {event.step} the ranks evaluate {event.model} with different weights, "
        text += f"and so in {len(apart)} evaluations: they stay the same on rank "
        text += f"{still.index(True)}; those that they train are equal"
        remedy = "Change what is evaluated (an average of weights?) on every rank in the same "
        remedy += "steps."
        yield Found(event.where, text, remedy)


@rule("SS406")
def compares_in_another_order(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for predictions whose own ones stand where no labels of the same samples do."""
    for event in seen.any(ev.OrdersDiffer)[:1]:
        predictions, labels = event.orders
        text = f"after step {event.step} predictions were compared with labels: those of one rank "
        text += f"stand {predictions}, and the labels of the same samples {labels}"
        remedy = "Gather the labels by the same call as the predictions, and join both alike."
        yield Found(event.where, text, remedy)


def evaluations(seen: Seen, rank: RankSeen) -> list[_Evaluation]:
    """Return a rank's evaluations."""
    parts: list[_Evaluation] = []
    now: _Evaluation | None = None
    others = {id(event) for event, foreign in with_loader(seen, rank, ev.ForwardPass) if foreign}
    for event in rank.events:
        if isinstance(event, ev.ForwardPass):
            aside = not event.grad and id(event) in others
            if event.training and not aside:
                now = None
            else:
                if now is None:
                    now = _Evaluation(event.step)
                    parts.append(now)
                now.forwards.append(event)
        elif isinstance(event, ev.BackwardPass | ev.OptimizerStep):
            # What came just before was not an evaluation but a step in evaluation mode.
            while now is not None and now.forwards and now.forwards[-1].grad:
                now.forwards.pop()
            now = None
        if now is not None:
            now.events.append(event)
    return [part for part in parts if part.forwards]


def _pairs(seen: Seen) -> Iterator[tuple[_Evaluation, ...]]:
    each = [evaluations(seen, rank) for rank in seen.ranks]
    if len({len(parts) for parts in each}) == 1 or not seen.complete:
        yield from zip(*each, strict=False)


def with_loader(seen: Seen, rank: RankSeen, kind: type[E]) -> Iterator[tuple[E, bool]]:
    """Yield each event of a kind, and whether its batch is of samples that no rank trains on."""
    trained: dict[int | None, set[int]] = {}  # indices, by data set
    own: set[int | None] = set()
    for other in seen.ranks:
        loaders = {loader for loader, _ in _with_latest(other, ev.BackwardPass)}
        own = loaders if other is rank else own
        data = {read.loader_id: read.data for read in other.of(ev.LoaderRead)}
        for order in other.of(ev.OrderDrawn):
            if order.loader_id in loaders:
                trained.setdefault(data[order.loader_id], set()).update(order.indices)
    data = {read.loader_id: read.data for read in rank.of(ev.LoaderRead)}
    foreign = {
        order.loader_id
        for order in rank.of(ev.OrderDrawn)
        if order.loader_id not in own
        and trained.get(data[order.loader_id], set()).isdisjoint(order.indices)
    }
    for loader, event in _with_latest(rank, kind):
        yield event, loader in foreign


def _with_latest(rank: RankSeen, kind: type[E]) -> Iterator[tuple[int | None, E]]:
    """Yield the events of a kind, each with the loader of the latest batch before it."""
    loader: int | None = None
    for event in rank.events:
        if isinstance(event, kind):
            yield loader, event
        if isinstance(event, ev.BatchRead):
            loader = event.loader_id
        elif isinstance(event, ev.BackwardPass):
            loader = None  # not all batches of a long epoch are noted


def _are_shards(seen: Seen, parts: Sequence[_Evaluation]) -> bool:
    """Whether the ranks evaluated different samples, rather than each of them all."""
    rows = [{row for event in part.forwards for row in event.rows} for part in parts]
    if not all(rows):
        return False
    fewest = min(map(len, rows))
    overlap = max(len(a & b) for a, b in combinations(rows, 2))
    return 2 * overlap < fewest and not _reads_all(seen, parts)


def _reads_all(seen: Seen, parts: Sequence[_Evaluation]) -> bool:
    """Whether each rank would read the same samples to the end, in an order of its own."""
    orders = []
    for rank, part in zip(seen.ranks, parts, strict=True):
        loader = _loader_of(rank, part.forwards[0])
        read = [e for e in rank.of(ev.OrderDrawn) if e.loader_id == loader and e.indices]
        orders.append({index for event in read[:1] for index in event.indices})
    return all(orders) and all(order == orders[0] for order in orders)


def _alone_on_a_shard(seen: Seen) -> Found | None:
    """Return a finding if only one rank evaluates, with a sampler that leaves samples out."""
    each = [(rank, parts) for rank in seen.ranks if (parts := evaluations(seen, rank))]
    if len(each) != 1 or not seen.complete:
        return None
    ((rank, parts),) = each
    loader = _loader_of(rank, parts[0].forwards[0])
    order = next((e for e in rank.of(ev.OrderDrawn) if e.loader_id == loader), None)
    read = next((e for e in rank.of(ev.LoaderRead) if e.loader_id == loader), None)
    numbers = (e for e in parts[0].events[::-1] if isinstance(e, ev.NumbersShown | ev.NumberRead))
    shown = next(numbers, None)
    if order is None or read is None or shown is None or not order.distributed:
        return None
    if order.truncated or not read.length or order.count >= read.length:
        return None
    text = f"only rank {rank.rank} evaluates, and its sampler gives it {order.count} of "
    text += f"{read.length} samples; no rank evaluates the others"
    remedy = "Evaluate with a loader of the whole set there, or on every rank and join the counts."
    return Found(shown.where, text, remedy)


def _loader_of(rank: RankSeen, forward: ev.ForwardPass) -> int | None:
    return next(loader for loader, event in _with_latest(rank, ev.ForwardPass) if event is forward)


def _counted(parts: Sequence[_Evaluation]) -> str:
    first, *others = [sum(e.n or 0 for e in part.forwards) for part in parts]
    more = (f"rank {number} another {count}" for number, count in enumerate(others, 1))
    return ", ".join([f"rank 0 evaluated {first} samples", *more])


def _is_shown(mean: float, parts: Sequence[_Evaluation]) -> bool:
    """Whether a number was read or shown, as it is or in percent."""
    for event in (event for part in parts for event in part.events):
        if isinstance(event, ev.NumberRead | ev.NumberAveraged):
            value = event.value
            if value is not None and abs(value - mean) <= _EXACT * abs(mean):
                return True
        for number in event.numbers if isinstance(event, ev.NumbersShown) else ():
            digits = len(number.partition(".")[2])
            shown = [f"{value:.{digits}f}" for value in (mean, 100 * mean)]
            if digits > 1 and "e" not in number and f"{float(number):.{digits}f}" in shown:
                return True
    return False


def _went_on(rank: RankSeen, call: ev.ForwardPass, caller: RankSeen) -> bool:
    """Whether a rank did something else than to come to a call that another rank has made."""
    joined = sum(e.step == call.step and e.time < call.time for e in caller.of(ev.CollectiveCalled))
    own = [event for event in rank.of(ev.CollectiveCalled) if event.step == call.step]
    ended = bool(rank.of(ev.GroupDestroyed) or rank.first(ev.RankEnded))
    left = rank.exit_code is not None and ended  # else `check` ended it
    return len(own) > joined or rank.steps > call.step or left


def _waits_for(rank: RankSeen, event: ev.ForwardPass) -> str:
    """Describe a wrapper's communication in its forward pass; empty if there is none."""
    wraps = rank.of_model(ev.ModelWrapped, event.model_id)
    if not wraps:
        return ""
    if wraps[-1].wrapper == "fsdp":
        return "gathers its parameters from all ranks"
    weights = rank.of_model(ev.WeightSums, event.model_id)
    buffers = len(weights[-1].buffers) if weights else 0
    sends = buffers and wraps[-1].broadcast_buffers
    return f"broadcasts its {buffers} buffers to all ranks" if sends else ""


@rule("SS107")
def padding_is_counted(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find repeated indices in an evaluation whose sums are then reduced over the ranks."""
    for readings in together(seen, trains=False):
        first = readings[0]
        # Accelerate's samplers fill up the last batches.
        most = seen.world_size * (1 if first.loader.distributed else first.loader.batch_size or 1)
        whole = first.loader.length
        if not same_data(readings) or any(len({*own.order}) == whole for own in readings):
            continue
        if not any(batch.evaluating for batch in first.batches) or first.orders[0].truncated:
            continue
        counts = Counter(index for reading in readings for index in reading.order)
        twice = sorted(index for index, times in counts.items() if times > 1)
        if not twice or len(twice) >= most or len(counts) != whole:
            continue
        text = f"{len(counts)} samples were evaluated {counts.total()} times: {few(twice)} twice"
        latest = _with_latest(seen.ranks[0], ev.Event)
        met = [event for loader, event in latest if loader == first.loader.loader_id]
        calls = [event for event in met if isinstance(event, ev.CollectiveCalled)]
        cut = any(left.cut for reading in readings for left in reading.left)
        smaller = {batch.n for reading in readings for batch in reading.batches}
        smaller |= {len(reading.order) for reading in readings}
        of = None if cut else _results_of(seen, met, [whole, counts.total()], smaller)
        if of == whole or any(event.trims for event in calls):
            continue
        text += f", and the results are of {of}" if of else ""
        untrimmed = [event.where for event in calls if event.trims is False]
        names = sorted({event.name for event in calls})
        if untrimmed and of:
            line = seen.line(untrimmed[0])
            remedy = replaced(line, line.replace(".gather(", ".gather_for_metrics("))
            yield Found(untrimmed[0], text, remedy, "advice")
        elif not (first.loader.direct or untrimmed):
            yield NotSeen(f"{text}, by a sampler that is not the script's own")
        elif not of and (gathers := [name for name in names if "gather" in name]):
            yield NotSeen(f"{text}; after {gathers[0]} the script may leave them out")
        elif not of and not {*names} & {"all_reduce", "reduce"}:
            yield NotSeen(f"{text}; no collective put the ranks' results together")
        else:
            remedy = "Give rank r the samples `range(r, len(dataset), world_size)`, by `Subset`."
            where = first.loader.sampler_made or first.made
            yield Found(where, text, remedy, "advice" if cut else None)


def _results_of(seen: Seen, met: list[ev.Event], sizes: list[int], smaller: set[int]) -> int | None:
    """Return of which number of samples results are: None if no count and no share tells.

    `smaller`: of how many samples other results are, of a batch or of a rank.
    """
    sums = {
        sum(column)
        for events in seen.together(ev.NumbersReduced)
        for column in zip(*(event.values for event in events), strict=False)
    }
    if len(counted := [n for n in sizes if n in sums]) == 1:
        return counted[0]
    numbers: list[str] = []
    for event in (event for event in met if event.epoch <= _WHOLE_EPOCHS):
        if isinstance(event, ev.NumberRead):
            numbers.append(f"{event.value or 0.0:.{_DECIMALS}f}")
        elif isinstance(event, ev.NumbersShown):
            numbers += [number for number in event.numbers if "e" not in number]
    votes = Counter[int]()
    for text in (text for text in numbers if float(text) % 1):  # else it is a count
        percent = 100 if float(text) > 1 else 1
        share, digits = float(text) / percent, len(text.partition(".")[2])
        error = 0.5 / percent / 10**digits + _FLOAT
        fits = [n for n in (*smaller, *sizes) if abs(share * n - round(share * n)) <= n * error]
        if len(fits) == 1 and fits[0] in sizes and 0 < share < 1 and sizes[1] * error < _SHARE:
            votes[fits[0]] += 1
    (of, times), (_, others), *_ = [*votes.most_common(), (None, 0), (None, 0)]
    return of if times > others else None
