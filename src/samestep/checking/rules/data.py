"""Rules about data: which samples each rank reads, in what order, how many, drawn at random how.

Indices tell which samples they are where the ranks' data sets are the same; else the samples
themselves do, by a number for each.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from samestep.checking.events import Event, RankSeen, Seen
from samestep.checking.findings import Found, NotSeen, rule

_ENOUGH = 8  # samples that tell which they are
_ALIKE = 0.98  # of samples, at least so many differ where content can tell them apart
_MUCH = 0.1  # of samples that differ
_SPLIT = "for sample in itertools.islice(stream, rank, None, world_size)"


@dataclass
class _Reading:
    """What one rank read from a loader, or from several that look alike."""

    loader: Event
    orders: list[Event] = field(default_factory=list)
    batches: list[Event] = field(default_factory=list)
    left: list[Event] = field(default_factory=list)
    random: dict[int, dict[str, list[int]]] = field(default_factory=dict)
    """What was drawn for the first samples in each worker, -1 being no worker."""
    trains: bool = False

    @property
    def rows(self) -> list[int]:
        """Return the samples of the first pass, by their content."""
        return [row for batch in self.batches if not batch["turn"] for row in batch["rows"]]

    @property
    def order(self) -> list[int]:
        """Return the samples of the first pass, by their index."""
        indices: list[int] = self.orders[0]["indices"] if self.orders else []
        return indices

    @property
    def told(self) -> bool:
        """Whether the content tells samples apart."""
        rows = self.rows
        return len(set(rows)) >= max(_ENOUGH, _ALIKE * len(rows))

    def length(self) -> tuple[int, bool]:
        """Return how many batches the first pass has, and whether it has no more."""
        if self.orders:
            return self.orders[0]["batches"], self.orders[0]["ended"]
        ended = [event for event in self.left if not event["turn"] and not event["cut"]]
        return sum(not batch["turn"] for batch in self.batches), bool(ended)


def _readings(rank: RankSeen) -> list[_Reading]:
    found: dict[int, _Reading] = {}
    at: dict[tuple[str, bool], _Reading] = {}
    latest: _Reading | None = None
    for event in rank.events:
        if event.kind == "loader":
            made = found[event["loader_id"]] = at[event.where, event.evaluating] = _Reading(event)
            made.orders, made.batches = [], []
        elif event.kind == "order":
            found[event["loader_id"]].orders.append(event)
        elif event.kind == "left":
            found[event["loader_id"]].left.append(event)
        elif event.kind == "batch":
            one = found[event["loader_id"]]
            before = one.batches[-1] if one.batches else event
            one.trains |= event["turn"] == before["turn"] and event.step > before.step
            one.batches.append(event)
            latest = None if event.evaluating else one
        elif event.kind == "random":
            if (reading := at.get((event.where, event.evaluating))) is not None:
                reading.random.setdefault(event["worker"], event["drew"])
        elif event.kind in ("backward", "step") and latest is not None:
            latest.trains = True
    return list(found.values())


def _together(seen: Seen, *, trains: bool = True) -> Iterator[list[_Reading]]:
    """Yield what all ranks read at the same line of the script."""
    by_rank: list[dict[tuple[str, int], _Reading]] = []
    for rank in seen.ranks:
        count: Counter[str] = Counter()
        by_rank.append({})
        for reading in _readings(rank):
            if reading.trains == trains and reading.batches:
                where = reading.loader.where
                by_rank[-1][where, count[where]] = reading
                count[where] += 1
    for key, reading in by_rank[0].items():
        if all(key in others for others in by_rank):
            yield [reading, *(others[key] for others in by_rank[1:])]


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")


def _same_data(readings: list[_Reading]) -> bool:
    """Whether an index means the same sample on all ranks."""
    first = readings[0]
    data = {reading.loader["data"] for reading in readings}
    if len(data) > 1 or None in data or not all(reading.orders for reading in readings):
        return False
    if any(reading.order != first.order for reading in readings) or first.random.get(-1):
        return True
    # With equal indices and no augmentation the samples have to be equal, unless `__getitem__`
    # itself reads another part on each rank.
    drew = any(drawn for reading in readings for drawn in reading.random.values())
    return drew or all(set(reading.rows) & set(first.rows) for reading in readings)


def _same_samples(readings: list[_Reading]) -> bool:
    first = readings[0]
    if _same_data(readings):
        whole = [reading.orders[0] for reading in readings]
        if any(order["truncated"] for order in whole):
            return all(o["count"] == first.loader["base_length"] and o["ended"] for o in whole)
        return all(sorted(reading.order) == sorted(first.order) for reading in readings)
    return first.told and all(set(reading.rows) == set(first.rows) for reading in readings)


def _shuffled_differently(readings: list[_Reading]) -> bool:
    if not all(reading.orders and reading.loader["distributed"] for reading in readings):
        return False
    seeds = {(r.orders[0]["seed"], r.orders[0]["set_epoch"]) for r in readings}
    return len(seeds) > 1 and all(reading.loader["shuffle"] for reading in readings)


def _made(readings: list[_Reading]) -> str:
    loader = readings[0].loader
    return loader["made"] or loader.where


@rule(
    "SS101",
    "error",
    "all ranks train the same samples",
    "Every sample counts once per rank: more ranks do the same work again instead of more of it.",
)
def all_ranks_train_the_same_samples(seen: Seen) -> Iterator[Found | NotSeen]:
    """Judge by the first pass over each loader; without one, by what the model was given."""
    together = list(_together(seen))
    for readings in together:
        first = readings[0]
        if first.loader["iterable"] or not _same_samples(readings):
            continue
        n = len(set(first.order)) or len(set(first.rows))
        what = f"each of the {seen.world_size} ranks read the same {n} samples in one epoch"
        if first.orders and first.loader["base_length"]:
            what += f", of {first.loader['base_length']} in the data set"
        begins = "; ".join(f"rank {k} began with {_some(r.order)}" for k, r in enumerate(readings))
        yield Found(
            _made(readings), f"{what} ({begins})", _with_sampler(seen.line(_made(readings)))
        )
    if not together and not any(_readings(seen.ranks[0])):
        yield from _same_rows(seen)


def _same_rows(seen: Seen) -> Iterator[Found]:
    """Find equal batches in the forward passes of a script that has no loader."""
    passes = [[f for f in rank.of("forward") if _trained(f)] for rank in seen.ranks]
    first = passes[0]
    if len(first) < 3 or len({row for one in first for row in one["rows"]}) < 2:
        return
    if all([f["rows"] for f in own[:3]] == [f["rows"] for f in first[:3]] for own in passes):
        told = f"all {seen.world_size} ranks were given the same {first[0]['n']} samples"
        remedy = "Seed what draws the batches by the rank, or let each rank take its own share."
        yield Found(first[0].where, f"{told} in each of the first 3 forward passes", remedy)


def _trained(forward: Event) -> bool:
    kept = forward.get("wrapped") and forward.get("training") and forward.get("grad")
    return bool(kept and forward.get("rows"))


def _with_sampler(line: str) -> str:
    """Return the change that gives a loader a DistributedSampler."""
    try:
        tree = ast.parse(line)
    except SyntaxError:
        tree = ast.Module([], [])
    for call in ast.walk(tree):
        if (
            isinstance(call, ast.Call)
            and ast.unparse(call.func).endswith("DataLoader")
            and call.args
        ):
            kept = [k for k in call.keywords if k.arg not in ("shuffle", "sampler")]
            sampler = ast.parse(f"DistributedSampler({ast.unparse(call.args[0])})", mode="eval")
            call.keywords = [*kept, ast.keyword("sampler", sampler.body)]
            return f"- {line}\n+ {ast.unparse(tree)}"
    return "Give the loader `sampler=DistributedSampler(dataset)` instead of `shuffle=True`."


@rule(
    "SS102",
    "error",
    "the ranks' shares overlap",
    "Samples that several ranks read count more than the others in every epoch.",
)
def shares_overlap(seen: Seen) -> Iterator[Found | NotSeen]:
    """Judge by indices of the same data, else by the samples' content."""
    for readings in _together(seen):
        first = readings[0].loader
        if first["iterable"] or _same_samples(readings) or _shuffled_differently(readings):
            continue
        known = _same_data(readings)
        padding = seen.world_size * (1 if first["distributed"] else first["batch_size"] or 1)
        shares = [Counter(r.order if known else r.rows) for r in readings]
        if any(max(share.values(), default=2) > 1 + (len(share) < padding) for share in shares):
            continue  # drawn with replacement, or endless
        if not known and not all(reading.told for reading in readings):
            continue
        (a, b), common = max(
            (((a, b), shares[a].keys() & shares[b].keys()) for a, b in _pairs(shares)),
            key=lambda pair: len(pair[1]),
        )
        least = padding if known else _MUCH * len(shares[a])
        if len(common) > least:
            which = f" (samples {_some(sorted(common))})" if known else ""
            told = f"ranks {a} and {b} both read {len(common)} of their {len(shares[a])} samples"
            remedy = "Cut the data by `dataset[rank::world_size]`, or use a DistributedSampler."
            yield Found(_made(readings), told + which, remedy)


