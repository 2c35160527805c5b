"""Train ResNet-18 by hand: uint8 images in memory, whole batches augmented, fused SGD."""

import torch
from common import measure, options
from resnet import BATCH_SIZE, augment, resnet18, sgd, train_images
from torch.nn.functional import cross_entropy

asked = options()
images, labels = train_images(asked.data_dir)
model = resnet18().train()
optimizer = sgd(model)


def train_epoch(_epoch: int) -> int:
    for batch in torch.randperm(len(images)).split(BATCH_SIZE):
        loss = cross_entropy(model(augment(images[batch])), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(images)


measure(train_epoch, asked.epochs)
