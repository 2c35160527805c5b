"""Train ResNet-18 by hand with the images on the GPU: bf16, channels last, fused SGD.

`--compile` compiles the model, as PyTorch's documentation recommends first.
"""

import sys

import torch
from common import DEVICE, measure, options
from resnet import augment, resnet18, sgd, train_images
from torch.nn.functional import cross_entropy

compiles = "--compile" in sys.argv
sys.argv = [word for word in sys.argv if word != "--compile"]
torch.backends.cudnn.benchmark = True
asked = options()
images, labels = (tensor.to(DEVICE) for tensor in train_images(asked.data_dir))
network = resnet18(asked.width).to(DEVICE).train()
optimizer = sgd(network)
model = torch.compile(network, dynamic=False) if compiles else network


def train_epoch(_epoch: int) -> int:
    full = len(images) // asked.batch_size * asked.batch_size
    order = torch.randperm(len(images), device=DEVICE)[:full]
    for batch in order.split(asked.batch_size):
        inputs = augment(images[batch]).contiguous(memory_format=torch.channels_last)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = cross_entropy(model(inputs), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return full


measure(train_epoch, asked.epochs)
