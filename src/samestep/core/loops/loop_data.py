"""The data of a user's own loop: the same order and shares as in `samestep train`."""

import hashlib
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast, get_args

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from samestep.base.errors import UserError, did_you_mean
from samestep.base.settings import OrderName, Settings
from samestep.core.data.keyed_random import mix, normal, sample_keys, uniform
from samestep.core.data.order import Ordering, group_steps, steps_per_epoch
from samestep.core.data.prefetch import send
from samestep.core.data.recipe_data import open_source, per_sample
from samestep.core.data.source import OrderedSource
from samestep.core.learner.unkept import Unkept, of_data
from samestep.core.recipe import Collate, PerSample, Recipe, Splits
from samestep.launch.ranks.world import World

Drawn = tuple[OrderName, PerSample | None]
"""An order, and the weights that samples are drawn by."""
_HASHED_ROWS = 64
"""Rows of data in memory by which ranks, and a resumed run, see that theirs is the same."""


@dataclass(kw_only=True)
class OwnBatch:
    """One rank's part of one step.

    What `uniform` and `normal` draw belongs to the samples: a sample gets the same numbers on any
    number of ranks and after any resume, other ones in each epoch and in each call of a step.
    """

    data: Any
    """The samples, on the device: a pair of tensors, a tensor, or any tree that was collated."""
    rows: int
    """Samples in it."""
    weight: float
    """The part of the global batch that is in it. A mean over its samples times this, added up over
    all ranks, is the mean over the global batch. 0 on a rank without a share of
    its own, which computes with a placeholder to take part in the step's collectives."""
    global_size: int
    """Samples of the step over all ranks."""
    epoch: int
    """Epochs before this one."""
    step: int = 0
    """Steps of the run before this one."""
    indices: Tensor
    """(rows,) int64 on the CPU: the place of each sample in the data."""
    device: torch.device
    seed: int
    calls: int = 0
    """How often numbers were drawn in this step."""

    @cached_property
    def keys(self) -> Tensor:
        """(rows,) int64 on the device: a key for each sample in this epoch, for an augmentation."""
        return sample_keys(self.seed, self.epoch, self._indices)

    @cached_property
    def _indices(self) -> Tensor:
        return send(self.indices, self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Return numbers in [0, 1) for each sample: (rows, *shape), of PyTorch's default type."""
        drawn = uniform(self._next_keys(), math.prod(shape))
        return drawn.view(self.rows, *shape).to(torch.get_default_dtype())

    def normal(self, *shape: int) -> Tensor:
        """Return numbers of mean 0 and variance 1: (rows, *shape), of PyTorch's default type."""
        drawn = normal(self._next_keys(), math.prod(shape))
        return drawn.view(self.rows, *shape).to(torch.get_default_dtype())

    def _next_keys(self) -> Tensor:
        self.calls += 1
        return sample_keys(mix(self.seed, self.calls), self.epoch, self._indices)


class _Rows(TensorDataset):
    """Tensors of which a batch is read at once; sample by sample takes many times as long."""

    def read_batch(self, indices: list[int]) -> list[Tensor]:
        """Return these rows of each tensor."""
        rows = torch.tensor(indices, dtype=torch.int64)
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in self.tensors]


