"""Points on two interleaved spirals, and how the ranks share them."""

import math
from collections.abc import Iterator, Sized

import lightning as L
import torch
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

    Class 1 is class 0 turned by pi. If the number is odd, class 0 has one point more.
    """

    def __init__(self, num_samples: int = 10_000, noise: float = 0.2, seed: int = 42) -> None:
        # A generator of its own, so that the points depend on nothing drawn before.
        generator = torch.Generator().manual_seed(seed)
        labels = torch.arange(num_samples) % 2
        # The square root spreads the points evenly over the length of the arm.
        radius = torch.rand(num_samples, generator=generator).sqrt() * (2 * math.pi * TURNS)
        angle = radius + labels * math.pi
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        points += noise * torch.randn(num_samples, 2, generator=generator)
        super().__init__(points, labels)


class EverySampleOnce(Sampler[int]):
    """Give each rank every n-th sample, so that no sample goes to two ranks.

    A DistributedSampler, also the one that Lightning inserts, repeats samples until all shares are
    equal: 1,001 samples on 2 ranks are evaluated as 1,002. Unequal shares are safe in evaluation,
    where ranks meet only at the end, to add up their sums. (A model with buffers, such as batch
    norm's, also needs DDPStrategy(broadcast_buffers=False): DDP broadcasts them in each forward.)
    """

    def __init__(self, dataset: Sized, rank: int, world_size: int) -> None:
        self.indices = range(rank, len(dataset), world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class SpiralDataModule(L.LightningDataModule):
    """The spirals, split 70/15/15; `batch_size` is the number of samples per rank and step.

    It splits the data between the ranks itself: use Trainer(use_distributed_sampler=False).
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
        """Make the points; every rank makes the same ones, and the same split."""
        count, seed = self.hparams.num_samples, self.hparams.seed
        data = SpiralDataset(count, self.hparams.noise, seed)
        sizes = [int(count * 0.70), int(count * 0.15)]
        generator = torch.Generator().manual_seed(seed)
        self.training, self.validation, self.test = random_split(
            data, [*sizes, count - sum(sizes)], generator
        )

    def train_dataloader(self) -> DataLoader[Sample]:
        """Return this rank's share of the training samples, in another order in every epoch."""
        # Shares must be equal here, at the price of a few repeated samples: a rank with one step
        # less would leave the others waiting for its gradients. Lightning calls set_epoch.
        sampler: DistributedSampler[Sample] = DistributedSampler(
            self.training, self.trainer.world_size, self.trainer.global_rank, seed=self.hparams.seed
        )
        return self._loader(self.training, sampler)

    def val_dataloader(self) -> DataLoader[Sample]:
        """Return this rank's share of the validation samples."""
        return self._loader(self.validation, self._share(self.validation))

    def test_dataloader(self) -> DataLoader[Sample]:
        """Return this rank's share of the test samples."""
        return self._loader(self.test, self._share(self.test))

    def _share(self, data: Dataset[Sample]) -> EverySampleOnce:
        return EverySampleOnce(data, self.trainer.global_rank, self.trainer.world_size)

    def _loader(self, data: Dataset[Sample], sampler: Sampler[int]) -> DataLoader[Sample]:
        return DataLoader(
            data,
            self.hparams.batch_size,
            sampler=sampler,
            num_workers=self.hparams.num_workers,
            # Starting workers again in every epoch costs more than an epoch of such small samples.
            persistent_workers=self.hparams.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
