"""Samples read one by one through PyTorch's DataLoader and its workers."""

import contextlib
import signal
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice, tee
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from samestep.base.errors import UserError, blame, listed
from samestep.base.startup import forking_servants, stop_signals
from samestep.base.trees import tree_leaves
from samestep.core.data.collating import Collating, as_pair, name_of, unpacked
from samestep.core.data.keyed_random import mix, seed_reading, without_draws
from samestep.core.data.order import Block, Read
from samestep.core.data.prefetch import on_device
from samestep.core.data.source import OrderedSource, ReadOptions

Key = tuple[int, int]
"""An epoch, and the place of a sample."""


class LoaderSource(OrderedSource):
    """A map-style data set read through a DataLoader, in the same order as data in memory."""

    def __init__(self, dataset: Dataset[Any], reading: ReadOptions, num_workers: int) -> None:
        try:
            num_samples = len(dataset)  # type: ignore[arg-type]
        except Exception as error:
            remedy = "__len__ must return the number of samples."
            blame(f"{name_of(dataset)} has no length", error, dataset, remedy=remedy)
        super().__init__(num_samples, reading)
        self._plan, self._name = _Plan(), name_of(dataset)
        self._collates = reading.collate is not None
        reads_batches = hasattr(dataset, "read_batch")
        self._collate: Any = Collating(dataset, reading.collate, whole=reading.whole, packed=True)
        if reads_batches and not self._collates:  # it returns a batch, not samples
            self._collate = _as_it_is if reading.whole else partial(as_pair, dataset)
        self._dataset = _Batched(dataset) if reads_batches else _Keyed(dataset, reading.seed)
        self._loader = DataLoader(
            self._dataset,
            collate_fn=self._collate,
            batch_sampler=self._plan,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            pin_memory=self._world.device.type == "cuda",
            worker_init_fn=ignore_stop_signals,
        )
        # Also at Python's exit, which else waits for ever: it ends what is left by SIGTERM, and
        # the workers ignore that.
        weakref.finalize(self, _end_workers, self._loader)

    def close(self) -> None:
        """End the workers. They ignore SIGTERM, so that Python, at its end, would wait for them."""
        _end_workers(self._loader)

    def _read(self, unread: Iterator[Block], epoch: int) -> Read:
        blocks, wanted = tee(unread)  # the workers are a few batches ahead
        keys = ([(epoch, index) for index in block.inputs.tolist()] for block in wanted)
        for block, (inputs, targets) in zip(blocks, self._batches(keys), strict=True):
            yield block, inputs, targets

    def _read_in_turn(self, batches: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Any]]:
        return self._batches([(0, index) for index in batch] for batch in batches)

    def _batches(self, keys: Iterator[list[Key]]) -> Iterator[tuple[Any, Any]]:
        device, lap = self._world.device, self._reading.lap
        plan = self._plan.read_next(keys)
        try:
            for inputs, targets in on_device(self._started(), device, lap):
                plan.popleft()
                yield inputs, self._cast(targets)
        except Exception as error:
            awaited = [str(index) for _epoch, index in chain(*islice(plan, 1))]
            at = listed(awaited, 5)
            blame_worker(self._loader._iterator, self._name, error, at)  # noqa: SLF001
            _end_workers(self._loader)
            if isinstance(error, UserError):
                # A worker's comes with its traceback in the text; the last line is what it said.
                raise UserError(str(error).rpartition("UserError: ")[2].strip()) from error
            raise

    def _started(self) -> Iterator[Any]:
        """Return the batches of the plan, as workers or this process read them."""
        if not self._loader.num_workers:  # PyTorch's own iterator takes 5 % of a small step
            return (self._collate(self._dataset.__getitems__(keys)) for keys in self._plan)
        with starting_workers():
            return map(unpacked, iter(self._loader))


class _Plan:
    """The batches that a DataLoader reads next, made as it asks for them."""

    def __init__(self) -> None:
        self._keys: Iterator[list[Key]] = iter(())
        self._asked = deque[list[Key]]()

    def read_next(self, keys: Iterator[list[Key]]) -> deque[list[Key]]:
        """Let the next pass read these; return what will hold those that it has asked for."""
        self._keys, self._asked = keys, deque()
        return self._asked

    def __iter__(self) -> Iterator[list[Key]]:
        keys, asked = self._keys, self._asked
        for batch in keys:
            asked.append(batch)
            yield batch


