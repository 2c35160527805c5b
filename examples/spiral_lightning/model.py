"""A small MLP, and how it is trained and measured."""

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 2
Batch = tuple[Tensor, Tensor]  # points (batch, 2) and labels (batch,)


class MLP(nn.Sequential):
    """Map points (batch, 2) to logits (batch, 2)."""

    def __init__(self, hidden_dims: Sequence[int] = (64, 32, 16), dropout: float = 0.1) -> None:
        layers: list[nn.Module] = []
        width = 2
        for hidden in hidden_dims:
            layers += [nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout)]
            width = hidden
        super().__init__(*layers, nn.Linear(width, CLASSES))


class SpiralClassifier(L.LightningModule):
    """Train the MLP with Adam; log each epoch's loss and accuracy over the samples of all ranks."""

    def __init__(
        self,
        hidden_dims: Sequence[int] = (64, 32, 16),
        dropout: float = 0.1,
        learning_rate: float = 1e-3,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = MLP(hidden_dims, dropout)
        # Each metric holds a sum and a count; each part of the data has its own.
        self.metrics = nn.ModuleDict()
        for part in ("train", "val", "test"):
            self.metrics[f"{part}_loss"] = MeanMetric()
            self.metrics[f"{part}_accuracy"] = MulticlassAccuracy(CLASSES, average="micro")

    def forward(self, points: Tensor) -> Tensor:
        """Return logits (batch, 2)."""
        return self.model(points)

    def on_train_start(self) -> None:
        """Let dropout differ between ranks, whose random numbers are equal until now."""
        torch.manual_seed(self.hparams.seed + 1 + self.global_rank)

    def training_step(self, batch: Batch) -> Tensor:
        """Return the mean loss of this rank's batch; DDP averages the gradients over the ranks."""
        loss = self._measure(batch, "train")
        # The mean over the ranks is the mean over the samples: shares are equal in training.
        self.log("train_loss_step", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch) -> None:
        """Update the validation metrics."""
        self._measure(batch, "val")

    def test_step(self, batch: Batch) -> None:
        """Update the test metrics."""
        self._measure(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _measure(self, batch: Batch, part: str) -> Tensor:
        points, labels = batch
        logits = self(points)
        loss = nn.functional.cross_entropy(logits, labels)
        mean_loss, accuracy = self.metrics[f"{part}_loss"], self.metrics[f"{part}_accuracy"]
        mean_loss.update(loss.detach(), weight=len(labels))
        accuracy.update(logits, labels)
        # At the end of the epoch, Lightning asks the two for their values: they add up the sums
        # and counts of all ranks, and divide once.
        self.log(f"{part}_loss", mean_loss, on_step=False, on_epoch=True)
        self.log(f"{part}_accuracy", accuracy, on_step=False, on_epoch=True)
        return loss
