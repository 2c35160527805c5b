"""Train ResNet-18 with Lightning, all logging off, over the same images in a DataLoader."""

import torch
from common import options
from resnet import BATCH_SIZE, augment, resnet18, sgd, train_images
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from with_lightning import Classifier, fit


class Images(Classifier):
    """The same module, with the augmentation of whole batches and the usual optimizer."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        return super().training_step((augment(images), labels), batch_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.model)


asked = options()
loader = DataLoader(
    TensorDataset(*train_images(asked.data_dir)), batch_size=BATCH_SIZE, shuffle=True
)
fit(Images(resnet18(), log_loss=False), loader, asked.epochs)
