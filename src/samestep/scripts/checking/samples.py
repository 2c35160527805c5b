"""Numbers that identify samples, data sets and random states, the same in every process."""

import contextlib
import pickle
import random
import sys
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from samestep.base.trees import own_part, tree_leaves
from samestep.scripts.checking.recorder import checksum, row_hashes

_MOST_BYTES = 1 << 22  # of an array
_MOST_VALUES = 1 << 16  # of a tensor, spread over it: a step changes all of them
_MOST_ITEMS = 256  # of a list or a mapping
_MOST_PARTS, _DEPTH = 10_000, 4  # of a data set
_MOST_ROWS, _MOST_ELEMENTS = 512, 1 << 18  # of a batch that is compared with its samples


def rows_of(batch: Any, most: int = 64) -> tuple[int, list[int]]:
    """Return the number of samples in a batch, and a hash of each of the first `most`.

    A number is made of the tensors that need no gradients; a batch without any has none.
    """
    with torch.no_grad(), contextlib.suppress(Exception):
        leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        tensors = [tensor for tensor in leaves if not tensor.requires_grad]
        n = len(tensors[0]) if tensors else 0
        columns = [row_hashes(tensor, most) for tensor in tensors if len(tensor) == n]
        return n, [zlib.crc32(repr(row).encode()) for row in zip(*columns, strict=False)]
    return 0, []


def lost_rows(samples: list[Any], batch: Any) -> int:
    """Return the number of samples without a row in their batch, which has rows of others.

    A row is a sample, or the beginning of one, with padding behind it. 0 if the rows do not show
    it, as of samples that are changed. None does not count as a sample.
    """
    tensors = [
        max((leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)), key=Tensor.numel)
        for sample in samples[:_MOST_ROWS]
        if sample is not None
    ]
    shapes = {tensor.shape for tensor in tensors}
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if len(samples) > _MOST_ROWS or max((shape.numel() for shape in shapes), default=0) < 2:
        return 0
    if len(shapes) > 1:
        return _lost_sequences(tensors, leaves)
    known = {row for tensor in tensors for row in row_hashes(tensor[None])}
    whole = (leaf for leaf in leaves if leaf.shape[1:] in shapes)
    rows = {row for leaf in whole for row in row_hashes(leaf, _MOST_ROWS)}
    return len(known - rows) if rows and rows <= known else 0


def _lost_sequences(tensors: list[Tensor], leaves: list[Tensor]) -> int:
    """Return the same of sequences (time, …) of unlike length, by what they begin with."""
    tails = {tensor.shape[1:] for tensor in tensors if tensor.ndim}
    if len(tails) != 1 or any(not tensor.ndim for tensor in tensors):
        return 0
    rows = next((leaf for leaf in leaves if {leaf.shape[2:]} == tails and leaf.ndim > 1), None)
    if rows is None or len(rows) >= len(tensors) or rows.numel() > _MOST_ELEMENTS:
        return 0
    known = [tensor.tolist() for tensor in tensors]
    with_row: set[int] = set()
    for row in rows.tolist():
        of = [n for n, own in enumerate(known) if own[: len(row)] == row[: len(own)]]
        # What lies behind a sample is one number, or it is another sample.
        of = [n for n in of if all(part == row[-1] for part in row[len(known[n]) :])]
        if not of:
            return 0
        with_row.update(of)
    return len(tensors) - len(with_row)


