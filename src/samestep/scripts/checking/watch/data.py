"""Watch data: what the loaders are, in what order they read, and what the samples are.

Epochs are cut short: `job.steps` batches, then the last one; what lies between is only counted.
`len(loader)` is the length of the short epoch, so that loops and conditions that rely on it hold.
"""

import contextlib
import itertools
import math
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, DistributedSampler, dataloader, get_worker_info
from torch.utils.data._utils import fetch

from samestep.base.patches import Patch, patched, patched_when_imported
from samestep.base.trees import tree_leaves
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.samples import (
    base_of,
    fingerprint,
    lost_rows,
    number_of,
    places_of,
    random_states,
    rows_of,
    views_of,
)
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_SAMPLER_MADE = Probe((DistributedSampler, "__init__"))
_FETCHERS = fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher  # noqa: SLF001 - not public
_FETCH = Probe(*((kind, "fetch") for kind in _FETCHERS))
_JOIN = Probe((Join, "__enter__"))
_SEEDS = {
    "torch": Probe((torch, "manual_seed")),
    "numpy": Probe((np.random, "seed")),
    "random": Probe((random, "seed")),
}
_PERMUTE = Probe((torch, "randperm"))
_AGAIN = 3  # steps in a row that draw the same
_WHOLE_TURNS = 2  # of each loader; what is read later is like that
_MOST_INDICES = 20_000
_MOST_S = 1.0
_MOST_NOTED = 64  # batches of one loader whose rows are noted, if its epochs have no end
_MADE = "_samestep_made"  # where the user's code made a loader or a sampler
_LEFT, _FEW = "_samestep_left", 30  # batches of a process that are compared with their samples


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Record the events of the script's loaders, and cut their epochs short."""
    loaders = _Loaders(recorder)
    iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - there is no public place
    with (
        listening(
            (probes.LOADER_MADE, loaders.on_made),
            (_SAMPLER_MADE, loaders.on_made),
            (probes.LOADER_ITER, loaders.on_iter),
            (probes.ITERATOR_MADE, loaders.on_iterator_made),
            (probes.ITERATOR_RESET, loaders.on_reset),
            (_FETCH, loaders.on_fetch),
            (_JOIN, lambda _call: recorder.note(ev.JoinEntered())),
            (_PERMUTE, loaders.on_permute),
            *((probe, partial(loaders.on_seed, name)) for name, probe in _SEEDS.items()),
        ),
        patched(
            (DataLoader, "__len__", loaders.around_length),
            (iterator, "__next__", loaders.around_next),
        ),
        patched_when_imported({"datasets.arrow_dataset": loaders.of_hugging_face}),
    ):
        yield


@dataclass
class _Group:  # loaders that look alike, as one
    number: int
    loader: weakref.ref[Any]
    turns: int = 0
    noted: int = 0
    ended: bool = False  # whether the script has asked for more than there was


@dataclass
class _Turn:  # one pass over a loader
    group: _Group
    number: int
    limit: int | None  # batches, then comes the last one; None reads them all
    iterable: bool
    batches: int = 0
    cut: bool = False
    indices: list[int] = field(default_factory=list)
    columns: list[list[torch.Tensor]] = field(default_factory=list)
    """Of each batch the tensors that have one number for each sample."""
    given: deque[torch.Tensor] = field(default_factory=partial(deque, maxlen=8))
    """What was gathered since."""


@dataclass
class _Drawn:  # what a line that draws or seeds began with in a step
    value: int
    step: int
    times: int = 1
    state: Any = None  # right after it was seeded


