"""Find the data of the GPU's benchmark, or make files of the same shape from random bytes."""

import struct
from pathlib import Path

import numpy as np

CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")


def prepare(asked: Path, folder: Path, *, dry: bool) -> dict[str, str]:
    """Put cifar10/ and mnist/ into a folder; return of each whether its files are real.

    Args:
        asked: the user's folder; the files may also lie in its cifar10/ or mnist/.
        folder: where to put links to them, or random ones.
        dry: whether to make a few random ones, whatever is there.
    """
    folder.mkdir()
    told = {}
    for name, file in (("cifar10", CIFAR10_FILES[0]), ("mnist", "train-images-idx3-ubyte")):
        found = None if dry else _find(asked, name, file)
        if found is not None:
            (folder / name).symlink_to(found.resolve())
            told[name] = f"real, {sum(path.stat().st_size for path in found.iterdir()):,} bytes"
        else:
            (folder / name).mkdir()
            make = _random_cifar10 if name == "cifar10" else _random_mnist
            make(folder / name, dry=dry)
            told[name] = "random bytes"
    return told


def _find(asked: Path, name: str, file: str) -> Path | None:
    """Return the folder that a data set's files lie in."""
    inside = ("", name, f"{name}/cifar-10-batches-bin", "cifar-10-batches-bin", f"{name}/raw")
    places = [asked / place for place in inside]
    return next((p for p in places if (p / file).is_file() or (p / f"{file}.gz").is_file()), None)


def _random_cifar10(folder: Path, *, dry: bool) -> None:
    draw = np.random.default_rng(42)
    rows = 24 if dry else 10_000
    for name in CIFAR10_FILES:
        records = draw.integers(0, 256, (rows, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)


def _random_mnist(folder: Path, *, dry: bool) -> None:
    draw = np.random.default_rng(42)
    for split, count in (("train", 640 if dry else 60_000), ("t10k", 64 if dry else 10_000)):
        images = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = draw.integers(0, 10, count, dtype=np.uint8)
        head = struct.pack(">IIII", 2051, count, 28, 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = struct.pack(">II", 2049, count)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
