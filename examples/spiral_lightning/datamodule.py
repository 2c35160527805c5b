"""Points on two interleaved spirals, and their way to each rank."""

import math
from collections.abc import Iterator, Sized

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Sampler,
    TensorDataset,
    random_split,
)

TURNS = 1.5
Sample = tuple[Tensor, ...]  # a point (2,) and its label ()


class SpiralDataset(TensorDataset):
    """Points (num_samples, 2) on two spirals, and the spiral (num_samples,) each belongs to.

    Class 1 is class 0 turned by pi. Of an odd number, class 0 has one point more.
    """

    def __init__(self, num_samples: int = 10_000, noise: float = 0.2, seed: int = 42) -> None:
        # A generator of its own: the points depend on nothing that was drawn before.
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(num_samples) % 2
        # The square root spreads the points evenly over the length of the arm.
        radius = torch.rand(num_samples, generator=generator).sqrt() * (2 * math.pi * TURNS)
        angle = radius + labels * math.pi
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        points += noise * torch.randn(num_samples, 2, generator=generator)
        super().__init__(points, labels)


def part_sizes(num_samples: int) -> list[int]:
    """Return how many samples train, validate and test: 70 %, 15 % and the rest."""
    sizes = [int(num_samples * 0.70), int(num_samples * 0.15)]
    return [*sizes, num_samples - sum(sizes)]


class EverySampleOnce(Sampler[int]):
    """Give each rank every n-th sample, and no sample to two ranks.

    A DistributedSampler, also the one that Lightning puts in by itself, fills up the ranks' shares
    until they are equal. Filled up with samples that have already been given out, 1,001 samples on
    2 ranks are measured as 1,002. Unequal shares are safe here: to evaluate, the ranks meet only
    at the end, when the metrics add up their sums. (A model with buffers, such as batch norm's,
    needs DDPStrategy(broadcast_buffers=False) besides, since DDP would send them round each step.)
    """

    def __init__(self, dataset: Sized, rank: int, world_size: int) -> None:
        self.indices = range(rank, len(dataset), world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class SpiralDataModule(L.LightningDataModule):
    """The spirals, split 70/15/15 by seed; `batch_size` counts samples a rank and step.

    It shares the data among the ranks itself, so the Trainer must be told not to:
    `Trainer(use_distributed_sampler=False)`.
    """

    def __init__(
        self,
        num_samples: int = 10_000,
        noise: float = 0.2,
        seed: int = 42,
        batch_size: int = 32,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        """Make the points; every rank makes the same ones."""
        values = self.hparams
        data = SpiralDataset(values.num_samples, values.noise, values.seed)
        generator = torch.Generator().manual_seed(values.seed)
        self.training, self.validation, self.test = random_split(
            data, part_sizes(values.num_samples), generator
        )

    def train_dataloader(self) -> DataLoader[Sample]:
        """Return this rank's share of the training samples, in another order every epoch."""
        rank, world_size = self._place()
        # Here the shares are made equal, by a few samples given out twice: a rank with a step less
        # would leave the others waiting for its gradients. Lightning calls set_epoch.
        sampler: DistributedSampler[Sample] = DistributedSampler(
            self.training, world_size, rank, seed=self.hparams.seed
        )
        return self._loader(self.training, sampler)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Return this rank's share of the validation samples, each in one share alone."""
        return self._loader(self.validation, EverySampleOnce(self.validation, *self._place()))

    def test_dataloader(self) -> DataLoader[Sample]:
        """Return this rank's share of the test samples, each in one share alone."""
        return self._loader(self.test, EverySampleOnce(self.test, *self._place()))

    def _place(self) -> tuple[int, int]:
        """Return rank and world size; a process that is alone has no group to ask."""
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def _loader(self, data: Dataset[Sample], sampler: Sampler[int]) -> DataLoader[Sample]:
        return DataLoader(
            data,
            self.hparams.batch_size,
            sampler=sampler,
            num_workers=self.hparams.num_workers,
            # Starting the workers anew would cost more than an epoch of such small samples.
            persistent_workers=self.hparams.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
