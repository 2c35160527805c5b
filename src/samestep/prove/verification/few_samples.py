"""How little is enough: the samples, the batch and the steps of a verification."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from samestep.base.errors import UserError
from samestep.base.words import count, ranks
from samestep.core.data.recipe_data import PreparedOnRanks, Unpacked, is_stream, per_sample
from samestep.core.data.stream_lanes import Lane, Route
from samestep.core.recipe import Recipe, Splits

_SMALLEST_BATCH = 8
_SMALLEST_REST = 5
_TO_HALVE = 6
"""Samples of a virtual rank that make two micro-steps of several samples each."""
# Only a prime's own number of ranks shares it out evenly.
_EVALUATED = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
_MOST_BROKEN = 100
_OF_STREAM = 512  # elements of a stream that are used: the first ones


@dataclass(frozen=True, kw_only=True)
class TrainingSize:
    """How much of the training data is used, and how long the training is."""

    num_samples: int
    """Training samples, an epoch of them: some full batches and an incomplete one."""
    global_batch: int
    rest: int  # samples of the incomplete last batch
    full: int  # full batches of an epoch
    drop_last: bool
    num_evaluated: int
    ranks: int  # the largest number of ranks

    @property
    def steps(self) -> int:
        """Steps of the training: an epoch, and one of the next."""
        return self.full + (not self.drop_last) + 1

    @property
    def stop(self) -> int:
        """Steps after which a run is stopped and resumed: within the epoch if that has room."""
        return max(1, self.full - self.drop_last)

    @property
    def uneven_step(self) -> int | None:
        """The step, counted from 1, that trains the incomplete batch."""
        return None if self.drop_last else self.full + 1

    def halves(self, virtual: int) -> bool:
        """Whether both micro-steps of each virtual rank have several samples, for BatchNorm."""
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

    At least one of them does not divide its batch, and none its last batch; or the batch is the
    one that the user wants. Virtual ranks share it out as that number of ranks would. If a step is
    heavy, there is one full batch per epoch.
    """
    shares = (*sizes, virtual) if virtual else tuple(sizes)
    top = max(shares)
    needed = 0
    primes = [n for n in _EVALUATED if top < n <= num_evaluated]
    evaluated = min(num_evaluated, next((n for n in primes if n >= 2 * top), 2 * top + 1))
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
        f"{_remedy(num_samples, sizes, batch, virtual)}."
    )


def _remedy(num_samples: int, sizes: Sequence[int], batch: int | None, virtual: int | None) -> str:
    if virtual:
        return ", or fewer virtual ranks"

    def fit(sizes: Sequence[int]) -> bool:
        return any(full * size + rest <= num_samples for full, size, rest in _candidates(sizes))

    if batch is not None:
        return ", or omit --batch-size" if fit(sizes) else ""
    fewer = [tuple(range(1, top + 1)) for top in range(min(3, max(sizes) - 1), 0, -1)]
    fitting = next((some for some in fewer if fit(some)), None)
    return f", or fewer ranks: --nproc {','.join(map(str, fitting))}" if fitting else ""


