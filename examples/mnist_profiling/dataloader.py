"""MNIST through a DataLoader whose workers prepare one image at a time."""

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0 … 1
# Where to look for the data: below the current folder, or beside the examples folder.
PLACES = (Path("data/mnist"), Path(__file__).resolve().parents[2] / "data" / "mnist")


class MnistDataset(Dataset[tuple[Tensor, int]]):
    """MNIST's images and labels; each image is normalised when it is asked for.

    Most data sets are written like this: a few small operations per image, where one operation
    could handle the whole batch. This is the work that loader workers share.
    """

    def __init__(self, data_dir: Path | None = None, part: str = "train") -> None:
        """Read the files of a part: `train` (60,000 images) or `t10k` (10,000 test images).

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or the two do not belong together.
        """
        self.images = _read_idx(f"{part}-images-idx3-ubyte", 3, data_dir)
        self.labels = _read_idx(f"{part}-labels-idx1-ubyte", 1, data_dir)
        if self.images.shape[1:] != (28, 28) or len(self.images) != len(self.labels):
            raise ValueError(
                f"The {part} files hold images {self.images.shape} and {len(self.labels)} labels, "
                "not one label per image of 28 x 28 pixels. Download both files again."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (1, 28, 28), normalised, and its label."""
        scaled = self.images[index].astype(np.float32) / 255  # 0 … 255 becomes 0 … 1
        image = (scaled - MEAN) / STD  # mean 0 and deviation 1 over the data set
        return torch.from_numpy(image).unsqueeze(0), int(self.labels[index])


class AugmentedMnistDataset(MnistDataset):
    """MNIST's images, each turned and bent at random: samples that cost more to prepare."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (1, 28, 28), another one each time, and its label."""
        image, label = super().__getitem__(index)
        angle = math.radians(15) * (2 * float(torch.rand(())) - 1)
        cosine, sine = math.cos(angle), math.sin(angle)
        turn = torch.tensor([[[cosine, -sine, 0.0], [sine, cosine, 0.0]]])
        grid = functional.affine_grid(turn, [1, 1, 28, 28], align_corners=False)
        # Each pixel moves a little, neighbours in nearly the same way.
        moves = 2 * torch.rand(1, 2, 28, 28) - 1
        for _ in range(3):
            moves = functional.avg_pool2d(moves, 7, stride=1, padding=3)
        grid = grid + moves.permute(0, 2, 3, 1)
        new = functional.grid_sample(image[None], grid, padding_mode="border", align_corners=False)
        return new[0], label


def get_mnist_dataloader(
    batch_size: int = 32, num_workers: int = 4, data_dir: Path | None = None, augment: bool = False
) -> DataLoader[Any]:
    """Return shuffled batches of images (batch, 1, 28, 28) and labels (batch,).

    Args:
        batch_size: images per batch; the last batch of an epoch may have fewer.
        num_workers: processes that prepare batches ahead; with 0 the training process does it.
        data_dir: folder of the IDX files; by default one of `PLACES`.
        augment: turn and bend each image at random, which costs more than the rest.
    """
    return DataLoader(
        AugmentedMnistDataset(data_dir) if augment else MnistDataset(data_dir),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=num_workers > 0,  # else each epoch starts them again
    )


def _read_idx(name: str, num_axes: int, data_dir: Path | None) -> np.ndarray:
    """Return the array in an IDX file, which may be compressed (.gz).

    The format: two zero bytes, 8 for "unsigned bytes", the number of axes, the length of each axis
    as a big-endian 32-bit number, then the values.
    """
    folders = PLACES if data_dir is None else (data_dir,)
    paths = [folder / (name + end) for folder in folders for end in ("", ".gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f"There is no {name}[.gz] in {' or '.join(map(str, folders))}. Download MNIST "
            "(`samestep data get mnist --data-dir data/mnist`), or name its folder: --data_dir DIR."
        )
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        if content[:4] != bytes([0, 0, 8, num_axes]):
            raise ValueError(f"not an IDX file of unsigned bytes with {num_axes} axes")
        shape = np.frombuffer(content, ">u4", num_axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}. Download it again.") from error
