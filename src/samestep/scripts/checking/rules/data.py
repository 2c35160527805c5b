"""Rules about data: which samples each rank reads, how many, in what order, and what is random."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import combinations, pairwise

from samestep.base.errors import listed
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.findings import Found, NotSeen, rule
from samestep.scripts.checking.readings import (
    ENOUGH,
    Reading,
    equal_in_workers,
    evaluated,
    few,
    readings_of,
    same_data,
    same_samples,
    shuffled_differently,
    together,
)
from samestep.scripts.checking.seen import RankSeen, Seen, why_apart

_APART = 0.9  # of samples, at least, that no other rank reads
_MUCH = 0.1  # of samples that differ in content


@rule("SS101")
def all_ranks_train_the_same_samples(seen: Seen) -> Iterator[Found | NotSeen]:
    """Judge by the first pass over each loader; without one, by what the model was given."""
    if why := why_apart(seen):
        yield NotSeen(why)
        return
    for readings in together(seen):
        first = readings[0]
        if first.loader.iterable or not same_samples(readings):
            continue
        n = len(set(first.order)) or len(set(first.rows))
        begins = "; ".join(f"rank {k} began with {few(r.order)}" for k, r in enumerate(readings))
        text = f"each of {seen.world_size} ranks read the same {n} samples in one epoch ({begins})"
        yield Found(first.made, text, _with_sampler(seen.line(first.made)))
    if any(reading.trains for rank in seen.ranks for reading in readings_of(rank)):
        return
    passes = [[f for f in _passes(rank) if f.wrapped][:3] for rank in seen.ranks]
    rows = [[forward.rows for forward in own] for own in passes]
    distinct = {row for part in rows[0] for row in part}
    if len(rows[0]) == 3 and all(own == rows[0] for own in rows) and len(distinct) > 1:
        text = f"all ranks were given the same {passes[0][0].n} samples in each of the first 3 "
        text += "forward passes"
        losses = [[event.value for event in rank.of(ev.LossReach)] for rank in seen.ranks]
        if rows[0].count(rows[0][0]) == len(rows[0]) and any(own != losses[0] for own in losses):
            return  # of one graph, each rank's loss may take a part
        # Noise in place of data, or all samples at once.
        demo = all(f.drawn for f in passes[0]) or rows[0].count(rows[0][0]) == len(rows[0])
        remedy = "Seed what draws the batches by the rank, or share out the data."
        yield Found(passes[0][0].where, text, remedy, "advice" if demo else None)


def _passes(rank: RankSeen) -> list[ev.ForwardPass]:
    return [f for f in rank.of(ev.ForwardPass) if f.grad and f.training and f.rows]


def _with_sampler(line: str) -> str:
    try:
        tree = ast.parse(line)
    except SyntaxError:
        tree = ast.Module([], [])
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and call.args and "DataLoader" in ast.unparse(call.func):
            keywords = [k for k in call.keywords if k.arg not in ("shuffle", "sampler")]
            sampler = ast.parse(f"DistributedSampler({ast.unparse(call.args[0])})", mode="eval")
            call.keywords = [*keywords, ast.keyword("sampler", sampler.body)]
            return f"- {line}\n+ {ast.unparse(tree)}"
    return "Give the loader `sampler=DistributedSampler(dataset)` instead of `shuffle=True`."


@rule("SS102")
def shares_overlap(seen: Seen) -> Iterator[Found | NotSeen]:
    """Judge by the indices where the data are the same, else by the samples' content."""
    for readings in together(seen):
        first = readings[0]
        if first.loader.iterable or same_samples(readings) or shuffled_differently(readings):
            continue
        known = same_data(readings)
        even = 1 if first.loader.distributed else first.loader.batch_size or 1
        padding = seen.world_size * even
        shares = [Counter(r.order if known else r.rows) for r in readings]
        if any(share.total() - len(share) >= padding for share in shares):
            continue  # drawn with replacement, or endless
        if not known and not all(reading.has_distinct_rows for reading in readings):
            continue
        pairs = combinations(range(len(shares)), 2)
        a, b = max(pairs, key=lambda pair: len(shares[pair[0]].keys() & shares[pair[1]].keys()))
        common = shares[a].keys() & shares[b].keys()
        if len(common) > (padding if known else _MUCH * len(shares[a])):
            text = f"ranks {a} and {b} both read {len(common)} of their {len(shares[a])} samples"
            text += f" ({few(sorted(common))})" if known else ""
            remedy = "Cut the data by `dataset[rank::world_size]`, or use a DistributedSampler."
            yield Found(first.made, text, remedy)


