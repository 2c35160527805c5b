"""Watch how a rank reads numbers from tensors, reports them, and reduces them over the ranks.

Notes "item" {value} for a tensor of one element that becomes a Python number; "report"
{numbers: as they were printed, labelled: whether the text names this rank with its number}; and
"reduced" {op, values: of a small tensor before its all-reduce, metric: no count of a library's};
"averaged" {value: the first of such a sum, once it is divided by the number of ranks in place}.
"""

import builtins
import logging
import math
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from samestep.base.patches import patched
from samestep.scripts.checking.recorder import Recorder

_SMALL = 8  # elements of a tensor that holds metrics rather than weights
_MOST_PER_LINE = 5  # events of one line between two optimizer steps
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)", re.IGNORECASE)
_REDUCES = ("all_reduce", "reduce")
_LABEL = r"(?:rank|gpu|device|process|worker|node|cuda|proc)\W{0,4}"


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note numbers that are read, told and reduced while inside."""
    reports = _Reports(recorder)
    with patched(
        *((Tensor, name, reports.around_item) for name in ("item", "__float__", "__int__")),
        (builtins, "print", reports.around_print),
        (logging.Logger, "handle", reports.around_log),
        *((place, name, reports.around_reduce) for place in (dist, c10d) for name in _REDUCES),
        (Tensor, "div_", reports.around_div),
    ):
        yield


class _Reports:
    """The numbers that one rank reads, tells and reduces."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._process = os.getpid()  # a worker of a loader is forked with all of this
        rank = recorder.rank
        self._label = re.compile(rf"{_LABEL}{rank}(?!\d)|[\[(<]{rank}[\])>]", re.IGNORECASE)
        self._inside = False
        self._summed: weakref.ref[Tensor] | None = None  # what was reduced last
        self._noted: dict[tuple[str, str], int] = {}
        self._step = -1

    def _note(self, kind: str, **facts: Any) -> None:
        if self._recorder.quiet or os.getpid() != self._process:
            return
        steps = self._recorder.hooks.steps
        if steps != self._step:
            self._step, self._noted = steps, {}
        where = self._recorder.where()
        count = self._noted[kind, where] = self._noted.get((kind, where), 0) + 1
        if count <= _MOST_PER_LINE:
            self._recorder.note(kind, where=where, **facts)

    def around_item(self, original: Callable[..., Any], tensor: Tensor) -> Any:
        value = original(tensor)
        if not torch.compiler.is_compiling() and isinstance(value, int | float):
            caller = str(sys._getframe(2).f_globals.get("__name__"))  # noqa: SLF001 - of the method
            # Not an optimizer's count of steps or a loader's seed; text is made in `_tensor`.
            if not caller.startswith("torch.") or caller == "torch._tensor":
                self._note("item", value=float(value))
        return value

    def around_print(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            # A tensor's text is that of the number in it; other objects may be large.
            self._tell(" ".join(str(a) for a in args if not _is_large(a)))

    def around_log(
        self, original: Callable[..., Any], logger: Any, record: logging.LogRecord
    ) -> None:
        """Note the numbers that the script itself logs."""
        original(logger, record)
        if self._recorder.is_direct("logging"):
            self._tell(record.getMessage())

    def _tell(self, text: str) -> None:
        numbers = _NUMBER.findall(text[:2000])
        if numbers:
            labelled = self._label.search(text) is not None
            self._note("report", numbers=numbers[:_SMALL], labelled=labelled)

    def around_reduce(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor = kwargs.get("tensor", args[0] if args else None)
        if self._inside or not isinstance(tensor, Tensor) or torch.compiler.is_compiling():
            return original(*args, **kwargs)
        if not 0 < tensor.numel() <= _SMALL:
            return original(*args, **kwargs)
        place = 2 if original.__name__ == "reduce" else 1
        op = kwargs.get("op", args[place] if len(args) > place else dist.ReduceOp.SUM)
        with self._recorder.unwatched():
            values = [float(v) for v in tensor.detach().reshape(-1).tolist()]
        own = self._recorder.is_direct("torch") or tensor.is_floating_point()
        if all(map(math.isfinite, values)):  # NaN and infinity are not JSON
            self._note("reduced", op=getattr(op, "name", str(op)), values=values, metric=own)
        self._inside = True
        try:
            return original(*args, **kwargs)
        finally:
            self._inside = False
            self._summed = weakref.ref(tensor)

    def around_div(self, original: Callable[..., Any], tensor: Tensor, *by: Any, **how: Any) -> Any:
        """Note a sum over the ranks that becomes their mean, as in libraries."""
        divided = original(tensor, *by, **how)
        summed = None if torch.compiler.is_compiling() or self._summed is None else self._summed()
        number = by[0] if len(by) == 1 and isinstance(by[0], int | float) else 0
        if summed is tensor and number == self._recorder.world_size:
            with self._recorder.unwatched():
                value = float(tensor.flatten()[0])
            if math.isfinite(value):
                self._note("averaged", value=value)
        return divided


def _is_large(thing: Any) -> bool:
    return not isinstance(thing, str | int | float | Tensor) or (
        isinstance(thing, Tensor) and thing.numel() > _SMALL
    )
