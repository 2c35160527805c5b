"""MNIST's training images through a DataLoader whose workers prepare one image at a time."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

MEAN, STD = 0.1307, 0.3081  # of MNIST's training pixels, scaled to 0 … 1
# Where the data is looked for: from here, and beside the folder that holds the examples.
PLACES = (Path("data/mnist"), Path(__file__).resolve().parents[2] / "data" / "mnist")


class MnistDataset(Dataset[tuple[Tensor, int]]):
    """MNIST's training images from IDX files; each is normalised when it is asked for.

    That is how most data sets are written, and why there are loader workers: some small operations
    for every image, where a whole batch could have them at once.
    """

    def __init__(self, data_dir: Path | None = None) -> None:
        """Read the files.

        Raises:
            FileNotFoundError: they are not there.
            ValueError: they are damaged, or do not belong together.
        """
        self.images = _read_idx("train-images-idx3-ubyte", 3, data_dir)
        self.labels = _read_idx("train-labels-idx1-ubyte", 1, data_dir)
        if self.images.shape[1:] != (28, 28) or len(self.images) != len(self.labels):
            raise ValueError(
                f"The images are {self.images.shape} with {len(self.labels)} labels; there must "
                "be one label an image, and 28 x 28 pixels. Download both files again."
            )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image (1, 28, 28) of mean 0 and deviation 1, and its label."""
        stored = self.images[index].astype(np.float32)
        image = (stored / 255 - MEAN) / STD
        return torch.from_numpy(image).unsqueeze(0), int(self.labels[index])


def get_mnist_dataloader(
    batch_size: int = 32, num_workers: int = 4, data_dir: Path | None = None
) -> DataLoader[Any]:
    """Return shuffled batches of images (batch, 1, 28, 28) and labels (batch,).

    Args:
        batch_size: images a batch; the last one of an epoch may have fewer.
        num_workers: processes that prepare batches ahead; with 0 the training process does it.
        data_dir: folder of the IDX files; by default `data/mnist`, here or beside the examples.

    Raises:
        FileNotFoundError: the files are not there.
        ValueError: they are damaged, or do not belong together.
    """
    return DataLoader(
        MnistDataset(data_dir),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        # Else they are started anew in every epoch, and the trace begins with that.
        persistent_workers=num_workers > 0,
    )


def _read_idx(name: str, num_axes: int, data_dir: Path | None) -> np.ndarray:
    """Return what an IDX file holds; `name` may also end in .gz, and lie in data_dir/raw.

    The format: two zero bytes, 8 for "unsigned bytes", the number of axes, their lengths as
    big-endian 32-bit numbers, the values.
    """
    folders = PLACES if data_dir is None else (data_dir,)
    paths = [f / sub / (name + end) for f in folders for sub in ("", "raw") for end in ("", ".gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        looked = " or ".join(str(folder) for folder in folders)
        raise FileNotFoundError(
            f"There is no {name}[.gz] in {looked}. Download MNIST there (`samestep data get mnist "
            "--data-dir data/mnist`, or by hand), or name the folder you have it in: "
            "--data_dir DIR."
        )
    try:
        content = path.read_bytes()
        content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
        if content[:4] != bytes([0, 0, 8, num_axes]):
            raise ValueError(f"this is no IDX file of unsigned bytes with {num_axes} axes")
        shape = np.frombuffer(content, ">u4", num_axes, offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape).copy()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be used: {error}. Download it again.") from error
