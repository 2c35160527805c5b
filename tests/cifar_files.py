"""Small CIFAR-10 files of both kinds, made from a seed: each class has a colour of its own."""

from pathlib import Path

import numpy as np

from samestep.core.recipes.cifar10 import CLASSES


def images_and_labels(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return images (count, 3, 32, 32) and labels (count,), both uint8."""
    generator = np.random.default_rng(seed)
    labels = (np.arange(count) % 10).astype(np.uint8)
    noise = generator.integers(0, 100, (count, 3, 32, 32))
    colours = np.random.default_rng(1).integers(0, 150, (10, 3))
    return (noise + colours[labels][:, :, None, None]).astype(np.uint8), labels


def write_binary(folder: Path, *, per_file: int = 20, num_test: int = 30) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    counts = {f"data_batch_{number}.bin": per_file for number in range(1, 6)}
    for seed, (name, count) in enumerate({**counts, "test_batch.bin": num_test}.items()):
        images, labels = images_and_labels(count, seed)
        (folder / name).write_bytes(records(images, labels))
    return folder


def records(images: np.ndarray, labels: np.ndarray) -> bytes:
    """Return images and labels as the binary version has them, one record after the other."""
    pairs = zip(images, labels, strict=True)
    return b"".join(bytes([label]) + image.tobytes() for image, label in pairs)


def write_folders(folder: Path, *, ending: str = "jpg", num_train: int = 60, num_test: int = 20):
    """Write train/CLASS/ and test/CLASS/; PNG keeps every value, JPEG nearly."""
    from PIL import Image

    for split, count, seed in (("train", num_train, 0), ("test", num_test, 1)):
        images, labels = images_and_labels(count, seed)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / split / CLASSES[label]
            place.mkdir(parents=True, exist_ok=True)
            path = place / f"{number:04}.{ending}"
            Image.fromarray(image.transpose(1, 2, 0)).save(path)
    return folder
