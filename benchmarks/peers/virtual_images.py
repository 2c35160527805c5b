"""Made-up images of CIFAR's size for a ConvNet and a ResNet-18: what virtual ranks cost."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from samestep.core.recipe import Recipe, Splits
from samestep.core.recipes.cifar10 import augment, normalise
from samestep.core.recipes.resnet import resnet18

NUM_IMAGES = 4096


@dataclass(frozen=True)
class Options:
    """The options of this recipe."""

    model: Literal["convnet", "resnet"] = "convnet"
    """convnet: two convolutions with BatchNorm and Dropout; resnet: ResNet-18 of width 16."""


def _convnet() -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, 32, 3, padding=1),
        norm1=nn.BatchNorm2d(32),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3, padding=1),
        norm2=nn.BatchNorm2d(64),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        dropout1=nn.Dropout(0.25),
        fc1=nn.Linear(4096, 128),
        relu3=nn.ReLU(),
        dropout2=nn.Dropout(0.5),
        fc2=nn.Linear(128, 10),
    )
    return nn.Sequential(layers)


def model(options: Options) -> nn.Module:
    return _convnet() if options.model == "convnet" else resnet18(10, stem="small", width=16)


def data(_options: Options) -> Splits:
    draw = torch.Generator().manual_seed(42)
    images = torch.randint(256, (NUM_IMAGES, 3, 32, 32), dtype=torch.uint8, generator=draw)
    return Splits(train=(images, torch.randint(10, (NUM_IMAGES,), generator=draw)))


recipe = Recipe(
    model=model,
    data=data,
    options=Options,
    augment=augment,
    transform=normalise,
    accepts=("batchnorm", "dropout"),
    settings={"optimizer": "adam", "lr": 1e-3, "epochs": 1, "log_every": 50},
)
