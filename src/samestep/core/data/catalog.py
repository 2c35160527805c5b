"""The data sets that samestep can download: where each one is, and what its bytes must be.

Every file is checked against the MD5 that its publishers give, whichever mirror it came from.
"""

from dataclasses import dataclass

from samestep.base.errors import UserError, did_you_mean


@dataclass(frozen=True)
class RemoteFile:
    """One file of a data set."""

    name: str
    """On the mirrors and in the data folder."""
    md5: str
    """Of its bytes, in hexadecimal."""
    size_bytes: int
    unpack: bool = False
    """Whether it is a tar archive to be unpacked in place."""


@dataclass(frozen=True, kw_only=True)
class RemoteDataset:
    """One data set: what it is, whose it is, and where its files are."""

    name: str
    """What a user types."""
    description: str
    licence: str
    source: str
    """The page that describes it."""
    files: tuple[RemoteFile, ...]
    mirrors: tuple[str, ...]
    """Base addresses, each ending in a slash, in the order in which they are tried."""


_MNIST = RemoteDataset(
    name="mnist",
    description="handwritten digits: 60,000 + 10,000 grey images of 28x28, 10 classes",
    licence="CC BY-SA 3.0, (c) Yann LeCun and Corinna Cortes",
    source="https://yann.lecun.com/exdb/mnist/",
    files=(
        RemoteFile("train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
        RemoteFile("train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432", 28_881),
        RemoteFile("t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3", 1_648_877),
        RemoteFile("t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c", 4_542),
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)

_FASHION_MNIST = RemoteDataset(
    name="fashion-mnist",
    description="pieces of clothing: 60,000 + 10,000 grey images of 28x28, 10 classes",
    licence="MIT, (c) Zalando SE",
    source="https://github.com/zalandoresearch/fashion-mnist",
    files=(
        RemoteFile("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
        RemoteFile("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe", 29_515),
        RemoteFile("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79", 4_422_102),
        RemoteFile("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310", 5_148),
    ),
    # The first is plain HTTP, all that its publishers offer there; the MD5 is checked either way.
    mirrors=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)

_CIFAR10 = RemoteDataset(
    name="cifar10",
    description="photographs of things and animals: 50,000 + 10,000 of 32x32, 10 classes",
    licence="none stated; for research, (c) Alex Krizhevsky, Vinod Nair, Geoffrey Hinton",
    source="https://www.cs.toronto.edu/~kriz/cifar.html",
    files=(
        RemoteFile(
            "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 170_052_171, unpack=True
        ),
    ),
    mirrors=("https://www.cs.toronto.edu/~kriz/",),
)

CATALOG: dict[str, RemoteDataset] = {each.name: each for each in (_MNIST, _FASHION_MNIST, _CIFAR10)}


def find_dataset(name: str) -> RemoteDataset:
    """Return the data set of that name."""
    if name in CATALOG:
        return CATALOG[name]
    hint = did_you_mean(name.lower().replace("_", "-"), CATALOG)
    raise UserError(
        f"There is no data set {name!r} to download. {hint}"
        f"The data sets are: {', '.join(CATALOG)}. See: samestep data list"
    )