def _pairs(shares: list[Counter[int]]) -> Iterator[tuple[int, int]]:
    yield from combinations(range(len(shares)), 2)


@rule(
    "SS103",
    "warning",
    "set_epoch is never called: every epoch has the same order",
    "A DistributedSampler shuffles by its epoch's number, which stays 0 until it is told.",
)
def same_order_in_every_epoch(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the first two passes of a sampler that knows epochs."""
    for first, *_ in _together(seen):
        if first.loader["set_epoch"] is None or not first.loader["shuffle"]:
            continue
        if len(first.orders) < 2:
            yield NotSeen("only one epoch was read")
            continue
        one, two = first.orders[:2]
        if one["indices"] != two["indices"] or sorted(first.order) == first.order:
            continue
        line = seen.line(first.loader.where)
        told = f"epochs 1 and 2 read the same samples in the same order ({_some(first.order)})"
        told += f"; the sampler's epoch was {one['set_epoch']} and {two['set_epoch']}"
        loop = f"- {line}\n+ loader.sampler.set_epoch(epoch)\n+ {line}"
        remedy = (
            loop if line.startswith("for ") else "Call `sampler.set_epoch(epoch)` in each epoch."
        )
        yield Found(first.loader.where, told, remedy)


@rule(
    "SS104",
    "warning",
    "nothing is shuffled",
    "Neighbours in the data set, often of one class, always share a batch.",
    least_ranks=1,
)
def nothing_is_shuffled(seen: Seen) -> Iterator[Found | NotSeen]:
    """Ascending indices in a loader that trains: a warning if shuffling was asked for."""
    for readings in _together(seen):
        orders = [r.order for r in readings]
        if readings[0].loader["data"] is None or any(len(order) < _ENOUGH for order in orders):
            continue
        if any(
            sorted(order) != order or r.length()[0] < 2
            for r, order in zip(readings, orders, strict=True)
        ):
            continue
        loader = readings[0].loader
        told = f"rank 0 read its samples in the order of the data set ({_some(orders[0])})"
        if loader["asked"]:
            told += f", although the loader of {loader['asked']} shuffles the same data set"
        elif loader["shuffle"]:
            told += f", although {loader['sampler']} was told to shuffle"
        asked = bool(loader["asked"] or loader["shuffle"])
        yield Found(
            loader["sampler_made"] or _made(readings),
            told,
            "Shuffle in training: `DistributedSampler(dataset, shuffle=True)`.",
            None if asked else "advice",
        )


@rule(
    "SS105",
    "error",
    "a stream is not split over the ranks",
    "An IterableDataset has no sampler: each rank reads all of it unless it skips by itself.",
)
def stream_is_not_split_over_ranks(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the content of the first samples."""
    for readings in _together(seen):
        first = readings[0]
        if not first.loader["iterable"] or len(set(first.rows)) < _ENOUGH:
            continue
        common = set(first.rows).intersection(*(r.rows for r in readings[1:]))
        if len(common) * 2 >= len(set(first.rows)):
            n = len(set(first.rows))
            told = f"{len(common)} of the first {n} samples of rank 0 came on all ranks"
            where = first.loader["reads"] or _made(readings)
            yield Found(where, told, f"Let each rank take its own part: `{_SPLIT}`.")


@rule(
    "SS106",
    "error",
    "a stream is not split over loader workers",
    "Each worker has a copy of the IterableDataset and reads all of it: every sample comes again.",
    least_ranks=1,
)
def stream_is_not_split_over_workers(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find as many equal batches in a row as there are workers, again and again."""
    for reading in (reading for rank in seen.ranks for reading in _readings(rank)):
        workers = reading.loader["workers"]
        if not reading.loader["iterable"] or workers < 2:
            continue
        batches = [tuple(batch["rows"]) for batch in reading.batches if not batch["turn"]]
        rounds = [batches[at : at + workers] for at in range(0, len(batches), workers)]
        rounds = [batch for batch in rounds if len(batch) == workers]
        if len(set(batches)) >= 2 and all(len(set(batch)) == 1 for batch in rounds):
            told = f"all {workers} workers yielded the same samples, in {len(rounds)} rounds"
            remedy = "Split by `torch.utils.data.get_worker_info()`: its `id` and `num_workers`."
            yield Found(reading.loader["reads"] or _made([reading]), told, remedy)
            return


@rule(
    "SS107",
    "warning",
    "padding duplicates are counted in evaluation",
    "The sampler repeats samples to give all ranks equally many, and the metric counts them twice.",
)
def padding_is_counted(seen: Seen) -> Iterator[Found | NotSeen]:
    """Find repeated indices in an evaluation whose sums are then reduced over the ranks."""
    for readings in _together(seen, trains=False):
        first = readings[0]
        orders = [reading.order for reading in readings]
        if not _same_data(readings) or not first.loader["distributed"]:
            continue
        if not any(batch.evaluating for batch in first.batches) or first.orders[0]["truncated"]:
            continue
        counts = Counter(index for order in orders for index in order)
        twice = sorted(index for index, times in counts.items() if times > 1)
        if not twice or len(twice) >= seen.world_size or len(counts) != first.loader["base_length"]:
            continue
        how = _reduced_after(seen.ranks[0], first)
        if how != "all_reduce":
            why = f"after `{how}` the script may leave them out" if how else "nothing is reduced"
            yield NotSeen(f"{why} ({len(twice)} samples were evaluated twice)")
            continue
        told = f"{len(counts)} samples were evaluated {counts.total()} times: {_some(twice)} twice"
        remedy = "Give rank r the samples `range(r, len(dataset), world_size)` by `Subset` instead."
        yield Found(first.loader["sampler_made"] or _made(readings), told, remedy)


def _reduced_after(rank: RankSeen, reading: _Reading) -> str:
    """Return the collective by which an evaluation's results meet; empty if none was seen."""
    batches = iter(rank.of("batch", "collective"))
    ours = False
    for event in batches:
        if event.kind == "batch":
            ours = event["loader_id"] == reading.loader["loader_id"]
        elif ours and event["kind"] not in ("barrier", "broadcast"):
            return "all_reduce" if event["kind"] in ("all_reduce", "reduce") else event["kind"]
    return ""


def _alike_in_workers(reading: _Reading) -> list[str]:
    """Return the sources from which all workers drew the same numbers."""
    drawn = [drew for worker, drew in sorted(reading.random.items()) if worker >= 0]
    if len(drawn) < 2:
        return []
    return [name for name in drawn[0] if all(drew.get(name) == drawn[0][name] for drew in drawn)]


@rule(
    "SS108",
    "warning",
    "loader workers draw the same random numbers",
    "Samples that are read side by side are augmented in the same way, so that there is less of it.",
    least_ranks=1,
)
def workers_draw_the_same(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the random states with which the workers of a loader drew for their first samples."""
    for readings in _together(seen):
        names = _alike_in_workers(readings[0])
        if names:
            workers = len(readings[0].random)
            told = f"{workers} workers of rank 0 began with the same state of {', '.join(names)}"
            remedy = "Seed by `torch.initial_seed()`, which differs in each worker, or not at all."
            yield Found(_made(readings), f"{told} and drew from it", remedy)


@rule(
    "SS109",
    "warning",
    "all ranks draw the same random numbers",
    "The ranks' samples are augmented in the same way, so that there is less of it.",
)
def ranks_draw_the_same(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the random states with which the ranks drew for their first samples."""
    for readings in _together(seen):
        if _same_samples(readings):
            continue  # that is the cause
        first = readings[0].random
        same = {
            name
            for worker, drew in first.items()
            for name, states in drew.items()
            if all(r.random.get(worker, {}).get(name) == states for r in readings)
        }
        if names := sorted(same.difference(_alike_in_workers(readings[0]))):
            told = f"all {seen.world_size} ranks began with the same state of {', '.join(names)}"
            remedy = "After the model is built, seed by the rank: `torch.manual_seed(seed + rank)`."
            yield Found(_made(readings), f"{told} and drew from it in the data set", remedy)


@rule(
    "SS110",
    "error",
    "ranks shuffle differently under a DistributedSampler",
    "Each rank takes its share of another order: some samples come twice, others never.",
)
def shuffled_differently(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare seeds and epochs of the samplers."""
    for readings in _together(seen):
        if not _shuffled_differently(readings) or _same_samples(readings):
            continue
        orders = [reading.orders[0] for reading in readings]
        seeds = "; ".join(
            f"rank {k} has seed {o['seed']}, epoch {o['set_epoch']}" for k, o in enumerate(orders)
        )
        counts = Counter(index for reading in readings for index in reading.order)
        twice = sum(times > 1 for times in counts.values())
        told = f"{seeds}: {twice} samples came on several ranks"
        if readings[0].loader["base_length"] and not orders[0]["truncated"]:
            told += f", {readings[0].loader['base_length'] - len(counts)} on none"
        same = len({order["seed"] for order in orders}) == 1
        what = "epoch by `set_epoch`" if same else "seed"
        where = readings[0].loader.where if same else readings[0].loader["sampler_made"]
        yield Found(where or _made(readings), told, f"Give all ranks' samplers the same {what}.")


@rule(
    "SS602",
    "error",
    "the ranks have uneven numbers of batches",
    "A rank that is through leaves the others waiting for it in a collective, for ever.",
)
def uneven_batches(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare how many batches the first pass has on each rank."""
    if seen.any("join"):
        return
    for readings in _together(seen):
        lengths = [reading.length() for reading in readings]
        fewest = min((n for n, ended in lengths if ended), default=None)
        if fewest is None or all(n == fewest for n, _ in lengths):
            continue
        if not seen.any("wrap") and not _meets(seen.ranks[0]):
            continue  # nobody waits
        if any("MIN" in str(event.get("op")).upper() for event in seen.any("collective")):
            yield NotSeen("the ranks agreed on a minimum, perhaps of their batches")
            continue
        short = [k for k, (n, _) in enumerate(lengths) if n == fewest]
        waits = [k for k, (n, _) in enumerate(lengths) if n > fewest]
        told = "; ".join(
            f"rank {k} has {n}{'' if ended else ' or more'} batches in an epoch"
            for k, (n, ended) in enumerate(lengths)
        )
        told += f": after batch {fewest} rank {_some(short)} leaves the loop, and rank "
        told += f"{_some(waits)} waits in the backward pass of batch {fewest + 1}"
        remedy = "Use a DistributedSampler, which gives all ranks equally many, or DDP's `Join`."
        yield Found(readings[0].loader.where, told, remedy)


def _meets(rank: RankSeen) -> bool:
    """Whether the training has collectives of its own."""
    batches = 0
    for event in rank.of("batch", "collective"):
        batches += event.kind == "batch"
        if event.kind == "collective" and batches == 1 and event["kind"] == "all_reduce":
            return not event.evaluating
    return False


@rule(
    "SS711",
    "error",
    "the same batch at every step",
    "The model is trained on one batch of the data set and never sees the rest.",
    least_ranks=1,
)
def same_batch_at_every_step(seen: Seen) -> Iterator[Found | NotSeen]:
    """Compare the batches of a loader that has more than one."""
    for readings in _together(seen):
        first = readings[0]
        batches = first.batches
        if not first.orders or first.length()[0] < 2:
            continue
        rows = {tuple(batch["rows"]) for batch in batches}
        steps = {batch.step for batch in batches}
        distinct = len(set(batches[0]["rows"])) > 1
        told = ""
        if len(batches) == 1 and seen.complete:
            passes = [f for f in seen.ranks[0].of("forward") if _trains(f)]
            same = {tuple(f["rows"]) for f in passes}
            if len(passes) >= 5 and len(same) == 1 and seen.ranks[0].steps >= 5:
                told = (
                    f"{len(passes)} forward passes of rank 0 had the same {passes[0]['n']} samples"
                )
        elif len(rows) == 1 and len(steps) >= 3:
            told = f"{len(batches)} batches that rank 0 read had the same {batches[0]['n']} samples"
        if told and distinct:
            told += f", of {first.length()[0]} batches in the loader"
            remedy = "Read on in the loop: `for batch in loader:`, not `next(iter(loader))`."
            yield Found(batches[0].where, told, remedy)


def _trains(forward: Event) -> bool:
    return bool(forward.get("grad") and forward.get("training") and forward.get("rows"))
