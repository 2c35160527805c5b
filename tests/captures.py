"""A stand-in for CUDA graphs, for machines without a GPU."""

from collections.abc import Callable
from functools import partial
from typing import Any

from samestep.base.trees import tree_leaves


class Captures:
    """Captures a function as CUDA does: nothing changes then, and replays use the same memory."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, function: partial[Any]) -> tuple[Any, Callable[[], None]]:
        """Return what the function returns, filled with nonsense, and what replays it."""
        self.captured += 1
        kept = [tensor for group in function.args[0] for tensor in group]
        before = [tensor.clone() for tensor in kept]
        results = function()
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)
        for result in tree_leaves(results):
            result.fill_(-12345)

        def replay() -> None:
            self.replayed += 1
            for place, value in zip(tree_leaves(results), tree_leaves(function()), strict=True):
                place.copy_(value)

        return results, replay
