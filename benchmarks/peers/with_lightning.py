"""Hold the LightningModule and the two Trainers: everything off, and as it comes."""

import tempfile
from typing import Any

import lightning
import torch
from common import DEVICE, LEARNING_RATE, now, report
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """The model as Lightning's own introduction writes it, with a stopwatch in its epoch hooks."""

    def __init__(self, model: nn.Module, *, log_loss: bool) -> None:
        super().__init__()
        self.model = model
        self.log_loss = log_loss
        self.loss_function = nn.CrossEntropyLoss()
        self.seconds: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _batch_index: int) -> Tensor:
        inputs, targets = batch
        loss = self.loss_function(self.model(inputs), targets)
        if self.log_loss:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    def on_train_epoch_start(self) -> None:
        self.started = now()

    def on_train_epoch_end(self) -> None:  # runs before the checkpoint callback's turn
        self.seconds.append(now() - self.started)


def train(
    model: nn.Module, loader: DataLoader, epochs: int, *, default: bool = False, ranks: int = 1
) -> None:
    """Fit a model with logger, progress bar and checkpoints off, or as a bare `Trainer()` does."""
    fit(Classifier(model, log_loss=default), loader, epochs, default=default, ranks=ranks)


def fit(
    classifier: Classifier,
    loader: DataLoader,
    epochs: int,
    *,
    default: bool = False,
    ranks: int = 1,
    **more: Any,
) -> None:
    """Fit a module, with more arguments of the Trainer if need be, and report its seconds."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            max_epochs=epochs + 1,
            accelerator="gpu" if DEVICE.type == "cuda" else "cpu",
            devices=ranks,
            strategy="ddp" if ranks > 1 else "auto",
            default_root_dir=directory,
            **({} if default else quiet),
            **more,
        )
        trainer.fit(classifier, loader)
    if trainer.is_global_zero:
        report(classifier.seconds, len(loader.dataset))
