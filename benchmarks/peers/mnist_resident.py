"""Train on IDX images by hand: normalise once, keep the tensor, gather batches, fused Adam."""

import torch
from common import BATCH_SIZE, LEARNING_RATE, MEAN, STD, measure, options, simple_model, train_files
from torch.nn.functional import cross_entropy

asked = options()
pixels, labels = train_files(asked.data_dir)
images = pixels.float().div_(255).sub_(MEAN).div_(STD)
model = simple_model().train()
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)


def train_epoch(_epoch: int) -> int:
    for batch in torch.randperm(len(images)).split(BATCH_SIZE):
        loss = cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return len(images)


measure(train_epoch, asked.epochs)
