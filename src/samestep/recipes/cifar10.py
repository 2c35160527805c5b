"""CIFAR-10 and ResNet-18: 32 x 32 colour images of ten classes."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from samestep.data.augment import crop, flip
from samestep.data.augment import normalise as normalise_channels
from samestep.data.cifar import CLASSES, SIZES, has_cifar10, read_cifar10
from samestep.data.download import download
from samestep.data.images.decode import decode
from samestep.data.keyed_random import uniform
from samestep.data.random_split import hold_out
from samestep.models.resnet import resnet18
from samestep.recipe import Recipe, Splits
from samestep.settings import check_flags, may_change

# Of CIFAR-10's training pixels, by channel, as everyone normalises them.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Cifar10Options:
    """The options of this recipe."""

    data_dir: str = may_change("data/cifar10")
    """Folder of the binary version (*.bin, or cifar-10-batches-bin/), or of train/CLASS/*.jpg."""
    download: bool = may_change(False)
    """Fetch the binary version into the folder first if no data is there, once a node."""
    width: int = 64
    """Channels of the first stage; 64 is ResNet-18, fewer train faster and reach less."""
    validation_fraction: float = 0.1
    """Part of the training set that is held out for validation: 5,000 of 50,000."""
    split_seed: int = 42
    """Seed of that split."""

    def __post_init__(self) -> None:
        check_flags(self, ["width"], lambda value: value >= 1, "be 1 or more")
        within = "lie between 0 and 1"
        check_flags(self, ["validation_fraction"], lambda value: 0 < value < 1, within)


def model(options: Cifar10Options) -> nn.Module:
    """Return a ResNet-18 with the stem for small images."""
    return resnet18(len(CLASSES), stem="small", width=options.width)


def fetch(options: Cifar10Options) -> None:
    """Download the binary version if the options ask for it and no data is there."""
    folder = Path(options.data_dir)
    if options.download and not has_cifar10(folder):
        download("cifar10", folder)


def data(options: Cifar10Options) -> Splits:
    """Read the files; the images stay as they are stored, (samples, 3, 32, 32) uint8."""
    folder = Path(options.data_dir)
    fetch(options)
    whole, test = read_cifar10(folder, "train"), read_cifar10(folder, "test")
    train, validation = hold_out(whole, options.validation_fraction, options.split_seed)
    return Splits(
        train=train,
        validation=validation,
        test=test,
        classes=CLASSES,
        notes=tuple(  # files may have been cut off
            f"The {name} set has {size:,} images; CIFAR-10's has {SIZES[name]:,}."
            for name, size in (("train", len(whole[0])), ("test", len(test[0])))
            if size != SIZES[name]
        ),
    )


def augment(images: Tensor, keys: Tensor) -> Tensor:
    """Crop at random out of a border of 4 black pixels, and mirror every other image."""
    draws = uniform(keys, 3)
    return flip(crop(images, draws[:, :2], padding=4), draws[:, 2])


def normalise(images: Tensor) -> Tensor:
    """Turn stored images (batch, 3, 32, 32) uint8 into what the model takes."""
    return normalise_channels(images, _MEAN, _STD)


def read(_options: Cifar10Options, file: Path) -> Tensor:
    """Return the middle of any image as the model's are stored: (3, 32, 32) uint8."""
    return decode(file, 32)


recipe = Recipe(
    model=model,
    data=data,
    options=Cifar10Options,
    read=read,
    augment=augment,
    transform=normalise,
    accepts=("batchnorm",),
    settings={
        "epochs": 50,
        "batch_size": 128,
        "eval_batch_size": 512,
        "optimizer": "sgd",
        "lr": 0.1,
        "base_batch_size": 128,  # --lr-scaling linear then scales with the global batch
        "momentum": 0.9,
        "weight_decay": 5e-4,
        # Without it the loss rises to 7 in the first ten steps; linear scaling needs it more yet.
        "warmup_steps": 300,
        "schedule": "cosine",
        "channels_last": True,
        "keep_top_k": 3,  # a checkpoint is 90 MB
    },
)
