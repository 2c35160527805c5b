"""Train ResNet-18 with Lightning, all logging off, over the images that lie on the GPU.

Its loader only picks whole batches there, so that Lightning waits for no data.
"""

from collections.abc import Iterator

import torch
from common import DEVICE, options
from resnet import augment, resnet18, sgd, train_images
from torch import Tensor
from with_lightning import Classifier, fit

asked = options()


class Resident:
    """Whole batches of tensors on the device, in a new order each epoch, the last one left out."""

    def __init__(self) -> None:
        self.images, self.labels = (t.to(DEVICE) for t in train_images(asked.data_dir))
        self.dataset = range(len(self) * asked.batch_size)  # what is trained of it

    def __len__(self) -> int:
        return len(self.images) // asked.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images), device=DEVICE)[: len(self.dataset)]
        for batch in order.split(asked.batch_size):
            yield self.images[batch], self.labels[batch]


class Images(Classifier):
    """The same module, with the augmentation of whole batches and the usual optimizer."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_index: int) -> Tensor:
        images, labels = batch
        inputs = augment(images).contiguous(memory_format=torch.channels_last)
        return super().training_step((inputs, labels), batch_index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.model)


module = Images(resnet18(asked.width), log_loss=False)
fit(module, Resident(), asked.epochs, precision="bf16-mixed", benchmark=True)
