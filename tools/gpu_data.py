"""Unpack the kit's real data into folders that the recipes read with --data-dir.

CIFAR-10's JPEG files become the six files of its binary version: 60,000 small files take longer to
write than to decode. MNIST's 10,000 test digits become a small MNIST: a tenth of it to test.
"""

import gzip
import io
import re
import struct
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
IMAGES_PER_CLASS = {"train": 100, "test": 10}
"""Of CIFAR-10's JPEG files, those that are kept as files too, for the recipe images."""
_FILES = {
    "train": [f"data_batch_{number}.bin" for number in range(1, 6)],
    "test": ["test_batch.bin"],
}
_NAME = re.compile(r"(?:.*/)?(train|test)/([a-z]+)/([0-9]+)\.jpe?g")
_WHOLE = "whole"


def unpack(packed: Path, folder: Path) -> list[str]:
    """Unpack what there is of the kit's data, once; return the names of the data sets there.

    Args:
        packed: the kit's folder data/.
        folder: where cifar10/, images/ and mnist/ are made.
    """
    for name, archive, make in (
        ("cifar10", packed / "cifar10-jpeg.tar.xz", _cifar10),
        ("mnist", packed / "t10k-images-idx3-ubyte.gz", _mnist),
    ):
        mark = folder / name / _WHOLE
        if archive.is_file() and not mark.exists():
            began = time.perf_counter()
            (folder / name).mkdir(parents=True, exist_ok=True)
            make(archive, folder)
            mark.touch()
            print(f"unpacked {name} in {time.perf_counter() - began:.1f} s", flush=True)
    return sorted(path.parent.name for path in folder.glob(f"*/{_WHOLE}"))


def _cifar10(archive: Path, folder: Path) -> None:
    from PIL import Image  # noqa: PLC0415 - the machine has it, and nothing else needs it

    records: dict[str, dict[tuple[int, int], bytes]] = {"train": {}, "test": {}}
    for split, class_name, number, content in _jpegs(archive):
        label = CLASSES.index(class_name)
        records[split][number, label] = bytes([label]) + _planes(Image.open(io.BytesIO(content)))
        if number < IMAGES_PER_CLASS[split]:
            place = folder / "images" / split / class_name
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:04}.jpg").write_bytes(content)
    (folder / "images" / _WHOLE).touch()
    for split, names in _FILES.items():
        ordered = [records[split][place] for place in sorted(records[split])]
        size = -(-len(ordered) // len(names))
        for number, name in enumerate(names):
            part = ordered[number * size : (number + 1) * size]
            (folder / "cifar10" / name).write_bytes(b"".join(part))


def _jpegs(archive: Path) -> Iterator[tuple[str, str, int, bytes]]:
    with tarfile.open(archive) as tar:
        for member in tar:
            named = _NAME.fullmatch(member.name)
            content = tar.extractfile(member) if named and member.isfile() else None
            if named and content is not None:
                yield named[1], named[2], int(named[3]), content.read()


def _planes(image: Any) -> bytes:
    """Return an image as the binary version has it: all red values, then green, then blue."""
    return b"".join(plane.tobytes() for plane in image.convert("RGB").split())


def _mnist(images: Path, folder: Path) -> None:
    for kind, source in (
        ("images-idx3", images),
        ("labels-idx1", images.with_name("t10k-labels-idx1-ubyte.gz")),
    ):
        raw = gzip.decompress(source.read_bytes())
        axes = raw[3]
        count, *shape = struct.unpack_from(f">{axes}I", raw, 4)
        header, row = 4 + 4 * axes, (len(raw) - 4 - 4 * axes) // count
        cut = count * 9 // 10
        for split, start, stop in (("train", 0, cut), ("t10k", cut, count)):
            head = raw[:4] + struct.pack(f">{axes}I", stop - start, *shape)
            rows = raw[header + start * row : header + stop * row]
            (folder / "mnist" / f"{split}-{kind}-ubyte").write_bytes(head + rows)