class _Loaders:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._steps = recorder, recorder.job.steps
        self._groups: dict[tuple[Any, ...], _Group] = {}
        self._count = 0
        self._starting: list[_Turn] = []
        self._shuffled: dict[int, str] = {}  # where a loader was asked to shuffle a data set
        self._shards: dict[int | None, str] = {}  # where one of a data set was asked for, by length
        self._permutations = 0  # calls of `torch.randperm`
        self._drawn: dict[tuple[str, str], _Drawn] = {}  # by source and line

    def on_made(self, call: ProbedCall) -> Around:
        owner = call.args[0]
        vars(owner).setdefault(_MADE, (self._recorder.where(), self._recorder.is_direct("torch")))
        yield
        if isinstance(owner, DataLoader) and call.argument(3, "shuffle"):
            self._shuffled[id(owner.dataset)] = getattr(owner, _MADE)[0]

    def on_iter(self, call: ProbedCall) -> Around:
        if self._recorder.quiet:
            return
        turn = self._turn(call.args[0])
        self._starting.append(turn)
        try:
            iterator = yield
        finally:
            self._starting.pop()
        iterator._samestep_turn = turn  # noqa: SLF001 - our own mark
        if (fetcher := getattr(iterator, "_dataset_fetcher", None)) is not None:
            fetcher._samestep_turn = turn  # noqa: SLF001 - our own mark

    def around_length(self, original: Callable[[Any], int], loader: Any) -> int:
        whole = original(loader)
        length = min(whole, self._steps + (not _is_iterable(loader)))
        if length < whole:
            self._recorder.once(ev.LengthCut(whole))
        return length

    def _turn(self, loader: Any) -> _Turn:
        where, hooks = self._recorder.where(), self._recorder.hooks
        # Rank 0 may have left an average in evaluation mode: all ranks have to cut an epoch alike.
        trains = hooks.loader is not None and loader.dataset is hooks.loader.dataset
        evaluating = not torch.is_grad_enabled() or (hooks.evaluating and not trains)
        iterable = _is_iterable(loader)
        length = None if iterable else _length(loader.dataset)
        key = (type(loader.dataset), length, loader.batch_size, where, evaluating)
        group = self._groups.get(key)
        # An epoch may make its loader anew; two that live side by side are two.
        if group is None or group.loader() not in (None, loader):
            self._count += 1
            group = self._groups[key] = _Group(self._count, weakref.ref(loader))
            self._note_loader(loader, group, length, iterable=iterable)
        group.loader = weakref.ref(loader)
        later = group.turns >= _WHOLE_TURNS and group.ended
        limit = 1 if later else self._steps
        group.turns += 1
        turn = _Turn(group, group.turns - 1, limit, iterable)
        self._recorder.evaluated = turn if evaluating else self._recorder.evaluated
        return turn

    def _note_loader(
        self, loader: Any, group: _Group, length: int | None, *, iterable: bool
    ) -> None:
        base, _ = base_of(loader.dataset, [])
        code = getattr(getattr(type(base), "__iter__", None), "__code__", None)
        self._recorder.note(
            ev.LoaderRead(
                loader_id=group.number,
                data=None if iterable else fingerprint(base),
                own=None if iterable else fingerprint(loader.dataset),
                views=views_of(base, _length(base)),
                shard=self._shards.get(length, ""),
                length=length,
                base_length=None if iterable else _length(base),
                batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
                workers=loader.num_workers,
                iterable=iterable,
                reads=self._recorder.where_of(code) if iterable and code is not None else "",
                made=getattr(loader, _MADE, ("",))[0],
                asked=self._shuffled.get(id(loader.dataset)),
                **_sampler(loader),
            )
        )

    def of_hugging_face(self, module: Any) -> list[Patch]:
        """Return the patch that remembers where a data set was cut."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            part = original(*args, **kwargs)
            self._shards[_length(part)] = self._recorder.where()
            return part

        return [(module.Dataset, "shard", around)]

    def on_iterator_made(self, call: ProbedCall) -> Around:
        """Cut the order of a loader that reads in this process."""
        iterator, loader = call.args
        yield
        if loader.num_workers == 0:
            self._cut(iterator, loader)

    def on_reset(self, call: ProbedCall) -> Around:
        """Cut the order of a loader with workers, before they learn what to read."""
        iterator, loader, *_ = call.args
        yield
        self._cut(iterator, loader)

    def _cut(self, iterator: Any, loader: Any) -> None:
        if self._starting and not self._starting[-1].iterable:
            turn = self._starting[-1]
            iterator._sampler_iter = self._shortened(iterator._sampler_iter, turn, loader)  # noqa: SLF001

    def _shortened(self, order: Iterator[Any], turn: _Turn, loader: Any) -> Iterator[Any]:
        """Yield the first batches of indices and the last one; note them all."""
        if turn.limit == 1 and turn.number >= _WHOLE_TURNS:
            turn.cut = True
            yield from itertools.islice(order, 1)
            return
        single = loader.batch_sampler is None
        promised, permutations = _length(loader._index_sampler), self._permutations  # noqa: SLF001
        batches: list[Any] = []
        count = 0
        ended = False
        until = time.perf_counter() + _MOST_S
        for batch in order:
            batches.append(batch if single or hasattr(batch, "__len__") else list(batch))
            count += 1 if single else len(batches[-1])
            if time.perf_counter() > until or (
                count > _MOST_INDICES if promised is None else len(batches) > promised
            ):
                break
        else:
            ended = True
        flat = batches if single else itertools.chain.from_iterable(batches)
        indices = [number_of(index) for index in itertools.islice(flat, _MOST_INDICES)]
        with contextlib.suppress(Exception):  # indices that are not numbers
            _, indices = base_of(loader.dataset, indices)
        turn.indices = indices
        self._recorder.note(
            ev.OrderDrawn(
                loader_id=turn.group.number,
                turn=turn.number,
                indices=indices,
                batches=len(batches),
                count=count,
                ended=ended,
                truncated=not ended or count > len(indices),
                left_out=(_length(loader.sampler) or 0) - count
                if loader.drop_last and ended
                else 0,
                permuted=self._permutations > permutations,
                **_sampler(loader),
            )
        )
        if not ended and (promised is None or len(batches) > promised):  # it has no end
            turn.limit = None  # the script counts its steps itself
            yield from batches
            yield from order
            return
        yield from batches[: self._steps]
        turn.cut = len(batches) > self._steps + 1
        if ended:
            yield from batches[self._steps :][-1:]

    def around_next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Note a batch, or end the pass where it is cut."""
        turn: _Turn | None = getattr(iterator, "_samestep_turn", None)
        if turn is None or self._recorder.quiet:
            return original(iterator)
        if turn.iterable and turn.limit is not None and turn.batches >= turn.limit:
            turn.cut = turn.group.ended = self._recorder.is_cut = True
            if hasattr(iterator, "_shutdown_workers") and not iterator._persistent_workers:  # noqa: SLF001
                iterator._shutdown_workers()  # noqa: SLF001 - as it does at its own end
            raise StopIteration
        try:
            batch = original(iterator)
        except StopIteration:
            if not turn.group.ended or turn.number < _WHOLE_TURNS:
                self._recorder.note(ev.PassEnded(turn.group.number, turn=turn.number, cut=turn.cut))
            turn.group.ended = True
            self._recorder.is_cut |= turn.cut
            raise
        turn.batches += 1
        turn.group.noted += 1
        if turn is self._recorder.evaluated and turn.batches <= _MOST_NOTED:
            leaves = tree_leaves(batch)
            turn.columns.append([t for t in leaves if torch.is_tensor(t) and t.ndim == 1])
        if turn.group.noted <= _MOST_NOTED:
            with self._recorder.unwatched():
                n, rows = rows_of(batch)
            self._recorder.note(ev.BatchRead(turn.group.number, turn=turn.number, n=n, rows=rows))
        return batch

    def on_seed(self, source: str, call: ProbedCall) -> Around:
        """Note seeds that are equal in each of some steps, with draws in between."""
        if self._recorder.hooks.evaluating or get_worker_info() is not None:
            return
        where, state = self._recorder.where(), random_states(None).get(source)
        before = self._drawn.get((source, where))
        has_drawn = before is None or before.state != state
        yield
        self._follow(source, where, number_of((call.args, call.kwargs)), counts=has_drawn)
        self._drawn[source, where].state = random_states(None).get(source)

    def on_permute(self, _call: ProbedCall) -> None:
        self._permutations += 1

    def _follow(self, source: str, where: str, value: int, *, counts: bool) -> None:
        """Count the steps in a row that begin to draw at a line from the same."""
        step = self._recorder.hooks.steps
        drawn = self._drawn.setdefault((source, where), _Drawn(value, step))
        if drawn.step != step:
            again = counts and drawn.value == value and drawn.step == step - 1
            drawn.times = drawn.times + 1 if again else 1
            drawn.value, drawn.step = value, step
            if drawn.times == _AGAIN:
                self._recorder.note(ev.DrawnAgain(source))

    def on_fetch(self, call: ProbedCall) -> Around:
        """Record a process's draws for its first samples, and the samples that collating drops."""
        fetcher = call.args[0]
        # A worker was forked while its loader was starting.
        starting = self._starting[-1] if self._starting else None
        turn: _Turn | None = getattr(fetcher, "_samestep_turn", starting)
        first = turn is not None and not turn.number
        if turn is not None and first:
            fetcher._samestep_turn = None  # noqa: SLF001 - our own mark
            fetcher._samestep_group = turn.group.number  # noqa: SLF001 - as above
        streams = type(fetcher) is _FETCHERS[1]
        first &= not streams  # which seeds alike to share out one order
        group: int = getattr(fetcher, "_samestep_group", 0)
        left = getattr(fetcher, _LEFT, _FEW)
        compared = group and fetcher.auto_collation and left
        if not (first or compared):
            return
        setattr(fetcher, _LEFT, left - 1 if compared else left)
        base, _ = base_of(fetcher.dataset, [])
        before = random_states(base) if first else {}
        after = list[dict[str, tuple[int, int]]]()
        collate = fetcher.collate_fn
        collected = list[Any]()

        def collated(samples: Any) -> Any:
            if first:
                after.append(random_states(base))  # what collating draws is not the data set's
            collected.extend(samples if isinstance(samples, list) else ())
            return collate(samples)

        fetcher.collate_fn = collated
        try:
            batch = yield
        finally:
            fetcher.collate_fn = collate
            if first:
                self._note_drawn(group, before, after[0] if after else random_states(base))
        lost, whole, places = 0, 0, list[int]()
        with self._recorder.unwatched(), contextlib.suppress(Exception):
            whole, places = places_of(collected) if streams else (0, places)
            lost = lost_rows(collected, batch) if compared and not streams else 0
        if places:
            worker = getattr(get_worker_info(), "id", -1)
            self._recorder.note(ev.StreamPlaces(group, worker=worker, whole=whole, places=places))
        if lost:
            self._recorder.note(ev.SamplesLost(group, given=len(collected), lost=lost))

    def _note_drawn(
        self, group: int, before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]
    ) -> None:
        drew = {
            name: [state[0], after[name][1]]
            for name, state in before.items()
            if name in after and after[name][0] != state[0]
        }
        worker = get_worker_info()
        number = -1 if worker is None else worker.id
        self._recorder.note(ev.RandomDrawn(group, worker=number, drew=drew))


def _is_iterable(loader: Any) -> bool:
    kind = loader._dataset_kind  # noqa: SLF001 - there is no public place
    return bool(kind == dataloader._DatasetKind.Iterable)  # noqa: SLF001


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _sampler(loader: Any) -> dict[str, Any]:
    chain = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    while len(chain) < 4:
        inner = getattr(chain[-1], "sampler", None) or getattr(chain[-1], "batch_sampler", None)
        if inner is None:
            break
        chain.append(inner)
    own = next((s for s in chain if hasattr(s, "set_epoch")), chain[-1])
    where, direct = getattr(own, _MADE, ("", False))
    return {
        "sampler": type(own).__name__,
        "sampler_made": where,
        "direct": direct,
        "distributed": isinstance(own, DistributedSampler) or hasattr(own, "num_replicas"),
        # Accelerate's samplers take a part of the batches of another's.
        "parts": math.prod(
            getattr(s, "num_replicas", None) or getattr(s, "num_processes", None) or 1
            for s in chain
        ),
        "set_epoch": getattr(own, "epoch", None) if hasattr(own, "set_epoch") else None,
        "seed": getattr(own, "seed", None),
        "shuffle": getattr(own, "shuffle", None) or type(own).__name__ == "RandomSampler",
    }
