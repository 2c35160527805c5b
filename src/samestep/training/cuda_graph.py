"""Replay a function of tensors as a CUDA graph: the host launches all of its kernels at once."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.data.trees import map_leaves, map_tensors, tree_leaves

Kept = Sequence[list[Tensor]]
"""Groups of tensors that a function changes in place, so that they keep their addresses."""
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""(function) → what it returned, and what runs its kernels again into the same memory."""


@dataclass(frozen=True, slots=True)
class _Recording:
    kept: Kept
    """Held, lest their memory goes to other tensors at the same addresses."""
    addresses: list[int]
    fed: list[Tensor]
    """Where the graph reads what each call is fed with."""
    results: Any
    replay: Callable[[], None]


class Replayed:
    """A function whose kernels are captured at its first call and replayed at later ones.

    The first call runs the function, which also compiles and warms up; capturing runs nothing. So
    each call changes the kept tensors exactly once.
    """

    def __init__(
        self, function: Callable[[Kept, Any], Any], capture: Capture | None = None
    ) -> None:
        """Take a function of (kept, fed): tensors that it changes in place, and a tree of others.

        It must not make the host wait for the device. `capture` replaces CUDA's capturing in tests.
        """
        self._function, self._capture = function, capture or capture_on_cuda
        self._recording: _Recording | None = None
        self.why_not = ""
        """Why nothing is captured, once that has failed."""

    def __call__(self, kept: Kept, fed: Any) -> Any:
        """Return the function's result, in memory that the next call does not overwrite."""
        if self.why_not:
            return self._function(kept, fed)
        if self._recording is None or self._recording.addresses != _addresses(kept):
            return self._record(kept, fed)
        recording, leaves = self._recording, tree_leaves(fed)
        if _forms(leaves) != _forms(recording.fed):
            return self._function(kept, fed)
        for place, leaf in zip(recording.fed, leaves, strict=True):
            place.copy_(leaf)
        recording.replay()
        return map_tensors(torch.clone, recording.results)

    def _record(self, kept: Kept, fed: Any) -> Any:
        self._recording = None  # its memory may be needed now
        fed = map_leaves(torch.clone, fed)
        results = self._function(kept, fed)
        devices = {leaf.device for leaf in (*tree_leaves(fed), *(t for g in kept for t in g))}
        if len(devices) > 1:
            # The host's work is not captured, but would be done once more now.
            self.why_not = f"tensors are on {' and '.join(sorted(map(str, devices)))}"
            return results
        try:
            recorded, replay = self._capture(partial(self._function, kept, fed))
        except Exception as error:
            self.why_not = _reason(error)
        else:
            self._recording = _Recording(kept, _addresses(kept), tree_leaves(fed), recorded, replay)
        return results


def replayed_on(device: torch.device, function: Callable[[Kept, Any], Any]) -> Replayed | None:
    """Return a function replayed as a CUDA graph, or None where the device has no graphs."""
    return Replayed(function) if device.type == "cuda" else None


def _addresses(kept: Kept) -> list[int]:
    return [tensor.data_ptr() for group in kept for tensor in group]


def _forms(leaves: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in leaves]


def _reason(error: BaseException) -> str:
    """Return the first line of the first error: ending a broken capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"


def capture_on_cuda(function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """Capture what a function launches in this thread; the device stays usable if that fails."""
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    captured = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
    try:
        # A capture that fails leaves its own stream as the current one: set back the one before.
        with torch.cuda.stream(torch.cuda.current_stream()), captured:
            results = function()
    except Exception:
        _clean_up(pool)
        raise
    return results, graph.replay


def _clean_up(pool: tuple[int, int]) -> None:
    """Undo what a failed capture leaves: memory is not freed, and the generator does not draw."""
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):
        # Raises where the capture was ended in order; then the graph gives its memory back itself.
        torch._C._cuda_endAllocateToPool(device, pool)  # noqa: SLF001 - there is no public way
        torch._C._cuda_releasePool(device, pool)  # noqa: SLF001
    with contextlib.suppress(RuntimeError):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())
