"""Tell samples, data sets and random states apart by a few numbers, equal in all processes."""

import pickle
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

MOST_ROWS = 64
_MOST_VALUES = 4096  # of one row
_MOST_ITEMS = 256  # of a list or a mapping
_MOST_BYTES = 1 << 22  # of an array
_DEPTH = 4


def rows_of(batch: Any) -> tuple[int, list[int]]:
    """Return how many samples a batch holds and a number for each of the first, by its tensors."""
    tensors = [t for t in _tensors(batch, _DEPTH) if t.layout == torch.strided and t.dim()]
    if not tensors:
        return 0, []
    n = len(tensors[0])
    found = [0] * min(n, MOST_ROWS)
    for tensor in tensors:
        if len(tensor) == n and tensor.numel() and tensor.device.type != "meta":
            some = tensor.detach()[:MOST_ROWS].reshape(len(found), -1)
            some = some[:, :: -(-some.shape[1] // _MOST_VALUES)].contiguous().cpu()
            for place, row in enumerate(some.view(torch.uint8).numpy()):
                found[place] = zlib.crc32(row, found[place])
    return n, found


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and not isinstance(value, str | bytes | int | float):
        for part in list(_parts(value))[:_MOST_ITEMS]:
            yield from _tensors(part, depth - 1)


def _parts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()


def number_of(index: Any) -> int:
    """Return an index of a data set as a number."""
    if isinstance(index, Tensor) and index.numel() == 1:
        index = index.item()
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

    A range of numbers tells nothing: what is read by them lies elsewhere.
    """
    if isinstance(dataset, range):
        return None
    seen = [0, 0]  # the number; how much data it is of
    _add(dataset, _DEPTH, seen)
    return seen[0] if seen[1] > 1 else None


def _add(value: Any, depth: int, seen: list[int]) -> None:
    text = b""
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    if hasattr(value, "__array_interface__"):
        try:
            text = memoryview(value).cast("B")[:_MOST_BYTES].tobytes()
        except (TypeError, ValueError):  # of objects, or not in one piece
            text = repr(value).encode()
        seen[1] += len(text)
    elif isinstance(value, str | bytes | int | float):
        text = repr(value).encode()
        seen[1] += len(text) * isinstance(value, str | bytes)
    elif depth:
        parts = list(_parts(value)) if not isinstance(value, range) else [repr(value)]
        for part in (*parts[:_MOST_ITEMS], *parts[_MOST_ITEMS:][-2:]):
            _add(part, depth - 1, seen)
        text = f"{type(value).__qualname__} {len(parts)}".encode()
    seen[0] = zlib.crc32(text, seen[0])


def random_states(dataset: Any) -> dict[str, tuple[int, int]]:
    """Return each source of random numbers: its whole state, and what drawing few leaves as it is.

    A generator that the data set holds itself is named by its attribute.
    """
    twister = random.getstate()[1]
    found = {"random": (hash(twister), hash(twister[:-1]))}
    bits = torch.get_rng_state().numpy().tobytes()
    found["torch"] = (zlib.crc32(bits), zlib.crc32(bits[24 : 24 + 624 * 8]))
    np: Any = sys.modules.get("numpy")
    if np is None:
        return found
    _, keys, place, *_ = np.random.get_state()
    found["numpy"] = (zlib.crc32(keys, place), zlib.crc32(keys))
    own = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
    for name, value in getattr(dataset, "__dict__", {}).items():
        if isinstance(value, own):
            state = value.get_state().numpy() if isinstance(value, torch.Generator) else value
            found[f"self.{name}"] = (zlib.crc32(pickle.dumps(state)),) * 2
    return found
