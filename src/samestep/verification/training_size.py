"""How little is enough: the samples, the batch and the steps that a verification trains."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from samestep.errors import UserError
from samestep.reporting.words import count, ranks

_SMALLEST_BATCH = 8
_SMALLEST_REST = 5
_TO_HALVE = 6
"""Samples of a virtual rank that make two micro-steps of several samples each."""
# Primes are shared out unevenly by every number of ranks but their own.
_EVALUATED = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """What is taken of the training data, and how far the training goes."""

    num_samples: int
    """Training samples, an epoch of them: some full batches and an incomplete one."""
    global_batch: int
    rest: int
    """Samples of the incomplete last batch."""
    full: int
    """Full batches of an epoch."""
    drop_last: bool
    num_evaluated: int
    ranks: int
    """The most ranks."""

    @property
    def steps(self) -> int:
        """Steps that are taken: an epoch, and one of the next."""
        return self.full + (not self.drop_last) + 1

    @property
    def stop(self) -> int:
        """Steps after which a run is stopped and resumed: within the epoch where it has room."""
        return max(1, self.full - self.drop_last)

    @property
    def uneven_step(self) -> int | None:
        """The step, counted from 1, that trains the incomplete batch."""
        return None if self.drop_last else self.full + 1

    def halves(self, virtual: int) -> bool:
        """Whether two micro-steps of each virtual rank have several samples, as BatchNorm needs."""
        first = -(-self.global_batch // (2 * virtual))
        return self.rest // virtual >= first + 2


def choose_training_size(
    num_samples: int,
    num_evaluated: int,
    sizes: Sequence[int],
    *,
    batch: int | None = None,
    virtual: int | None = None,
    drop_last: bool = False,
    heavy: bool = False,
) -> TrainingSize:
    """Return the smallest training that shows what may differ on these numbers of ranks.

    Its batch is one that at least one of them does not divide, and neither do they its last one;
    or it is the one that the user wants. Virtual ranks share it out as that number of ranks would.
    Where a step is heavy, it takes so long that one full batch an epoch has to do.

    Raises:
        UserError: there are too few samples.
    """
    shares = (*sizes, virtual) if virtual else tuple(sizes)
    top = max(shares)
    primes = [n for n in _EVALUATED if top < n <= num_evaluated]
    evaluated = min(num_evaluated, next((n for n in primes if n >= 2 * top), 2 * top + 1))
    needed = 0
    for full, global_batch, rest in _candidates(shares, batch, virtual):
        if full > 1 and heavy and not drop_last:
            continue
        needed = full * global_batch + rest
        if needed <= num_samples:
            return TrainingSize(
                num_samples=needed,
                global_batch=global_batch,
                rest=rest,
                full=full,
                drop_last=drop_last,
                num_evaluated=evaluated,
                ranks=max(sizes),
            )
    raise UserError(
        f"{count(num_samples, 'training sample')} "
        f"{'is' if num_samples == 1 else 'are'} too few to compare {ranks(sizes)}"
        f"{f' with --virtual-ranks {virtual}' if virtual else ''}: {needed} "
        "are needed, a full batch and an incomplete one. Take more data"
        f"{_way_out(num_samples, sizes, batch, virtual)}."
    )


def _way_out(num_samples: int, sizes: Sequence[int], batch: int | None, virtual: int | None) -> str:
    """Return what else would do for so few samples, if anything."""
    if virtual:
        return ", or fewer virtual ranks"
    if batch is not None:
        return ", or leave --batch-size out" if _fit(num_samples, sizes) else ""
    fewer = [tuple(range(1, top + 1)) for top in range(min(3, max(sizes) - 1), 0, -1)]
    found = next((some for some in fewer if _fit(num_samples, some)), None)
    return f", or fewer ranks: --world-sizes {','.join(map(str, found))}" if found else ""


def _fit(num_samples: int, sizes: Sequence[int]) -> bool:
    return any(full * size + rest <= num_samples for full, size, rest in _candidates(sizes, None))


def _candidates(
    sizes: Sequence[int], batch: int | None, virtual: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yield (full batches, global batch, rest), the best first and the smallest last."""
    top = max(sizes)
    if batch is not None:
        rest = next((n for n in range(min(2 * top, batch - 1), 0, -1) if _uneven(n, sizes)), 1)
        yield from ((2, batch, rest), (1, batch, rest))
        return
    starts = [(max(2 * top, _SMALLEST_REST), _SMALLEST_BATCH), (top, top + 1)]
    if virtual:
        starts.insert(0, (_TO_HALVE * virtual, _SMALLEST_BATCH))
    for least, smallest in starts:
        rest = next(n for n in range(least, 10 * top + 20) if _uneven(n, sizes))
        start = max(rest + 1, smallest)
        several = [size for size in sizes if size > 1]
        global_batch = next(
            n for n in range(start, start + 20) if not several or any(n % size for size in several)
        )
        yield from ((2, global_batch, rest), (1, global_batch, rest))


def _uneven(number: int, sizes: Sequence[int]) -> bool:
    return all(number % size for size in sizes if size > 1)
