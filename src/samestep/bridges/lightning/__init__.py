"""The same recipe in PyTorch Lightning's Trainer: a LightningModule and a LightningDataModule.

    trainer = L.Trainer(max_epochs=3)
    trainer.fit(LitRecipe("spiral"), LitData("spiral"))

Order, batches, weights, seeds and learning rates are those of `samestep train`, on any number of
ranks: each loss counts with its share of the global batch, metrics are sums over all samples.
"""

from samestep.base.errors import UserError

try:
    from samestep.bridges.lightning.brought import recipe
    from samestep.bridges.lightning.datamodule import CIFAR10DataModule, LitData, SpiralDataModule
    from samestep.bridges.lightning.logger import TrackerLogger
    from samestep.bridges.lightning.module import LitRecipe
except ModuleNotFoundError as missing:
    if missing.name is None or not missing.name.startswith("lightning"):
        raise
    raise UserError(
        "PyTorch Lightning is not installed. Install it with: pip install 'samestep[lightning]'"
    ) from missing

__all__ = [
    "CIFAR10DataModule",
    "LitData",
    "LitRecipe",
    "SpiralDataModule",
    "TrackerLogger",
    "recipe",
]