def _candidates(
    sizes: Sequence[int], batch: int | None = None, virtual: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """Yield (full batches, global batch, rest), the best first and the smallest last."""
    top, several = max(sizes), [size for size in sizes if size > 1]

    def uneven(number: int) -> bool:
        return all(number % size for size in several)

    if batch is not None:
        rest = next((n for n in range(min(2 * top, batch - 1), 0, -1) if uneven(n)), 1)
        yield from ((2, batch, rest), (1, batch, rest))
        return
    starts = [(max(2 * top, _SMALLEST_REST), _SMALLEST_BATCH), (top, top + 1)]
    if virtual:
        starts.insert(0, (_TO_HALVE * virtual, _SMALLEST_BATCH))
    for least, smallest in starts:
        rest = next(n for n in range(least, 10 * top + 20) if uneven(n))
        start = max(rest + 1, smallest)
        global_batch = next(
            n for n in range(start, start + 20) if not several or any(n % size for size in several)
        )
        yield from ((2, global_batch, rest), (1, global_batch, rest))


class _BatchSubset(Subset[Any]):
    """Some samples of a data set that reads a whole batch at a time."""

    def read_batch(self, indices: list[int]) -> Any:
        dataset: Any = self.dataset
        return dataset.read_batch([self.indices[index] for index in indices])


def without_streams(splits: Splits, seed: int) -> Splits:
    """Replace each stream by a data set of its first elements."""
    route = Route(seed=seed, epoch=0, global_batch=1, lanes=1, mine=range(1))

    def first_elements(data: Any) -> Any:
        if not is_stream(data):
            return data
        elements: Any = Lane(data, route, 0).take(_OF_STREAM)
        return Subset(elements, range(len(elements)))

    validation = splits.changed_validation(first_elements)
    train, test = first_elements(splits.train), first_elements(splits.test)
    return replace(splits, train=train, validation=validation, test=test)


def num_samples(data: Any) -> int:
    """Return the number of samples of a split; 0 if it is absent or has no length."""
    data = data[0] if isinstance(data, tuple) and data else data
    return len(data) if hasattr(data, "__len__") else 0


def evaluated_split(splits: Splits) -> str:
    """Return the name of the split that is evaluated."""
    return next((n for n in ("validation", "test") if num_samples(getattr(splits, n))), "train")


def cut_down(splits: Splits, num_train: int, num_evaluated: int) -> Splits:
    """Return a few samples of the training data, and of the evaluated split as `validation`."""
    few = partial(some_of, number=num_evaluated)
    if (name := evaluated_split(splits)) == "validation":
        evaluated = splits.changed_validation(few)
    else:
        evaluated = few(getattr(splits, name))
    train = some_of(splits.train, num_train)
    return replace(splits, train=train, validation=evaluated, test=None, notes=(), left_out=())


def cut_numbers(recipe: Recipe, whole: Splits, few: Splits) -> Recipe:
    """Return the recipe with the weights and lengths of the few training samples.

    The collate of loaders becomes the recipe's, where a verification looks for it.
    """
    cut: dict[str, Any] = {}
    data_sets = few.train, *(few.by_name.values() or [few.validation])
    collates = {data.own_collate for data in data_sets if isinstance(data, Unpacked)}
    if len(collates) == 1:
        cut["collate"] = recipe.collate or collates.pop()
    for name in ("weights", "lengths"):
        if (numbers := getattr(recipe, name)) is not None:
            every = per_sample(name, numbers, whole.train)
            taken = getattr(few.train, "indices", None) or spread(
                len(every), num_samples(few.train)
            )
            picked = every[torch.tensor(taken)]
            cut[name] = picked if bool(picked.any()) else picked + 1  # some may be drawn
    return replace(recipe, **cut) if cut else recipe


def some_of(data: Any, number: int) -> Any:
    """Return some samples of a split; what is not data is returned as it is, and refused later."""
    total = num_samples(data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple):
        if [isinstance(part, Tensor) for part in data] != [True, True]:
            return data
        return subset(data, spread(total, number))
    if not hasattr(data, "__getitem__"):
        return data
    # Unreadable samples are left out only where a run would leave them out, too.
    prepared = isinstance(data, PreparedOnRanks)
    places = _readable(data, number) if prepared else spread(total, number)
    return subset(data, places)


def subset(data: Any, places: list[int]) -> Any:
    """Return some samples of a tensor, of a tuple of tensors, or of a data set."""
    if isinstance(data, Unpacked):
        return replace(data, dataset=subset(data.dataset, places), sampler=None)
    if isinstance(data, Tensor):
        return data[torch.tensor(places, dtype=torch.int64)]
    if isinstance(data, tuple):
        return tuple(subset(part, places) for part in data)
    return (_BatchSubset if hasattr(data, "read_batch") else Subset)(data, places)


def spread(total: int, number: int) -> list[int]:
    """Return places spread evenly: the first ones of a folder are all of one class."""
    return [place * total // number for place in range(min(number, total))]


def _readable(dataset: Any, number: int) -> list[int]:
    """Return the places of some samples that can be read."""
    total = len(dataset)
    broken = 0
    readable: set[int] = set()
    for place in chain(spread(total, number), range(total)):
        if place in readable or len(readable) == number:
            continue
        try:
            dataset[place]
            readable.add(place)
        except UserError:
            broken += 1
            if broken == _MOST_BROKEN:
                raise
    return sorted(readable)
