"""Watch data: what the loaders are, in what order they read, and what the samples are.

Kinds: `loader` (one for all that look alike: a loader may be made anew in each epoch), `order` (one
pass over it, as its sampler gives it), `batch`, `left` (a pass that came to its end), `random`
(the random numbers that a data set drew for its first samples, in this process or in a worker),
`lost` (samples of which a batch has no row),
`join` (a context that lets ranks have batches left over), and `cut_length` (a length that was asked
for, and told as that of the short epoch).

Epochs are cut short: `job.steps` batches, then the last one; what lies between is only counted.
`len(loader)` is the length of the short epoch, so that loops and conditions that rely on it hold.
"""

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, DistributedSampler, dataloader, get_worker_info
from torch.utils.data._utils import fetch

from samestep.base.patches import patched
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.checking.samples import (
    base_of,
    fingerprint,
    lost_rows,
    number_of,
    random_states,
    rows_of,
)

_WHOLE_TURNS = 2  # of each loader; what is read later is like that
_MOST_INDICES = 20_000
_MOST_S = 1.0
_MOST_NOTED = 64  # batches of one loader whose rows are noted, if its epochs have no end
_MADE = "_samestep_made"  # where the user's code made a loader or a sampler
_LEFT, _FEW = "_samestep_left", 30  # batches of a process that are compared with their samples


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note what the script's loaders do while inside, and cut their epochs short."""
    loaders = _Loaders(recorder)
    iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - there is no public place
    with patched(
        (DataLoader, "__init__", loaders.made),
        (DataLoader, "__iter__", loaders.begin),
        (DataLoader, "__len__", loaders.length),
        (iterator, "__init__", loaders.start),
        (iterator, "_reset", loaders.reset),
        (iterator, "__next__", loaders.read),
        (fetch._MapDatasetFetcher, "fetch", loaders.fetch),  # noqa: SLF001
        (DistributedSampler, "__init__", loaders.made),
        (Join, "__enter__", loaders.join),
    ):
        yield


@dataclass
class _Group:
    """Loaders that look alike, as one."""

    number: int
    loader: weakref.ref[Any]
    turns: int = 0
    noted: int = 0
    ended: bool = False  # whether the script has asked for more than there was


@dataclass
class _Turn:
    """One pass over a loader."""

    group: _Group
    number: int
    limit: int | None  # batches, then comes the last one; None reads them all
    iterable: bool
    batches: int = 0
    cut: bool = False
    given: list[Any] = field(default_factory=list)