class OpenedData:
    """Tensors or a map-style `Dataset`, ready to be read."""

    def __init__(
        self,
        data: Any,
        world: World,
        seed: int,
        collate: Collate | None,
        workers: int,
        drawn: Drawn = ("shuffled", None),
    ) -> None:
        """Open the data; every rank does so with the same. `drawn` is the order and its weights."""
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            raise UserError(
                f"The data is a {type(data).__name__}; give tensors, or a map-style Dataset with "
                "__len__ and __getitem__. A DataLoader or a stream has an order of its own, but "
                "run.batches uses samestep's."
            )
        self._data, self._collate, self._workers = data, collate, workers
        self._world, self._seed, self._stamp = world, seed, _stamp_of(data)
        self._drawn = drawn
        given = data
        if isinstance(data, Tensor):
            given = (data, torch.empty(len(data), 0))
        elif isinstance(data, tuple) and len(data) != 2:
            given = TensorDataset(*data) if collate is not None else _Rows(*data)
        options: Any = {"dtype": None, "collate": collate, "whole": True}
        options["ordering"] = _ordering(*drawn, data)
        source = open_source(given, world, seed=seed, num_workers=workers, **options)
        self.source = cast("OrderedSource", source)
        self.digest = _hash_of(data)
        """A hash of some samples of data in memory; empty of a `Dataset`."""
        mine = self.source.num_samples, self.digest, self.source.order_record()
        everywhere = world.gather(mine)
        for rank, mine in enumerate(everywhere):
            if mine != everywhere[0]:
                raise UserError(
                    f"Rank {rank} has other data than rank 0 ({mine[0]} and {everywhere[0][0]} "
                    "samples). Make or read it inside open_run, which seeds all ranks alike, or "
                    "use a seeded generator.",
                    on_all_ranks=True,
                )

    def notes(self) -> list[str]:
        """Return what to tell of samples that differ when they are read again; all ranks call it.

        Raises:
            UserError: another rank has other samples.
        """
        recipe = Recipe(model=torch.nn.Identity, data=Splits, collate=self._collate)
        found = of_data(self.source, self._data, recipe, Settings(), self._world)
        return Unkept(**found).notes("", owner="The", keyed="by batch.keys")

    def is_of(
        self, data: Any, collate: Collate | None, workers: int, drawn: Drawn = ("shuffled", None)
    ) -> bool:
        """Whether it is what the script gives now."""
        before = (*_as_tuple(self._data), self._collate, *self._drawn)
        now = (*_as_tuple(data), collate, *drawn)
        same = len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
        return same and workers == self._workers and self._stamp == _stamp_of(data)

    def steps(self, global_batch_size: int, *, drop_last: bool) -> int:
        """Return the steps of an epoch."""
        if not isinstance(global_batch_size, int) or global_batch_size < 1:
            raise UserError(
                f"global_batch_size is {global_batch_size!r}; it must be a whole number, 1 or "
                "more: the samples of a step over all ranks."
            )
        number, order = self.source.num_samples, self._drawn[0]
        if drop_last and order in ("replacement", "weighted"):
            raise UserError(
                f'run.batches(order="{order}", drop_last=True): an epoch is as many draws as there '
                "are samples, and the last ones count like any other. Leave drop_last out."
            )
        if order == "columns" and number < global_batch_size:
            raise UserError(
                f'run.batches(order="columns"): {number} samples do not make {global_batch_size} '
                f"columns, one for each slot of a step. Use global_batch_size={number} or less."
            )
        steps = steps_per_epoch(number, global_batch_size, drop_last=drop_last)
        if steps == 0:
            raise UserError(
                f"drop_last leaves nothing of {number} samples: global_batch_size is "
                f"{global_batch_size}. Make it smaller, or leave drop_last out."
            )
        return steps

    def epoch(
        self, epoch: int, first_step: int, global_batch_size: int, *, drop_last: bool
    ) -> Generator[OwnBatch]:
        """Yield this rank's batches of an epoch, from `first_step` of it on."""
        size, source = global_batch_size, self.source
        order = source.order(epoch, size, drop_last=drop_last)
        # One cut for many steps: it is cheaper than one for each.
        many = source.steps_per_block(size)
        cut = group_steps(order, first_step, many, size, self._world, drop_last=drop_last)
        places = (place for block in cut for place in block.inputs.split(block.rows))
        blocks = source.blocks(epoch, first_step, global_batch=size, drop_last=drop_last)
        singles = (single for block in blocks for single in block.parts or block.singles())
        for place, read in zip(places, singles, strict=True):
            share = read.weight, read.rows, read.global_size
            yield self._batch(read.inputs, *share, epoch, place)

    def once(self, batch_size: int, epoch: int) -> Iterator[OwnBatch]:
        """Yield this rank's share of all samples, each once."""
        if not isinstance(batch_size, int) or batch_size < 1:
            raise UserError(f"run.validation: batch_size is {batch_size!r}; it must be 1 or more.")
        for part in self.source.evaluation(batch_size):
            rows, indices = part.samples, torch.arange(part.first, part.first + part.samples)
            yield self._batch(part.inputs, 1.0, rows, self.source.num_samples, epoch, indices)

    def _batch(
        self, data: Any, weight: float, rows: int, global_size: int, epoch: int, indices: Tensor
    ) -> OwnBatch:
        return OwnBatch(
            data=data[0] if isinstance(self._data, Tensor) else data,
            rows=rows,
            weight=weight * rows / global_size,
            global_size=global_size,
            epoch=epoch,
            indices=indices,
            device=self._world.device,
            seed=self._seed,
        )


def _ordering(order: OrderName, weights: PerSample | None, data: Any) -> Ordering:
    if order not in get_args(OrderName):
        raise UserError(
            f"run.batches(order={order!r}): the orders are {', '.join(get_args(OrderName))}. "
            f"{did_you_mean(str(order), get_args(OrderName))}"
        )
    if (order == "weighted") != (weights is not None):
        raise UserError(
            f"run.batches(order={order!r}) {'has no' if weights is None else 'has no use for'} "
            'weights: give both, order="weighted" and weights=…, or neither.'
        )
    given = None if weights is None else per_sample("weights", weights, data, "run.batches")
    return Ordering(order=order, weights=given)


def _as_tuple(data: Any) -> tuple[Any, ...]:
    return data if isinstance(data, tuple) else (data,)


def _tensors(data: Any) -> tuple[Tensor, ...]:
    """Return the tensors of data in memory; none of other data."""
    parts = data.tensors if isinstance(data, TensorDataset) else _as_tuple(data)
    return parts if all(isinstance(part, Tensor) for part in parts) else ()


def _stamp_of(data: Any) -> tuple[tuple[int, int], ...]:
    """Return addresses and versions, to see changes in place: a device holds a copy of the data."""
    return tuple(
        (part.data_ptr(), 0 if part.is_inference() else part._version)  # noqa: SLF001
        for part in _tensors(data)
        if part.layout == torch.strided
    )


def _hash_of(data: Any) -> str:
    """Return a hash of some rows of data in memory, and of how it is stored."""
    tensors = _tensors(data)
    if not tensors:
        return ""
    digest = hashlib.sha256()
    for part in tensors:
        rows = torch.linspace(0, len(part) - 1, min(_HASHED_ROWS, len(part))).long()
        some = part.detach()[rows.to(part.device)].cpu().contiguous().flatten()
        digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes() if some.numel() else b"")
    return digest.hexdigest()[:16]
