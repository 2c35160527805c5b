"""Watch how a rank reads numbers from tensors, reports them, and reduces them over the ranks."""

import logging
import math
import os
import re
import sys
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from samestep.base.patches import Patch, patched_when_imported
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import Recorder, is_tracing
from samestep.scripts.probes import Around, Listener, Probe, ProbedCall, listening

_SMALL = 8  # elements of a tensor that holds metrics rather than weights
_MOST_PER_LINE = 5  # events of one line between two optimizer steps
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]*\w)", re.IGNORECASE)
_LABEL = r"(?:rank|gpu|device|process|worker|node|cuda|proc)\W{0,4}"
_READ = Probe(*((Tensor, name) for name in ("item", "__float__", "__int__")))
_DIVIDE = Probe((Tensor, "div_"))
_JOIN = ("all_reduce", "reduce", "all_gather", "all_gather_object")
_REDUCE = Probe(*((place, name) for place in (dist, c10d) for name in _JOIN), nested=False)
_BENT = [(place, name) for place in (Tensor, torch, math) for name in ("sqrt", "exp")]
_BEND = Probe(*_BENT, (Tensor, "__pow__"), (Tensor, "pow"))
_QUOTIENT = Probe(*((Tensor, name) for name in ("__truediv__", "div", "mean")))
_SCORES = (
    *("average_precision", "balanced_accuracy", "f1", "fbeta", "jaccard", "precision", "r2"),
    *("recall", "roc_auc", "cohen_kappa"),
)
_SCORED = (*(f"{name}_score" for name in _SCORES), "matthews_corrcoef", "root_mean_squared_error")


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note numbers that are read, shown and reduced while inside."""
    numbers = _NumbersWatcher(recorder)
    pairs: list[tuple[Probe, Listener]] = [
        (_BEND, numbers.on_bend),
        (_QUOTIENT, numbers.on_quotient),
        (_READ, numbers.on_read),
        (probes.PRINT, numbers.on_print),
        (probes.LOG, numbers.on_log),
        (_REDUCE, numbers.on_reduce),
        (_DIVIDE, numbers.on_divide),
    ]
    scores = {"sklearn.metrics": numbers.scores_of}
    with listening(*pairs), patched_when_imported(scores):
        for place, name in _BENT[2:]:  # torch.jit finds them by what they are, pickle by their name
            function = getattr(place, name)
            function.__qualname__ = name
            torch.jit._builtins._register_builtin(function, f"aten::{name}")  # noqa: SLF001
        yield


class _NumbersWatcher:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._process = os.getpid()  # a worker of a loader is forked with all of this
        rank = recorder.rank
        self._label = re.compile(rf"{_LABEL}{rank}(?!\d)|[\[(<]{rank}[\])>]", re.IGNORECASE)
        self._summed: weakref.ref[Tensor] | None = None  # what was reduced last
        self._bent = deque[tuple[float, str, float]](maxlen=64)
        """Numbers whose mean may not be that of the whole, what they are, and by what divided."""
        self._noted: Counter[tuple[type[ev.Event], str]] = Counter()
        self._step = -1

    def _note(self, event: ev.Event) -> None:
        if self._recorder.quiet or os.getpid() != self._process:
            return
        steps = self._recorder.hooks.steps
        if steps != self._step:
            self._step = steps
            self._noted.clear()
        key = (type(event), self._recorder.where())
        self._noted[key] += 1
        if self._noted[key] <= _MOST_PER_LINE:
            self._recorder.note(event, where=key[1])

    def on_read(self, _call: ProbedCall) -> Around:
        """Note a tensor of one element that becomes a Python number."""
        caller = str(sys._getframe(3).f_globals.get("__name__"))  # noqa: SLF001 - of the method
        value = yield
        # Not an optimizer's count of steps or a loader's seed; text is made in `_tensor`.
        is_own = not caller.startswith("torch.") or caller == "torch._tensor"
        if is_own and isinstance(value, int | float):
            self._note(ev.NumberRead(float(value)))

    def on_bend(self, call: ProbedCall) -> Around:
        """Remember the root or exponential of one number."""
        value = yield
        power = call.argument(1, "exponent") if "pow" in call.name else 0.5
        bends = isinstance(power, float) and power == 0.5  # it may be a tensor
        is_number = isinstance(value, float) or (type(value) is Tensor and _is_readable(value, 1))
        if bends and is_number:
            with self._recorder.unwatched():
                number = float(value)
            self._bend(number, "exp" if call.name == "exp" else "root")

    def _bend(self, number: float, kind: str, by: float = 0.0) -> None:
        if number not in {0.0, 1.0}:  # as of a temperature that begins at exp(0)
            self._bent.append((number, kind, by))

    def on_quotient(self, call: ProbedCall) -> Around | None:
        """Remember quotients of tensors with few elements, and means."""
        by = call.args[1] if len(call.args) > 1 else call.args[0]
        if call.name == "mean":
            return self._around_mean(by) if type(by) is Tensor and not by.requires_grad else None
        is_few = type(by) is Tensor and not by.requires_grad and _is_readable(by)
        return self._around_quotient(by) if is_few else None

    def _around_mean(self, values: Tensor) -> Around:
        value = yield
        if type(value) is Tensor and _is_readable(value, 1):
            with self._recorder.unwatched():
                self._bend(float(value), "mean", values.numel())

    def _around_quotient(self, by: Tensor) -> Around:
        value = yield
        if type(value) is Tensor and not value.requires_grad and _is_readable(value):
            with self._recorder.unwatched():
                counts = by.expand_as(value).flatten().tolist()
                numbers = value.flatten().tolist()
            for number, count in zip(numbers, counts, strict=True):
                self._bend(number, "quotient", count)
            if len(numbers) > 1:  # as of classes
                whole = zlib.crc32(repr(counts).encode())
                self._bend(sum(numbers) / len(numbers), f"mean of {len(numbers)} quotients", whole)

    def scores_of(self, module: ModuleType) -> list[Patch]:
        """Return patches of functions whose value for all samples is not the mean of the parts'."""

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            if isinstance(value, float) and kwargs.get("average") != "micro":
                self._bend(float(value), original.__name__)
            return value

        return [(module, name, around) for name in _SCORED if hasattr(module, name)]

    def on_print(self, call: ProbedCall) -> Around:
        yield
        # A tensor's text is that of the number in it; other objects may be large.
        plain = (a for a in call.args if isinstance(a, str | int | float | Tensor))
        self._note_text(" ".join(str(a) for a in plain if getattr(a, "numel", int)() <= _SMALL))

    def on_log(self, call: ProbedCall) -> Around:
        """Note the numbers that the script itself logs."""
        record: logging.LogRecord = call.argument(1, "record")
        yield
        if self._recorder.is_direct("logging"):
            self._note_text(record.getMessage())

    def _note_text(self, text: str) -> None:
        numbers = _NUMBER.findall(text[:2000])
        if numbers:
            labelled = self._label.search(text) is not None
            self._note(ev.NumbersShown(numbers[:_SMALL], labelled=labelled))

    def on_reduce(self, call: ProbedCall) -> Around:
        gathers = call.name.startswith("all_gather")
        given = call.argument(gathers, "obj" if "object" in call.name else "tensor")
        is_number = type(given) in {int, float}
        tensor = torch.tensor(given, dtype=torch.float64) if is_number else given
        if not isinstance(tensor, Tensor) or not _is_readable(tensor):
            return
        op = call.argument(2 if call.name == "reduce" else 1, "op", dist.ReduceOp.SUM)
        with self._recorder.unwatched():
            values = [float(v) for v in tensor.detach().reshape(-1).tolist()]
        own = gathers or self._recorder.is_direct("torch", "accelerate")
        own |= tensor.is_floating_point()
        if all(map(math.isfinite, values)):  # NaN and infinity are not JSON
            bent = [self._bent_of(value) for value in values]
            name = "GATHER" if gathers else getattr(op, "name", str(op))
            self._note(ev.NumbersReduced(name, values=values, metric=own, bent=bent))
        try:
            yield
        finally:
            if not gathers:
                self._summed = weakref.ref(tensor)

    def _bent_of(self, value: float) -> dict[str, float]:
        known = {
            kind: by for number, kind, by in self._bent if math.isclose(number, value, rel_tol=1e-6)
        }
        if any(kind.endswith("quotients") for kind in known):
            known.pop("mean", None)  # which is over the classes
        return known

    def on_divide(self, call: ProbedCall) -> Around:
        """Note a sum over the ranks that becomes their mean, as in libraries."""
        yield
        tensor: Tensor = call.args[0]
        by = call.args[1:]
        number = by[0] if len(by) == 1 and isinstance(by[0], int | float) else 0
        is_sum = self._summed is not None and self._summed() is tensor
        if is_sum and number == self._recorder.world_size:
            with self._recorder.unwatched():
                value = float(tensor.flatten()[0])
            if math.isfinite(value):
                self._note(ev.NumberAveraged(value))


def _is_readable(tensor: Tensor, most: int = _SMALL) -> bool:
    """Whether it is a few real numbers to be read: not while a graph is traced or captured."""
    traced = is_tracing() or torch._C._len_torch_dispatch_stack()  # noqa: SLF001
    captured = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    if traced or captured or tensor.is_meta or tensor.is_complex():
        return False
    return 0 < tensor.numel() <= most
