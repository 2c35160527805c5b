"""A DataLoader that a recipe brings, taken apart: its data set, its collate and its order.

Which rank reads which sample is samestep's, so the loader itself is never iterated.
"""

from dataclasses import dataclass, replace
from typing import Any

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
    default_collate,
)

from samestep.base.errors import UserError, defined_at
from samestep.base.settings import Settings
from samestep.core.data.order import Ordering
from samestep.core.data.samplers import SamplerOrder
from samestep.core.recipe import Collate, Splits


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
        given = f"batch_size={size}{', drop_last=True' * drop_last}"
        told = "--batch-size counts the samples of a step on all ranks, and --drop-last leaves out"
        return [f"The training loader's {given} is not used: {told} an incomplete one."]

    def ordering(self, settings: Settings) -> Ordering:
        """Return the order of the loader's sampler, in training."""
        asked = "--order " + settings.order if settings.order != "shuffled" else ""
        asked = asked or "--group-by-length" * settings.group_by_length
        asked = asked or "--batch-tokens" * (settings.batch_tokens is not None)
        if asked:
            raise UserError(
                f"{asked}: the order is that of the training loader's sampler, "
                f"{type(self.sampler).__name__}. Leave the setting out, or give "
                "DataLoader(…, shuffle=True)."
            )
        if type(self.sampler) is SequentialSampler:
            return Ordering(order="sequential")
        return Ordering(sampler=SamplerOrder(self.sampler, len(self.dataset), settings.seed))


def reads_each_once(loader: DataLoader[Any]) -> bool:
    """Whether a loader reads each sample once, in an order of PyTorch's."""
    sampler, known = loader.sampler, (RandomSampler, SequentialSampler, DistributedSampler)
    again = isinstance(sampler, RandomSampler) and sampler.replacement
    return type(loader.batch_sampler) is BatchSampler and isinstance(sampler, known) and not again


def without_loaders(splits: Splits, collate: Collate | None) -> Splits:
    """Take the loaders of the splits apart; `collate` is the recipe's."""

    def evaluated(data: Any) -> Any:
        if not isinstance(data, DataLoader):
            return data
        found = _taken_apart(data, "validation or test", collate)
        if not isinstance(found, Unpacked) or found.sampler is None:
            return found
        # What such a loader gives in its first epoch.
        order = SamplerOrder(found.sampler, len(found.dataset), 0).order(0, 0)
        return replace(found, dataset=Subset(found.dataset, order.tolist()), sampler=None)

    train = splits.train
    if isinstance(train, DataLoader):
        train = _taken_apart(train, "training", collate)
    validation = splits.changed_validation(evaluated)
    return replace(splits, train=train, validation=validation, test=evaluated(splits.test))


def _taken_apart(loader: DataLoader[Any], split: str, collate: Collate | None) -> Any:
    where = f"The {split} loader{defined_at(type(loader))}"
    if type(loader).__iter__ is not DataLoader.__iter__ or loader.batch_sampler is None:
        raise UserError(
            f"{where} makes its batches in a way of its own ({type(loader).__name__}, batch_size="
            f"{loader.batch_size}), and samestep makes those of each rank: give the Dataset, and "
            "what puts its samples together as the recipe's collate."
        )
    own = loader.collate_fn is not default_collate
    if own and collate is not None:
        raise UserError(
            f"{where} has a collate_fn{defined_at(loader.collate_fn)} and the recipe a collate"
            f"{defined_at(collate)}: leave one of them out."
        )
    if isinstance(loader.dataset, IterableDataset):
        if own:
            raise UserError(
                f"{where} reads a stream and has a collate_fn: give the stream itself, and "
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
        whole = sampler.num_samples == len(dataset)
        sampler = None if whole and not sampler.replacement else sampler
    elif type(sampler) is SequentialSampler and split != "training":
        sampler = None
    return Unpacked(dataset, collate, sampler, loader.batch_size, loader.drop_last)
