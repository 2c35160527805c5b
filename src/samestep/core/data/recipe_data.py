"""The data of a recipe: loaded on all ranks, its loaders taken apart, opened as sources of batches.

Download once per node, and share the preparation. Of a DataLoader that a recipe brings count its
data set, its collate and its order: which rank reads which sample is samestep's, so the loader
itself is never iterated.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from samestep.base.errors import UserError, blame, defined_at, made_by
from samestep.base.settings import Settings
from samestep.core.data.memory_source import MemorySource
from samestep.core.data.order import SHUFFLED, Lap, Ordering, untimed
from samestep.core.data.source import ReadOptions, Source
from samestep.core.recipe import Collate, InMemory, PerSample, Recipe, Splits
from samestep.core.recipe_checks import shown
from samestep.launch.ranks.world import World

SPLITS = ("train", "validation", "test")


@runtime_checkable
class PreparedOnRanks(Protocol):
    """A data set whose preparation the ranks share before any of them reads a sample.

    It leaves out samples that cannot be read, so the number of samples is known only afterwards.
    """

    def prepare_on_ranks(self, splits: Mapping[str, Any], world: World) -> dict[str, Any]:
        """Return replacements of some splits, this one among them; every rank calls it.

        In addition to the splits by name: `notes` and `left_out`, to be added to those of `Splits`.
        """


def load_splits(
    recipe: Recipe,
    options: Any,
    world: World,
    *,
    wanted: Collection[str] = SPLITS,
    prepare: bool = True,
) -> Splits:
    """Return the data sets of a recipe by its completed options; every rank calls it.

    Of the splits that need it, those `wanted` are prepared. Without `prepare` none is, and a sample
    that is broken fails when it is read.
    """
    load = partial(recipe.load_data, options)
    if getattr(options, "download", False):  # once per node, then by the rest
        first = world.on_every(lambda: load() if world.local_rank == 0 else None)
        splits = world.on_every(lambda: first or load())
    else:
        splits = world.on_every(load)
    splits = world.on_every(lambda: without_loaders(splits, recipe.collate))
    splits = in_one_order(splits, world)
    datasets = {name: getattr(splits, name) for name in SPLITS if name in wanted}
    if splits.by_name and "validation" in datasets:
        # Also in the order of their names, so that all ranks prepare them in the same.
        datasets |= {f"validation/{name}": data for name, data in splits.by_name.items()}
        del datasets["validation"]
    parts = {name: data for name, data in datasets.items() if isinstance(data, PreparedOnRanks)}
    if not prepare or not parts:
        return splits
    done = next(iter(parts.values())).prepare_on_ranks(parts, world)
    notes = {name: getattr(splits, name) + done.pop(name) for name in ("notes", "left_out")}
    by_name = {n: done.pop(f"validation/{n}", data) for n, data in splits.by_name.items()}
    return replace(splits, **{**done, **notes, **({"validation": by_name} if by_name else {})})


def in_one_order(splits: Splits, world: World) -> Splits:
    """Return splits with several validation sets in rank 0's order; all ranks call it.

    Ranks evaluate one set after the other, and the order of a set's or a folder's entries may
    differ from rank to rank.
    """
    ranks = world.gather([*splits.by_name])
    for rank, names in enumerate(ranks):
        if {*names} != {*ranks[0]}:
            ours, theirs = (", ".join(map(repr, those)) or "none" for those in (ranks[0], names))
            raise UserError(
                f"Rank {rank} has the validation sets {theirs}, and rank 0 has {ours}. All ranks "
                "need the same: samestep divides the samples among them.",
                on_all_ranks=True,
            )
    by_name = {name: splits.by_name[name] for name in ranks[0]}
    return replace(splits, validation=by_name) if by_name else splits


@dataclass(frozen=True)
class Unpacked(Dataset[Any]):
    """The data set of a loader, and how the loader puts its samples together."""

    dataset: Any
    collate: Collate
    sampler: Any = None
    """What decides the order, or None where it is shuffled; a sampler of batches, too."""
    batch_size: int | None = None
    drop_last: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    @property
    def own_collate(self) -> Collate | None:
        """What puts samples together, if it is not PyTorch's."""
        return None if self.collate is default_collate else self.collate

    def notes(self, settings: Settings) -> list[str]:
        """Return a note if steps are not the batches that the loader would make."""
        size, drop_last = self.batch_size, self.drop_last
        if size is None or (size, drop_last) == (settings.batch_size, settings.drop_last):
            return []
        flags = f"batch_size={size}{', drop_last=True' if drop_last else ''}"
        why = "--batch-size counts the samples of a step on all ranks, and --drop-last leaves out"
        return [f"The training loader's {flags} is not used: {why} an incomplete one."]

    def ordering(self, settings: Settings) -> Ordering:
        """Return the order of the loader's sampler, in training."""
        asked = [f"--order {settings.order}"] if settings.order != "shuffled" else []
        asked += ["--group-by-length"] if settings.group_by_length else []
        asked += ["--batch-tokens"] if settings.batch_tokens is not None else []
        if asked:
            raise UserError(
                f"{asked[0]}: the training loader's sampler, {type(self.sampler).__name__}, "
                "decides the order. Omit the setting, or use DataLoader(…, shuffle=True)."
            )
        if type(self.sampler) is SequentialSampler:
            return Ordering(order="sequential")
        from samestep.core.data.samplers import SamplerOrder  # noqa: PLC0415 - rarely needed

        return Ordering(sampler=SamplerOrder(self.sampler, len(self.dataset), settings.seed))