def places_of(samples: list[Any]) -> tuple[int, list[int]]:
    """Return of how many rows of a tensor samples are views, and of which; (0, []) if of none."""
    each = [[v for v in tree_leaves(sample) if isinstance(v, Tensor)] for sample in samples]
    rows = [max(own, key=Tensor.numel) for own in each]
    sizes = {(row.numel(), row.untyped_storage().nbytes() // row.element_size()) for row in rows}
    ((n, whole),) = sizes if len(sizes) == 1 else [(1, 1)]
    views = whole > n and not any(row.storage_offset() % n for row in rows)
    return (whole // n, [int(row.storage_offset()) // n for row in rows]) if views else (0, [])


def number_of(index: Any) -> int:
    """Return an index of a data set as a number."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return zlib.crc32(repr(index).encode())


def base_of(dataset: Any, indices: list[int]) -> tuple[Any, list[int]]:
    """Return the data set that subsets are made of, and what the indices are there."""
    while type(dataset) is Subset:
        own, dataset = dataset.indices, dataset.dataset
        indices = [int(own[index]) for index in indices]
    return dataset, indices


def fingerprint(dataset: Any) -> int | None:
    """Return a number that is equal where the data are; None if nothing tells what they are.

    What loads its parts as they are asked for is not looked into.
    """
    digest, known, parts = 0, 0, 0

    def add(value: Any, depth: int) -> None:
        nonlocal digest, known, parts
        parts += 1
        text = b""
        if (
            isinstance(value, Tensor)
            and value.layout == torch.strided
            and value.device.type != "meta"
        ):
            flat = value.detach().reshape(-1)[:_MOST_BYTES].cpu().contiguous()
            value = flat.view(torch.uint8).numpy()
        if hasattr(value, "__array_interface__"):
            try:
                text = memoryview(value).cast("B")[:_MOST_BYTES].tobytes()
            except (TypeError, ValueError):  # of objects, or not in one piece
                text = repr(value).encode()
            known += len(text)
        elif isinstance(value, str | bytes | int | float | range):
            text = repr(value).encode()
            known += isinstance(value, str | bytes)
        elif depth and parts < _MOST_PARTS:
            inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            some = value if isinstance(value, list | tuple) else list(inside.values())
            for part in (*some[:_MOST_ITEMS], *some[_MOST_ITEMS:][-2:]):
                add(part, depth - 1)
            text = f"{type(value).__qualname__} {len(some)}".encode()
        digest = zlib.crc32(text, digest)

    add(dataset, _DEPTH)
    return digest if known else None


def views_of(dataset: Any, length: int | None) -> list[int | None]:
    """Return a number for its tensors that are a part of others, and one for those; [] for none.

    Only for those with a row for each sample.
    """
    inside = getattr(dataset, "__dict__", {}).values()
    values = [v for own in inside for v in (own[:4] if isinstance(own, list | tuple) else [own])]
    rows = [v.detach() for v in values if type(v) is Tensor and v.ndim and len(v) == length]
    plain = [v for v in rows if v.layout == torch.strided and not v.is_meta]
    pairs = [(part, part.new_empty(0).set_(part.untyped_storage())) for part in plain]
    # Nearly the whole of it may be another window of each rank's.
    parts = [(part, whole) for part, whole in pairs if 3 * whole.numel() >= 4 * part.numel()]
    return [fingerprint(list(side)) for side in zip(*parts, strict=True)]


def random_states(dataset: Any) -> dict[str, tuple[int, int]]:
    """Return each source of random numbers: its whole state, and what drawing few leaves as it is.

    A generator that the data set holds itself is named by its attribute.
    """
    twister = random.getstate()[1]
    bits = torch.get_rng_state().numpy().tobytes()
    states = {
        "random": (hash(twister), hash(twister[:-1])),
        "torch": (zlib.crc32(bits), zlib.crc32(bits[24 : 24 + 624 * 8])),
    }
    np: Any = sys.modules.get("numpy")
    if np is None:
        return states
    _, keys, place, *_ = np.random.get_state()
    states["numpy"] = (zlib.crc32(keys, place), zlib.crc32(keys))
    own = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, own):
            state = value.get_state().numpy() if isinstance(value, torch.Generator) else value
            states[f"self.{name}"] = (zlib.crc32(pickle.dumps(state)),) * 2
    return states


def digests(values: Iterable[Any]) -> list[int | None]:
    """Return a number for each value that tells its bits from others."""
    return [
        checksum(some_of(value)) if isinstance(value, Tensor) else zlib.crc32(repr(value).encode())
        for value in values
    ]


def some_of(tensor: Tensor) -> Tensor:
    """Return values that are spread over a tensor; of a sharded one, over its own part."""
    own = own_part(tensor)
    if own.layout != torch.strided or own.numel() <= _MOST_VALUES:
        return own
    return own.detach().reshape(-1)[:: 1 + own.numel() // _MOST_VALUES]
