"""A LightningModule as it is, trained by samestep: the last line replaces the Trainer.

samestep train lightning_module.py
"""

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import BinaryAccuracy

import samestep.lightning

Batch = tuple[Tensor, Tensor]  # points (batch, 8) and labels (batch,)


class Points(L.LightningDataModule):
    """Points whose label says whether their first two numbers have the same sign."""

    def setup(self, stage: str) -> None:
        """Make 2,500 points, and keep 500 of them for the validation."""
        points = torch.randn(2500, 8, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(points, (points[:, 0] * points[:, 1] > 0).float())
        self.parts = random_split(data, [2000, 500], torch.Generator().manual_seed(1))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the points to train on."""
        return DataLoader(self.parts[0], batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the points to measure on."""
        return DataLoader(self.parts[1], batch_size=32)


class Classifier(L.LightningModule):
    """A small MLP with AdamW and a cosine."""

    def __init__(self, width: int = 32, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
        self.accuracy = BinaryAccuracy()

    def forward(self, points: Tensor) -> Tensor:
        """Return a logit for each point (batch,)."""
        return self.layers(points).squeeze(1)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch."""
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Log the loss and the accuracy."""
        logits = self(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_loss", nn.functional.binary_cross_entropy_with_logits(logits, batch[1]))
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


recipe = samestep.lightning.recipe(Classifier, Points, batch_size=32, epochs=5)