def as_pytorch(loader: DataLoader[Any], where: str) -> DataLoader[Any]:
    """Return the loader if its batches are PyTorch's, or PyTorch's in place of torchdata's."""
    if loader.batch_sampler is not None:
        if _of_torchdata(loader):
            return _without_state(loader)
        if type(loader).__iter__ is DataLoader.__iter__:
            return loader
    raise UserError(
        f"{where} builds its own batches ({type(loader).__name__}, "
        f"batch_size={loader.batch_size}), but samestep builds those of each rank: use "
        "DataLoader(dataset, batch_size=…), with a collate_fn that puts samples together."
    )


def reads_each_once(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads each sample once, in an order of PyTorch's."""
    sampler, kinds = loader.sampler, (RandomSampler, SequentialSampler, DistributedSampler)
    again = isinstance(sampler, RandomSampler) and sampler.replacement
    return type(loader.batch_sampler) is BatchSampler and isinstance(sampler, kinds) and not again


def without_loaders(splits: Splits, collate: Collate | None) -> Splits:
    """Take the loaders of the splits apart; `collate` is the recipe's."""

    def evaluated(data: Any) -> Any:
        if not isinstance(data, DataLoader):
            return data
        unpacked = _taken_apart(data, "validation or test", collate)
        if not isinstance(unpacked, Unpacked) or unpacked.sampler is None:
            return unpacked
        from samestep.core.data.samplers import SamplerOrder  # noqa: PLC0415

        # What such a loader gives in its first epoch.
        order = SamplerOrder(unpacked.sampler, len(unpacked.dataset), 0).order(0, 0)
        return replace(unpacked, dataset=Subset(unpacked.dataset, order.tolist()), sampler=None)

    train = splits.train
    if isinstance(train, DataLoader):
        train = _taken_apart(train, "training", collate)
    validation = splits.changed_validation(evaluated)
    return replace(splits, train=train, validation=validation, test=evaluated(splits.test))


def _of_torchdata(part: Any) -> bool:
    """Whether a loader or sampler iterates by torchdata's code: as PyTorch's, with a state."""
    own = getattr(type(part), "__iter__", None)  # a list's has no module
    return str(getattr(own, "__module__", "")).startswith("torchdata.")


def _without_state(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return PyTorch's loader for a `StatefulDataLoader`, whose state is what a run has itself."""
    batches: Any = loader.batch_sampler
    dataset: Any = loader.dataset
    if not _of_torchdata(batches):
        return DataLoader(dataset, batch_sampler=batches, collate_fn=loader.collate_fn)
    arguments: dict[str, Any] = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    sampler = batches.sampler
    if isinstance(dataset, IterableDataset):
        sampler = None
    elif _of_torchdata(sampler) and isinstance(sampler, DistributedSampler):
        sampler = DistributedSampler(dataset, 1, 0, shuffle=sampler.shuffle)
    elif _of_torchdata(sampler):
        drawn = sampler.replacement, sampler.num_samples, sampler.generator
        sampler = RandomSampler(dataset, *drawn)
    return DataLoader(dataset, sampler=sampler, collate_fn=loader.collate_fn, **arguments)


def _taken_apart(loader: DataLoader[Any], split: str, collate: Collate | None) -> Any:
    where = f"The {split} loader{defined_at(type(loader))}"
    loader = as_pytorch(loader, where)
    own = loader.collate_fn is not default_collate
    if own and collate is not None:
        raise UserError(
            f"{where} has a collate_fn{defined_at(loader.collate_fn)} and the recipe a collate"
            f"{defined_at(collate)}: leave one of them out."
        )
    if isinstance(loader.dataset, IterableDataset):
        if own:
            raise UserError(
                f"{where} reads a stream and has a collate_fn: return the stream itself, and use "
                "Recipe(collate=…)."
            )
        return loader.dataset
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    collate = collate or loader.collate_fn
    if type(loader.batch_sampler) is not BatchSampler:
        return Unpacked(dataset, collate, loader.batch_sampler)
    if type(sampler) is SubsetRandomSampler:
        dataset, sampler = Subset(dataset, [*map(int, sampler.indices)]), None
    elif type(sampler) is DistributedSampler:  # which ranks are whose is not its matter here
        sampler = None if sampler.shuffle else SequentialSampler(dataset)
    elif type(sampler) is RandomSampler:
        covers_all = sampler.num_samples == len(dataset)
        sampler = None if covers_all and not sampler.replacement else sampler
    elif type(sampler) is SequentialSampler and split != "training":
        sampler = None
    return Unpacked(dataset, collate, sampler, loader.batch_size, loader.drop_last)


def ordering_of(recipe: Recipe, settings: Settings, data: Any) -> Ordering:
    """Return the order of training samples; `data` is passed to the recipe's functions."""
    weights = lengths = None
    if settings.group_by_length or settings.batch_tokens is not None:
        flag = "group-by-length" if settings.group_by_length else "batch-tokens"
        lengths = per_sample("lengths", _needed("lengths", recipe, flag), data)
    if settings.order == "weighted":
        weights = per_sample("weights", _needed("weights", recipe, "order weighted"), data)
    order, tokens = settings.order, settings.batch_tokens
    return Ordering(order=order, weights=weights, lengths=lengths, batch_tokens=tokens)


def _needed(name: str, recipe: Recipe, flag: str) -> PerSample:
    value: PerSample | None = getattr(recipe, name)
    if value is None:
        raise UserError(
            f"--{flag}: the recipe has no {name}. Add Recipe({name}=…): a number for each training "
            "sample, or a function of the training data that returns them."
        )
    return value


def per_sample(name: str, given: PerSample, data: Any, giver: str = "Recipe") -> Tensor:
    """Return a number for each training sample, (samples,) float64, none negative."""
    field, at = f"{giver}({name}=…)", defined_at(given) if callable(given) else ""
    size = len(data[0] if isinstance(data, tuple) else data)
    try:
        values = given(data) if callable(given) else given
        numbers = torch.as_tensor(values).detach().cpu().double().contiguous()
    except Exception as error:
        remedy = f"It must return a number for each of the {size:,} training samples."
        blame(f"{field} failed", error, given, remedy=remedy)
    if numbers.shape != (size,):
        shape = " × ".join(map(str, numbers.shape)) or "one"
        raise UserError(
            f"{field}{at} has {shape} numbers and there are {size:,} training samples: give one "
            f"for each, ({size},)."
        )
    if wrong := (~(numbers >= 0) | numbers.isinf()).nonzero().view(-1).tolist():
        first = wrong[0]
        raise UserError(
            f"{field}{at} is {float(numbers[first])} for sample {first}"
            f"{f' and wrong for {len(wrong) - 1:,} others' if len(wrong) > 1 else ''}: each must "
            "be a finite number of 0 or more."
        )
    if name == "weights" and not bool(numbers.any()):
        raise UserError(
            f"{field}{at}: all {size:,} weights are 0, so no sample can be drawn. Make some "
            "of them positive."
        )
    return numbers


_EVALUATED_TOGETHER = 32
"""Samples of a batch over which an evaluation makes a loss, where no setting says how many."""


def is_stream(data: Any) -> bool:
    """Whether data is read from its beginning on, not by index; a DataLoader gives no samples."""
    if isinstance(data, IterableDataset):
        return True
    if isinstance(data, DataLoader):
        return False
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def open_source(
    data: InMemory | Dataset[Any], world: World, *, num_workers: int, **options: Any
) -> Source:
    """Return the source that suits a data set: memory for tensors, a stream, else a DataLoader.

    `num_workers` processes read a data set; the other arguments are those of `ReadOptions`.
    """
    reading = ReadOptions(world=world, **options)
    # A subclass may read its samples in a way of its own.
    if type(data) is TensorDataset and len(data.tensors) == 2 and reading.collate is None:
        data = (data.tensors[0], data.tensors[1])
    elif type(data) is Subset and reading.collate is None:  # as random_split makes it
        tensors = data.dataset.tensors if type(data.dataset) is TensorDataset else ()
        if len(tensors) == 2 and all(t.layout == torch.strided for t in tensors):
            places = torch.tensor([*data.indices], dtype=torch.int64)
            if bool(((places >= 0) & (places < len(tensors[0]))).all()):  # else a sample is blamed
                data = (tensors[0][places], tensors[1][places])
    if isinstance(data, tuple):
        if [isinstance(part, Tensor) for part in data] != [True, True]:
            kinds = ", ".join(type(part).__name__ for part in data)
            raise UserError(
                f"{reading.data} is a tuple of {len(data)} ({kinds}); it must be (inputs, targets),"
                " both tensors. torch.from_numpy makes one of a NumPy array."
            )
        if reading.collate is not None:
            raise UserError(
                f"{reading.data} is a pair of tensors, which are cut into batches: the collate"
                f"{defined_at(reading.collate)} has nothing to do. Leave it out, or give a Dataset."
            )
        return MemorySource(data, reading)
    if is_stream(data):
        from samestep.core.data.stream_source import StreamSource  # noqa: PLC0415

        return StreamSource(data, reading, num_workers)
    sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if sized and not isinstance(data, Tensor | type | dict | str):
        from samestep.core.data.loader_source import LoaderSource  # noqa: PLC0415

        return LoaderSource(data, reading, num_workers)
    raise UserError(
        f"{reading.data} is {shown(data)}; it must be (inputs, targets) tensors, a Dataset with "
        "__len__ and __getitem__, an IterableDataset, or a DataLoader of either."
    )


def open_split(
    data: Any,
    world: World,
    recipe: Recipe,
    settings: Settings,
    dtype: torch.dtype,
    lap: Lap = untimed,
    split: str = "",
) -> Source:
    """Return the source of one of a recipe's splits, as a training with these settings reads it."""
    trains = split == "training" and not is_stream(data)
    ordering, collate = SHUFFLED, recipe.collate
    if isinstance(data, Unpacked):
        if trains and data.sampler is not None:
            ordering = data.ordering(settings)
        # A recipe that has one, too, is a verification's: it is what all loaders have.
        collate, data = collate or data.own_collate, data.dataset
    if trains and ordering is SHUFFLED:
        ordering = ordering_of(recipe, settings, data)
    with made_by(recipe.data):
        return open_source(
            data,
            world,
            seed=settings.seed,
            dtype=dtype,
            num_workers=settings.num_workers,
            transform=recipe.transform,
            augment=recipe.augment,
            collate=collate,
            whole=recipe.forward is not None,
            loss_batch=_together(settings) if recipe.loss_over == "batch" else None,
            slots=_together(settings) if recipe.carry is not None else None,
            ordering=ordering,
            shuffle_buffer=settings.shuffle_buffer,
            lap=lap,
            split=split,
        )


def _together(settings: Settings) -> int:
    """Return the samples of a step; with --batch-tokens it has no number, and an evaluation one."""
    return settings.batch_size or settings.batch_size_per_rank or _EVALUATED_TOGETHER
