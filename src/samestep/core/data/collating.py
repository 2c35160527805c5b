"""Samples to a batch: by the recipe's own function, or by PyTorch's where they are alike."""

import contextlib
import io
import math
import pickle
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data._utils.pin_memory import pin_memory

from samestep.base.errors import UserError, blame, defined_at, kind_of_data
from samestep.base.trees import describe, num_rows, tree_leaves
from samestep.core.recipe import Collate


class Collating:
    """Put samples together, in a loader's process or in this one.

    Args:
        dataset: where they come from, for messages.
        collate: the recipe's own function, or None for PyTorch's.
        whole: whether a batch stays one thing; else it is a pair of inputs and targets.
        packed: whether a worker packs what the recipe's function made, to send it. PyTorch's own
            collate writes into shared memory itself.
    """

    def __init__(
        self, dataset: object, collate: Collate | None, *, whole: bool, packed: bool = False
    ) -> None:
        self._dataset, self._collate, self._whole = dataset, collate, whole
        self._packed = packed and collate is not None
        self._packs = False
        """Whether samples are known to be more or less than a row each: they cannot be counted."""

    def __call__(self, samples: list[Any]) -> Any:
        """Return inputs and targets of a batch; of a whole batch that, and None."""
        if self._collate is None:
            return self._by_default(samples)
        batch = self._by_recipe(self._collate, samples)
        pair = (batch, None) if self._whole else as_pair(self._dataset, batch, self._collate)
        if not any(callable(getattr(leaf, "to", None)) for leaf in tree_leaves(list(pair))):
            raise UserError(
                f"The collate{defined_at(self._collate)} returned {describe(batch)}: "
                "there is no tensor in it."
            )
        return Packed(pair) if self._packed and get_worker_info() is not None else pair

    def _by_recipe(self, collate: Collate, samples: list[Any]) -> Any:
        try:
            batch = collate(samples)
        except Exception as error:
            kinds = "; ".join(list(dict.fromkeys(map(describe, samples)))[:3])
            blame(f"The collate failed with {len(samples)} samples ({kinds})", error)
        rows = num_rows(batch)
        if rows not in (None, len(samples)) and self._counts(collate, samples, rows):
            verb = "leaves out" if rows < len(samples) else "adds"
            raise UserError(
                f"The collate{defined_at(collate)} {verb} {abs(rows - len(samples))} of "
                f"{len(samples)} samples: its batch has {rows} rows. Each sample belongs to one "
                "step, so each must be in the batch once. Leave samples out in the data set."
            )
        return batch

    def _counts(self, collate: Collate, samples: list[Any], rows: int) -> bool:
        """Whether each sample in a batch is one row of it: leaving it out takes one row away.

        Where samples are put one behind the other, it takes as many as the sample is long; where
        they are columns, it takes none, or only the longest one takes any.
        """
        if self._packs or len(samples) < 2:
            return False
        single = 0
        for left_out in range(len(samples)):
            try:
                fewer = num_rows(collate(samples[:left_out] + samples[left_out + 1 :]))
            except Exception:
                return False
            if fewer is None or rows - fewer not in (0, 1):
                self._packs = True
                return False
            single += rows - fewer
        return single >= min(rows, len(samples))

    def _by_default(self, samples: list[Any]) -> tuple[Any, Any]:
        for sample in samples if not self._whole else ():
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise _no_pair(self._dataset, sample)
        if not self._whole and get_worker_info() is None and _is_of_tensors(samples[0]):
            with contextlib.suppress(TypeError, RuntimeError):  # below it is said what is wrong
                inputs, targets = map(torch.stack, zip(*samples, strict=True))
                return inputs, targets
        try:
            batch = default_collate(samples)
        except Exception as error:
            kinds = list(dict.fromkeys(map(describe, samples)))
            raise UserError(
                f"{name_of(self._dataset)} returns samples that cannot be put into one batch: "
                f"{'; '.join(kinds[:3])}. Add a collate to the recipe, or return tensors, arrays "
                f"or numbers of one shape ({type(error).__name__}: "
                f"{str(error).partition(': found')[0]})."
            ) from error
        return (batch, None) if self._whole else as_pair(self._dataset, batch)