@rule("SS103", least_ranks=1)
def same_order_in_every_epoch(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the first two passes of a sampler that shuffles."""
    each, models = [first for first, *_ in together(seen)], len(seen.ranks[0].of(ev.ModelTrained))
    for first in each:
        permuted = bool(first.orders) and first.orders[0].permuted
        shuffled = (first.loader.shuffle or permuted) and sorted(first.order) != first.order
        draws = first.loader.sampler == "RandomSampler" or first.loader.set_epoch is None
        draws &= len(first.order) >= ENOUGH
        if not shuffled or (first.loader.set_epoch is None and not draws):
            continue
        if len(first.orders) < 2 and not draws:
            same = [other for other in each if other.made == first.made]
            passes = [(other.loader.data, *o.indices) for other in same for o in other.orders]
            if len(passes) < 2:
                yield NotSeen("only one epoch was read")
            # Each epoch may make its own loader; but so may each model, data set or first trial.
            if len(same) < 3 or len({*passes}) > 1 or models > 1 or first.loader.data is None:
                continue
        before, after = (first.orders * 2)[:2]
        other = draws and (before is after or models > 1)  # it may be another trial
        if before.indices != after.indices or first.begins_only or other:
            continue
        line = "" if draws else seen.line(first.loader.where)
        text = f"epochs 1 and 2 read the same samples in the same order ({few(first.order)})"
        epochs = f"; the sampler's epoch was {before.set_epoch} and {after.set_epoch}"
        read = re.search(r" in (?:[\w.]+\()*([\w.]+)", line)
        name = read[1] if read else "loader"
        loop = f"+ {name}.sampler.set_epoch(epoch)\n  {line}"
        otherwise = "Call `sampler.set_epoch(epoch)` at the start of each epoch."
        otherwise = "Seed once, before the first epoch." if draws else otherwise
        yield Found(
            first.loader.where,
            text + ("" if draws else epochs),
            loop if line.startswith("for ") else otherwise,
            comes_from={"the sampler is made": first.loader.sampler_made},
        )


@rule("SS104", least_ranks=1)
def nothing_is_shuffled(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find ascending indices in a loader that trains: a warning if shuffling was asked for."""
    for readings in together(seen):
        first = readings[0]
        loader = first.loader
        if loader.data is None or any(r.length[0] < 2 for r in readings):
            continue
        if any(len(r.order) < ENOUGH or sorted(r.order) != r.order for r in readings):
            continue
        text = f"the samples came in the order of the data set ({few(first.order)})"
        if loader.asked:
            text += f", although the loader of {loader.asked} shuffles the same data set"
        elif loader.shuffle:
            text += f", although {loader.sampler} has `shuffle=True`"
        argument = "sampler=DistributedSampler(dataset)" if seen.world_size > 1 else "shuffle=True"
        asked = loader.asked or loader.shuffle
        where = loader.sampler_made or first.made
        remedy = f"Shuffle in training: `DataLoader(dataset, {argument})`."
        yield Found(where, text, remedy, None if asked else "advice")


@rule("SS105")
def stream_is_not_split_over_ranks(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the content of the first samples."""
    for readings in together(seen):
        first = readings[0]
        rows = set(first.rows)
        common = rows.intersection(*(r.rows for r in readings[1:]))
        # Drawn with replacement, a rank's own samples come again, too.
        drawn = any(r.rows != first.rows and len({*r.rows}) < len(r.rows) for r in readings)
        if first.loader.iterable and not drawn and ENOUGH <= len(rows) <= 2 * len(common):
            text = f"{len(common)} of the first {len(rows)} samples of rank 0 came on all ranks"
            split = "`itertools.islice(stream, rank, None, world_size)`"
            where = first.loader.reads or first.made
            yield Found(where, text, f"Let each rank take its own part: {split}.")


@rule("SS106", least_ranks=1)
def stream_is_not_split_over_workers(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find as many equal batches in a row as there are workers, again and again."""
    for reading in (reading for rank in seen.ranks for reading in readings_of(rank)):
        workers = reading.loader.workers
        batches = [tuple(batch.rows) for batch in reading.first_pass]
        if not reading.loader.iterable or workers < 2 or len(set(batches)) < 2:
            continue
        rounds = [batches[at : at + workers] for at in range(0, len(batches), workers)]
        rounds = [batch for batch in rounds if len(batch) == workers]
        if all(len(set(batch)) == 1 for batch in rounds):
            text = f"all {workers} workers yielded the same samples, {len(rounds)} times in a row"
            remedy = "Split by `torch.utils.data.get_worker_info()`: its `id` and `num_workers`."
            yield Found(reading.loader.reads or reading.made, text, remedy)
            return


@rule("SS108", least_ranks=1)
def workers_draw_the_same(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the random states with which the workers of a loader drew for their first samples."""
    for first, *_ in together(seen):
        if names := equal_in_workers(first):
            text = f"{len(first.random)} workers of rank 0 began with the same state of"
            remedy = "Seed by `torch.initial_seed()`, which differs in each worker, or not at all."
            yield Found(first.made, f"{text} {', '.join(names)} and drew from it", remedy)


@rule("SS109")
def ranks_draw_the_same(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the random states with which the ranks drew for their first samples."""
    for readings in together(seen):
        first = readings[0]
        in_workers = equal_in_workers(first)
        same = {
            (name, worker >= 0)
            for worker, drew in first.random.items()
            for name, states in drew.items()
            if name not in in_workers
            if all(r.random.get(worker, {}).get(name) == states for r in readings)
        }
        names = sorted({name for name, _ in same})
        if names and not same_samples(readings):
            text = f"all {seen.world_size} ranks began with the same state of {', '.join(names)}"
            calls = sorted({_seed_by_rank(name, worker) for name, worker in same})
            remedy = f"After the model is built, seed by the rank: {listed(calls)}."
            yield Found(first.made, f"{text} and drew from it in the data set", remedy)


@rule("SS111", least_ranks=1)
def collating_leaves_out(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the rows of each batch with the samples of which it was made."""
    evaluations = [reading for own in evaluated(seen) for reading in own if reading.lost]
    others = [reading for rank in seen.ranks for reading in readings_of(rank) if reading.lost]
    for reading in (*evaluations, *others)[:1]:
        first = reading.lost[0]
        text = f"{len(reading.lost)} batches of the first epoch have no row for some of their "
        text += f"samples: first {first.lost} of {first.given}"
        remedy = "Let `collate_fn` return a row for each sample, or leave it out of the data set."
        # It may be meant in training.
        yield Found(reading.made, text, remedy, None if evaluations else "advice")


@rule("SS112", least_ranks=1)
def evaluates_without_the_last(seen: Seen) -> Iterator[Found | NotSeen]:
    """Count what the batches of an evaluation leave out, and no other evaluation reads."""
    each = list(evaluated(seen))
    for readings in each:
        first = readings[0]
        order, data = first.orders[0], first.loader.data
        own = {index for reading in readings for index in reading.order}
        same = (r for others in each for r in others if r.loader.data == data)
        if order.left_out and own.issuperset(index for r in same for index in r.order):
            text = f"of {order.count + order.left_out} samples that rank 0 is to evaluate, the "
            text += f"last {order.left_out} are in no batch"
            yield Found(first.made, text, "Leave out `drop_last=True`.")


@rule("SS113", least_ranks=1)
def evaluates_augmented(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the content of the same samples in the first two passes, where numbers were drawn."""
    for first, *_ in evaluated(seen):
        drew = sorted({name for drawn in first.random.values() for name in drawn})
        if not drew or len(first.orders) < 2 or first.begins_only:
            continue
        rows = first.rows
        again = [row for batch in first.batches if batch.turn == 1 for row in batch.rows]
        differ = sum(a != b for a, b in zip(rows, again, strict=False))
        if first.orders[0].indices == first.orders[1].indices and 4 * differ > len(rows):
            text = f"{differ} of the first {len(rows)} samples were other ones in the second "
            text += f"evaluation; their data set draws from {listed(drew)}"
            remedy = "Give the data of an evaluation transforms that draw nothing, or a seed of "
            remedy += "its own for each sample."
            yield Found(first.made, text, remedy)


def _seed_by_rank(name: str, in_worker: bool) -> str:
    """Return the code that seeds a source of random numbers, in the process or in a worker."""
    if name.startswith("self."):
        return f"`{name}`, where the data set makes it"
    if in_worker:  # PyTorch seeds all of them there
        return "`torch.manual_seed(seed + rank)`, unless a worker_init_fn or generator seeds alike"
    calls = {"random": "random.seed", "numpy": "np.random.seed", "torch": "torch.manual_seed"}
    return f"`{calls[name]}(seed + rank)`"


@rule("SS110")
def ranks_shuffle_differently(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the seeds and epochs of the ranks' samplers."""
    for readings in together(seen):
        if not shuffled_differently(readings) or same_samples(readings):
            continue
        first = readings[0].loader
        orders = [reading.orders[0] for reading in readings]
        text = "; ".join(
            f"rank {k} has seed {o.seed}, epoch {o.set_epoch}" for k, o in enumerate(orders)
        )
        counts = Counter(index for reading in readings for index in reading.order)
        text += f": {sum(times > 1 for times in counts.values())} samples came on several ranks"
        if not any(order.truncated for order in orders):
            text += f", {(first.length or 0) - len(counts)} on none"
        same = len({order.seed for order in orders}) == 1
        where, what = (first.where, "epoch") if same else (first.sampler_made, "seed")
        yield Found(where or readings[0].made, text, f"Give the samplers of all ranks one {what}.")


@rule("SS114")
def cuts_what_is_a_part(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for samplers that read a part of what is a part already, and for two that cut."""
    for readings in (*together(seen), *together(seen, trains=False)):
        first, loaders = readings[0], [own.loader for own in readings]
        orders = [own.orders[0] for own in readings if own.orders]
        parts, ranks = min(loader.parts for loader in loaders), seen.world_size
        if parts < ranks or len(orders) < ranks or not all(order.ended for order in orders):
            continue
        lengths, proof = [loader.length or 0 for loader in loaders], _cut_before(readings)
        whole, read = sum(lengths), sum(order.count for order in orders)
        if parts >= ranks**2:
            whole, proof = min(lengths), "two samplers cut the data"
        if proof and 4 * read <= 3 * whole:
            text = f"{proof}, and in an epoch the ranks read {read} of {whole} samples: samplers "
            text += f"take one of {parts} parts of each rank's data set"
            remedy = "Cut once: leave out the sampler, or give it the whole data set on each rank."
            where = loaders[0].sampler_made or first.made
            yield Found(where, text, remedy, None if first.trains else "warning")
        elif not proof and len({loader.data for loader in loaders} - {None}) == ranks:
            text = f"each rank has a data set of its own, of which a sampler takes one of {parts} "
            yield NotSeen(f"{text}parts: whether it is a part of one is not known")
    yield from _streams_cut_twice(seen)


def _streams_cut_twice(seen: Seen) -> Iterator[Found]:
    """Yield streams of which each rank and worker has one row of too many."""
    for readings in together(seen):
        loader, parts = readings[0].loader, defaultdict[tuple[int, int, int], set[int]](set)
        for rank, own in zip(seen.ranks, readings, strict=True):
            for event in rank.of(ev.StreamPlaces):
                if event.loader_id == own.loader.loader_id:
                    parts[event.whole, rank.rank, event.worker].update(event.places)
        every = [sorted(places) for places in parts.values()]
        steps = {b - a for places in every for a, b in pairwise(places)}
        if len({whole for whole, *_ in parts}) != 1 or len(steps) != 1:
            continue
        (step,), workers = steps, max(1, loader.workers)
        first = sorted(places[0] % step for places in every)
        # Every n-th row may be for training: the first ones are equally far apart then.
        gaps = {(b - a) % step for a, b in pairwise([*first, first[0]])}
        times = {seen.world_size, workers, seen.world_size * workers} - {1}
        if len(gaps) > 1 and sum(map(len, every)) >= ENOUGH and step / len(parts) in times:
            rows = "; ".join(f"rank {key[1]} has {few(sorted(parts[key]))}" for key in parts)
            text = f"the samples are rows of a tensor of {min(parts)[0]}, and all ranks together "
            text += f"have one row of {step // len(parts)} ({rows})"
            remedy = "Share out the stream once, by rank and worker: leave out the other cut."
            yield Found(loader.reads or readings[0].made, text, remedy)


def _cut_before(readings: list[Reading]) -> str:
    """Return what shows that the ranks' data sets are parts of one; empty if nothing does."""
    loaders, ranks = [reading.loader for reading in readings], len(readings)
    data, own = ({getattr(loader, name) for loader in loaders} for name in ("data", "own"))
    views = [{*numbers} for numbers in zip(*(loader.views for loader in loaders), strict=False)]
    orders = [{*reading.order} for reading in readings]
    if len(data) == 1 and len(own) == ranks:  # unless they are the same in another order
        apart = len(set.union(*orders)) > _APART * sum(map(len, orders))
        return "each rank has a subset of its own" if apart else ""
    if len(data) == ranks and [len(numbers) for numbers in views] == [ranks, 1]:
        return "each rank has a part of one tensor"
    if len(data) == ranks and all(loader.shard for loader in loaders):
        return f"each rank has a `shard` ({loaders[0].shard})"
    return ""


@rule("SS602")
def uneven_batches(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare how many batches the first pass has on each rank."""
    for readings in together(seen):
        lengths = [reading.length for reading in readings]
        least = min((n for n, ended in lengths if ended), default=None)
        if least is None or all(n <= least for n, _ in lengths) or seen.any(ev.JoinEntered):
            continue
        # Without an exchange of gradients, no rank waits. Weights may be averaged now and then.
        calls = (c for c in seen.ranks[0].of(ev.CollectiveCalled) if not c.evaluating)
        reduced = {c.step for c in calls if c.step and c.name == "all_reduce"}
        if not seen.any(ev.ModelWrapped) and 2 * len(reduced) < seen.ranks[0].steps:
            continue
        if any(event.op == "MIN" for event in seen.any(ev.CollectiveCalled)):
            yield NotSeen("the ranks agreed on a minimum, perhaps of their batches")
            continue
        text = "; ".join(
            f"rank {k} has {n}{'' if ended else ' or more'} batches in an epoch"
            for k, (n, ended) in enumerate(lengths)
        )
        short = [k for k, length in enumerate(lengths) if length == (least, True)]
        waits = [k for k, (n, _) in enumerate(lengths) if n > least]
        text += f": after batch {least} rank {few(short)} leaves the loop, and rank "
        text += f"{few(waits)} waits in the backward pass of batch {least + 1}"
        remedy = "Use a DistributedSampler, which gives all ranks equally many, or DDP's `Join`."
        origin = {"the loader is made": readings[0].made}
        yield Found(readings[0].loader.where, text, remedy, comes_from=origin)


@rule("SS717", least_ranks=1)
def draws_again_in_each_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Look for lines that seed alike, or draw from the same state, in steps in a row."""
    # What follows with the same generator is the same, too.
    events = {event.source: event for event in seen.ranks[0].of(ev.DrawnAgain)[::-1]}
    for event in events.values():
        text = f"by step {event.step + 1}, steps in a row have begun here with the same state of "
        text += f"{event.source}, and have drawn from it"
        yield Found(event.where, text, "Seed once, before the loop, or by the step: `seed + step`.")


@rule("SS711", least_ranks=1)
def same_batch_at_every_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the batches of a loader that has more than one, and what the model was given."""
    for first, *_ in together(seen):
        batches, rows = first.batches, {tuple(batch.rows) for batch in first.batches}
        if not first.begins_only or not first.orders or len(set(batches[0].rows)) < 2:
            continue
        text = ""
        if len(batches) >= 3 * len(rows) and len({batch.step for batch in batches}) >= 3:
            text = f"of {len(batches)} batches that rank 0 read, {len(rows)} differed"
        elif len(batches) == 1 and seen.complete and seen.ranks[0].steps >= 5:
            passes = _passes(seen.ranks[0])
            same = len({tuple(forward.rows) for forward in passes}) == 1
            text = f"{len(passes)} forward passes of rank 0 had the same samples" if same else ""
        if text:
            text += f"; the loader has {first.length[0]} batches"
            remedy = "Read on in the loop: `for batch in loader:`, not `next(iter(loader))`."
            origin = {"the loader is made": first.made}
            yield Found(batches[0].where, text, remedy, comes_from=origin)