class _Loaders:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._steps = recorder, recorder.job.steps
        self._groups: dict[tuple[Any, ...], _Group] = {}
        self._count = 0
        self._starting: list[_Turn] = []
        self._shuffled: dict[int, str] = {}  # where a loader was asked to shuffle a data set

    def made(self, original: Callable[..., Any], made: Any, *args: Any, **kwargs: Any) -> None:
        """Remember where a loader or a sampler was made."""
        vars(made).setdefault(_MADE, (self._recorder.where(), self._recorder.is_direct("torch")))
        original(made, *args, **kwargs)
        if isinstance(made, DataLoader) and (kwargs.get("shuffle") or (len(args) > 2 and args[2])):
            self._shuffled[id(made.dataset)] = getattr(made, _MADE)[0]

    def begin(self, original: Callable[..., Any], loader: Any) -> Any:
        if self._recorder.quiet:
            return original(loader)
        turn = self._turn(loader)
        self._starting.append(turn)
        try:
            iterator = original(loader)
        finally:
            self._starting.pop()
        iterator._samestep_turn = turn  # noqa: SLF001 - our own mark
        if (fetcher := getattr(iterator, "_dataset_fetcher", None)) is not None:
            fetcher._samestep_turn = turn  # noqa: SLF001 - our own mark
        return iterator

    def length(self, original: Callable[..., Any], loader: Any) -> int:
        """Return how many batches an epoch has under watch."""
        iterable = loader._dataset_kind == dataloader._DatasetKind.Iterable  # noqa: SLF001
        whole: int = original(loader)
        told = min(whole, self._steps + (not iterable))
        if told < whole:
            self._recorder.once("cut_length", whole=whole)
        return told

    def _turn(self, loader: Any) -> _Turn:
        where, evaluating = self._recorder.where(), self._recorder.hooks.evaluating
        iterable = loader._dataset_kind == dataloader._DatasetKind.Iterable  # noqa: SLF001
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
        return _Turn(group, group.turns - 1, limit, iterable)

    def _note_loader(
        self, loader: Any, group: _Group, length: int | None, *, iterable: bool
    ) -> None:
        base, _ = base_of(loader.dataset, [])
        code = getattr(getattr(type(base), "__iter__", None), "__code__", None)
        self._recorder.note(
            "loader",
            loader_id=group.number,
            data=None if iterable else fingerprint(base),
            length=length,
            base_length=None if iterable else _length(base),
            batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
            workers=loader.num_workers,
            iterable=iterable,
            reads=self._recorder.where_of(code) if iterable and code is not None else "",
            made=getattr(loader, _MADE, ("",))[0],
            **_sampler(loader),
            asked=self._shuffled.get(id(loader.dataset)),
        )

    def start(self, original: Callable[..., Any], iterator: Any, loader: Any) -> None:
        """Cut the order of a loader that reads in this process."""
        original(iterator, loader)
        if loader.num_workers == 0:
            self._cut(iterator, loader)

    def reset(
        self, original: Callable[..., Any], iterator: Any, loader: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Cut the order of a loader with workers, before they learn what to read."""
        original(iterator, loader, *args, **kwargs)
        self._cut(iterator, loader)

    def _cut(self, iterator: Any, loader: Any) -> None:
        if self._starting and not self._starting[-1].iterable:
            turn = self._starting[-1]
            iterator._sampler_iter = self._short(iterator._sampler_iter, turn, loader)  # noqa: SLF001

    def _short(self, order: Iterator[Any], turn: _Turn, loader: Any) -> Iterator[Any]:
        """Yield the first batches of indices and the last one; note them all."""
        if turn.limit == 1 and turn.number >= _WHOLE_TURNS:
            turn.cut = True
            yield from itertools.islice(order, 1)
            return
        single = loader.batch_sampler is None
        promised = _length(loader._index_sampler)  # noqa: SLF001 - what it reads by
        found: list[Any] = []
        count, ended, until = 0, False, time.perf_counter() + _MOST_S
        for batch in order:
            found.append(batch if single or hasattr(batch, "__len__") else list(batch))
            count += 1 if single else len(found[-1])
            if time.perf_counter() > until or (
                count > _MOST_INDICES if promised is None else len(found) > promised
            ):
                break
        else:
            ended = True
        endless = not ended and (promised is None or len(found) > promised)
        self._note_order(found, turn, loader, count=count, single=single, ended=ended)
        if endless:  # the script counts its steps itself
            turn.limit = None
            yield from found
            yield from order
            return
        yield from found[: self._steps]
        turn.cut = len(found) > self._steps + 1
        if ended:
            yield from found[self._steps :][-1:]

    def _note_order(
        self, found: list[Any], turn: _Turn, loader: Any, *, count: int, single: bool, ended: bool
    ) -> None:
        flat = found if single else itertools.chain.from_iterable(found)
        indices = [number_of(index) for index in itertools.islice(flat, _MOST_INDICES)]
        with contextlib.suppress(Exception):  # indices that are not numbers
            _, indices = base_of(loader.dataset, indices)
        self._recorder.note(
            "order",
            loader_id=turn.group.number,
            turn=turn.number,
            indices=indices,
            batches=len(found),
            count=count,
            ended=ended,
            truncated=not ended or count > len(indices),
            # Of a last batch that is not full.
            left_out=(_length(loader.sampler) or 0) - count if loader.drop_last and ended else 0,
            **_sampler(loader),
        )

    def read(self, original: Callable[..., Any], iterator: Any) -> Any:
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
                number = turn.group.number
                self._recorder.note("left", loader_id=number, turn=turn.number, cut=turn.cut)
            turn.group.ended = True
            self._recorder.is_cut |= turn.cut
            raise
        turn.batches += 1
        turn.group.noted += 1
        if turn.group.noted <= _MOST_NOTED:
            number = turn.group.number
            with self._recorder.unwatched():
                n, rows = rows_of(batch)
            self._recorder.note("batch", loader_id=number, turn=turn.number, n=n, rows=rows)
        return batch

    def fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        """Note what random numbers the data set draws for its first samples in a process."""
        # A worker was forked while its loader was starting.
        starting = self._starting[-1] if self._starting else None
        turn: _Turn | None = getattr(fetcher, "_samestep_turn", starting)
        if turn is None or turn.number:
            return self._fetch_all(original, fetcher, index)
        fetcher._samestep_turn = None  # noqa: SLF001 - our own mark
        fetcher._samestep_group = turn.group.number  # noqa: SLF001 - as above
        base, _ = base_of(fetcher.dataset, [])
        before, after = random_states(base), []
        collate = fetcher.collate_fn

        def collated(samples: Any) -> Any:
            after.append(random_states(base))  # what collating draws is not the data set's
            return collate(samples)

        fetcher.collate_fn = collated
        try:
            return self._fetch_all(original, fetcher, index)
        finally:
            fetcher.collate_fn = collate
            then = after[0] if after else random_states(base)
            drew = {
                name: [state[0], then[name][1]]
                for name, state in before.items()
                if name in then and then[name][0] != state[0]
            }
            worker = get_worker_info()
            number = -1 if worker is None else worker.id
            self._recorder.note("random", loader_id=turn.group.number, worker=number, drew=drew)

    def _fetch_all(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        """Fetch a batch of the first pass; note the samples that collating leaves out."""
        group, left = getattr(fetcher, "_samestep_group", None), getattr(fetcher, _LEFT, _FEW)
        if group is None or not fetcher.auto_collation or not left:
            return original(fetcher, index)
        setattr(fetcher, _LEFT, left - 1)
        collate, given, lost = fetcher.collate_fn, list[Any](), 0

        def collated(samples: Any) -> Any:
            given.extend(samples if isinstance(samples, list) else ())
            return collate(samples)

        fetcher.collate_fn = collated
        try:
            batch = original(fetcher, index)
        finally:
            fetcher.collate_fn = collate
        with self._recorder.unwatched(), contextlib.suppress(Exception):
            lost = lost_rows(given, batch)
        if lost:
            self._recorder.note("lost", loader_id=group, given=len(given), lost=lost)
        return batch

    def join(self, original: Callable[..., Any], context: Any) -> Any:
        self._recorder.note("join")
        return original(context)


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _sampler(loader: Any) -> dict[str, Any]:
    """Return what a loader's sampler tells of itself, also one inside a batch sampler."""
    chain = [loader.sampler if loader.batch_sampler is None else loader.batch_sampler]
    while len(chain) < 4 and (inner := _inner(chain[-1])) is not None:
        chain.append(inner)
    own = next((s for s in chain if hasattr(s, "set_epoch")), chain[-1])
    where, direct = getattr(own, _MADE, ("", False))
    return {
        "sampler": type(own).__name__,
        "sampler_made": where,
        "direct": direct,
        "distributed": isinstance(own, DistributedSampler) or hasattr(own, "num_replicas"),
        "set_epoch": getattr(own, "epoch", None) if hasattr(own, "set_epoch") else None,
        "seed": getattr(own, "seed", None),
        "shuffle": getattr(own, "shuffle", None) or type(own).__name__ == "RandomSampler",
    }


def _inner(sampler: Any) -> Any:
    return getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