def _is_of_tensors(sample: Sequence[Any]) -> bool:
    """Whether `default_collate` would do no more than stack such samples; it is slow to decide."""
    as_ever = default_collate_fn_map[Tensor] is collate_tensor_fn  # users may put in their own
    return as_ever and type(sample[0]) is Tensor and type(sample[1]) is Tensor


def as_pair(
    dataset: object, batch: Any, collate: Callable[..., Any] | None = None
) -> tuple[Any, Any]:
    """Return inputs and targets of a batch, which have to be tensors."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise _no_pair(dataset, batch, collate)
    if collate is None and not all(isinstance(leaf, Tensor) for leaf in tree_leaves(list(batch))):
        raise UserError(
            f"{name_of(dataset)} returns {describe(list(batch))} as inputs and targets of a batch; "
            "both must be tensors, or trees of them. Convert names to numbers, and remove None."
        )
    return batch[0], batch[1]


def name_of(dataset: object) -> str:
    """Return a data set's class and place for a message."""
    return f"The data set {kind_of_data(dataset)}"


def _no_pair(dataset: object, sample: Any, collate: Callable[..., Any] | None = None) -> UserError:
    if isinstance(sample, dict):
        returned = f"a dict with the keys {', '.join(map(repr, sample))}"
    elif isinstance(sample, tuple | list):
        returned = f"{len(sample)} values ({describe(sample)})"
    else:
        returned = describe(sample)
    advice = "or add a forward(model, batch) to the recipe, and a loss that takes (outputs, batch)."
    if collate is not None:
        return UserError(
            f"The collate{defined_at(collate)} returned {returned}; without a forward a batch "
            f"must be a pair (inputs, targets). Return such a pair, {advice}"
        )
    return UserError(
        f"{name_of(dataset)} returns {returned}; a sample must be a pair (input, target), each a "
        f"tensor or a tree of tensors. Return such a pair from __getitem__, {advice}"
    )


_ALIGNED = 64
"""Bytes: each tensor begins at a multiple of this, as PyTorch's own do on the CPU."""


def unpacked(batch: Any) -> Any:
    """Return the collated batch, unpacked if it was packed."""
    return batch.batch() if isinstance(batch, Packed) else batch


class Packed:
    """A batch without its tensors, and one vector of bytes that holds them."""

    def __init__(self, batch: Any) -> None:
        file = io.BytesIO()
        pickler = _TensorPickler(file)
        pickler.dump(batch)
        self._rest, self._places = file.getvalue(), pickler.places
        size = max(1, pickler.size)
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # noqa: SLF001
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
        for place, tensor in zip(self._places, pickler.tensors, strict=True):
            _view(self._bytes, *place).copy_(tensor)

    def batch(self) -> Any:
        """Return the batch; its tensors are views of the one vector."""
        return _TensorUnpickler(io.BytesIO(self._rest), self._bytes, self._places).load()

    def pin_memory(self) -> Any:
        """Return the batch with its tensors in pinned memory, as PyTorch's loader asks for it."""
        return pin_memory(self.batch())  # type: ignore[no-untyped-call]


_Place = tuple[torch.dtype, tuple[int, ...], int]
"""Type, shape and first byte of a tensor."""


class _TensorPickler(ForkingPickler):
    """Leave out dense tensors on the CPU; all else is pickled as between processes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 5)
        self.tensors: list[Tensor] = []
        self.places: list[_Place] = []
        self.size = 0
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a tensor that is left out."""
        if type(value) is not Tensor or not _is_plain(value):
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
            self.places.append((value.dtype, tuple(value.shape), self.size))
            self.size += -(-value.nbytes // _ALIGNED) * _ALIGNED
        return number


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, whole: Tensor, places: list[_Place]) -> None:
        super().__init__(file)
        self._tensors = [_view(whole, *place) for place in places]

    def persistent_load(self, number: int) -> Tensor:
        """Return the tensor of this number."""
        return self._tensors[number]


def _is_plain(tensor: Tensor) -> bool:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return False
    return tensor.is_contiguous() and not (tensor.requires_grad or tensor.is_quantized)


def _view(whole: Tensor, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    length = math.prod(shape) * dtype.itemsize
    return whole[start : start + length].view(dtype).view(shape)