class _Keyed(Dataset[Any]):
    """A data set whose random augmentation depends on (seed, epoch, sample), not on the worker."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._draws: bool | None = None
        """Whether the generators are seeded before each sample; None: not known yet."""

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        dataset, pays = self._dataset, len(keys) > _CHEAP_TO_SEED
        if self._draws is None and pays:  # a data set may find out the seed without being noticed
            seeded, unseeded = self._read(keys[0]), without_draws(lambda: dataset[keys[0][1]])
            self._draws = not _are_equal(seeded, unseeded)
        if not self._draws and pays:
            samples = without_draws(lambda: [dataset[index] for _epoch, index in keys])
            if samples is not None:
                self._seed_for(keys[-1])  # what draws between batches finds the usual state
                return samples
            self._draws = True
        return [self._read(key) for key in keys]

    def _seed_for(self, key: Key) -> None:
        seed_reading(mix(self._seed, *key))

    def _read(self, key: Key) -> Any:
        self._seed_for(key)
        try:
            return self._dataset[key[1]]
        except Exception as error:
            size = len(self._dataset)  # type: ignore[arg-type]
            blame(f"{name_of(self._dataset)} failed at sample {key[1]} of {size}", error)


def _are_equal(first: Any, other: Any) -> bool:
    try:
        pairs = zip(tree_leaves(first), tree_leaves(other), strict=True)
        # NumPy would read all of a data set that a sample refers to.
        return all(a is b or np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    except Exception:
        return False


_CHEAP_TO_SEED = 3
"""Samples: to seed before each of so few costs no more than to find out whether they draw."""


def _as_it_is(batch: Any) -> tuple[Any, None]:
    return batch, None


class _Batched(Dataset[Any]):
    """A data set that draws no random numbers and reads a whole batch of samples at a time."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, keys: list[tuple[int, int]]) -> Any:
        indices = [index for _epoch, index in keys]
        try:
            return self._dataset.read_batch(indices)
        except Exception as error:
            at = listed([*map(str, indices)], 5)
            blame(f"{name_of(self._dataset)} failed to read samples {at}", error)


def _end_workers(loader: DataLoader[Any]) -> None:
    iterator, loader._iterator = loader._iterator, None  # noqa: SLF001
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()  # noqa: SLF001


@contextlib.contextmanager
def starting_workers() -> Iterator[None]:
    """Start a loader's workers so that they keep serving while the ranks stop.

    When a worker ends, PyTorch would raise in whatever line the rank is at. Here the next batch
    finds it instead: it looks every few seconds.
    """
    before = signal.getsignal(signal.SIGCHLD)
    try:
        with forking_servants():
            yield
    finally:
        # None: a handler of C, which Python cannot put back.
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)


def blame_worker(iterator: Any, dataset: str, error: Exception, samples: str = "") -> None:
    """Raise an error that names the cause if a worker of the loader has ended; else return.

    An exit code is the user's mistake: code that the worker ran called for it. A signal is not.
    """
    workers = getattr(iterator, "_workers", ())
    for worker in workers if isinstance(error, OSError | EOFError) else ():
        worker.join(_GONE_S)  # its connection closed before it had ended
    code = next((worker.exitcode for worker in workers if worker.exitcode), 0)
    if not code:
        return
    ending = f"ended with exit code {code}"
    if code < 0:
        ending = f"was killed by {signal.Signals(-code).name}"
    at = f"at samples {samples} or in the next batches, " if samples else ""
    text = f"{dataset} was being read, {at}when its loader worker {ending}."
    if code > 0:
        raise UserError(
            f"{text} The data set, or a library that it calls, ended the process: find the sample "
            "with --num-workers 0."
        ) from error
    raise RuntimeError(f"{text} {_REMEDIES.get(-code, _CRASHED)}") from error


_GONE_S = 0.2
_CRASHED = "Most likely a library that it calls crashed: --num-workers 0 shows where."
_REMEDIES = {
    int(signal.SIGKILL): "Most likely the system ran out of memory: use fewer --num-workers, a "
    "smaller batch or --shuffle-buffer.",
    int(signal.SIGBUS): "There is too little shared memory: enlarge /dev/shm (docker run "
    "--shm-size), or use fewer --num-workers.",
}


def ignore_stop_signals(_worker: int) -> None:
    """Leave a stop to the ranks: their workers serve until the step is done.

    PyTorch's crash handlers go, too: they print a NUL byte, and the rank says the same.
    """
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE):
        signal.signal(number, signal.SIG_DFL)
