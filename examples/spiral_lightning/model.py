"""A small MLP, and how it is trained and measured."""

from collections.abc import Sequence

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

CLASSES = 2


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
    """Train the MLP with Adam; log loss and accuracy of each epoch over the samples of all ranks.

    Each metric keeps sums and counts, and adds up those of all ranks before it divides once. The
    other way, `self.log(..., sync_dist=True)` of a batch's mean, needs the batch's size beside it,
    and without sync_dist the logged value is that of rank 0's share.
    """

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
        # One of each kind for each part: metrics of two parts must not add up.
        for part in ("train", "val", "test"):
            self.add_module(f"{part}_loss", MeanMetric())
            self.add_module(
                f"{part}_accuracy", MulticlassAccuracy(num_classes=CLASSES, average="micro")
            )

    def forward(self, points: Tensor) -> Tensor:
        """Return logits (batch, 2)."""
        return self.model(points)

    def on_train_start(self) -> None:
        """Let dropout's masks differ between the ranks, which so far drew equal numbers."""
        torch.manual_seed(self.hparams.seed + 1 + self.global_rank)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of this rank's batch; DDP averages its gradients over the ranks."""
        return self._step(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Measure."""
        self._step(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Measure."""
        self._step(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)

    def _step(self, batch: tuple[Tensor, Tensor], part: str) -> Tensor:
        points, labels = batch
        logits = self(points)
        loss = nn.functional.cross_entropy(logits, labels)
        mean_loss, accuracy = self._metric(f"{part}_loss"), self._metric(f"{part}_accuracy")
        mean_loss.update(loss.detach(), weight=len(labels))
        accuracy.update(logits, labels)
        # Given the metrics themselves, Lightning computes them at the end of the epoch, on all
        # ranks together, and resets them.
        self.log_dict(
            {f"{part}_loss": mean_loss, f"{part}_accuracy": accuracy},
            on_step=False,
            on_epoch=True,
            batch_size=len(labels),
        )
        return loss

    def _metric(self, name: str) -> Metric:
        metric = self.get_submodule(name)
        assert isinstance(metric, Metric)
        return metric
