"""The functions of PyTorch that a script is watched through, each patched once for all listeners.

A listener is called with a `ProbedCall` before the function runs, the newest listener first. If it
is a generator, it continues afterwards: its `yield` returns what the function returned, or raises
what it raised. Listeners only watch; what has to change a call is a patch (`base/patches.py`).
"""

import builtins
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, dataloader
from torch.utils.hooks import RemovableHandle

from samestep.base.patches import Patch, patched

Around = Generator[None, Any, None]  # what a listener returns that continues after the call
Listener = Callable[["ProbedCall"], Around | None]


class ProbedCall(msgspec.Struct):
    """One call of a function that is listened to."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """A listener may replace what can be read only once, such as `model.parameters()`."""
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(self.function.__name__)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its place or by its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


class Probe:
    """A function, or several of a kind: patched while anyone listens."""

    def __init__(self, *places: tuple[Any, str], nested: bool = True) -> None:
        self._places = places
        self._nested = nested  # whether calls within a call count
        self._is_inside = False  # whether such a call is under way
        self._listeners: list[Listener] = []
        self._patches = ExitStack()

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Call a listener at each call while inside."""
        if not self._listeners:
            patches = [(place, name, self._around) for place, name in self._places]
            self._patches.enter_context(patched(*patches))
        self._listeners.insert(0, listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)
            if not self._listeners:
                self._patches.close()

    def patch(self, listener: Listener) -> Patch:
        """Return the patch of a probe that has one place and one listener."""
        self._listeners = [listener]
        ((place, name),) = self._places
        return place, name, self._around

    def _around(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # No listener may become part of a compiled graph.
        if torch.compiler.is_compiling() or self._is_inside:
            return function(*args, **kwargs)
        begun: list[Around] = []
        call = ProbedCall(function, args, kwargs)
        for listener in self._listeners:
            around = listener(call)
            if around is not None and next(around, around) is None:  # else it has ended already
                begun.append(around)
        if not begun and self._nested:  # as at most calls of modules
            return function(*call.args, **call.kwargs)
        self._is_inside = not self._nested
        try:
            value = function(*call.args, **call.kwargs)
        except BaseException as error:
            trace = error.__traceback__
            for around in reversed(begun):
                _raise_in(around, error)
            error.__traceback__ = trace  # without the listeners' frames
            raise
        finally:
            self._is_inside = False
        for around in reversed(begun):
            try:
                around.send(value)
            except StopIteration:
                continue
        return value


def _raise_in(around: Around, error: BaseException) -> None:
    """Raise an error where a listener waits, which may note but not stop it."""
    try:
        around.throw(error)
    except StopIteration:
        return
    except BaseException as raised:
        # A generator cannot let StopIteration pass: it becomes the cause of another error.
        if raised is not error and raised.__cause__ is not error:
            raise


StepListener = Callable[[Optimizer, Any, Any], Any]


class StepProbe:
    """All steps of optimizers, by PyTorch's own hooks: the oldest listener comes first."""

    def __init__(self, register: Callable[[StepListener], RemovableHandle]) -> None:
        self._register = register

    @contextmanager
    def heard_by(self, listener: StepListener) -> Iterator[None]:
        """Call a listener at each step while inside."""
        handle = self._register(listener)
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def listening(*pairs: tuple[Probe, Listener] | tuple[StepProbe, StepListener]) -> Iterator[None]:
    """Call each listener at the calls of its probe while inside."""
    with ExitStack() as stack:
        for probe, listener in pairs:
            stack.enter_context(probe.heard_by(listener))  # type: ignore[arg-type] # of one pair
        yield


BEFORE_STEP = StepProbe(register_optimizer_step_pre_hook)
AFTER_STEP = StepProbe(register_optimizer_step_post_hook)

_Iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - there is no public place

MODULE_CALL = Probe((nn.Module, "__call__"))
TRAIN_OR_EVAL = Probe((nn.Module, "train"), nested=False)  # each part of a model is called, too
LOAD_STATE = Probe((nn.Module, "load_state_dict"))
DDP_MADE = Probe((DistributedDataParallel, "__init__"))
# A checkpointed block recomputes its part in a backward pass within the backward pass.
BACKWARD = Probe((torch.autograd, "backward"), nested=False)
OPTIMIZER_MADE = Probe((Optimizer, "__init__"))
ZERO_GRAD = Probe((Optimizer, "zero_grad"))
SCALER_MADE = Probe((torch.amp.GradScaler, "__init__"))
UNSCALE = Probe((torch.amp.GradScaler, "unscale_"))
CLIP = Probe(
    *(
        (place, name)
        for place in (nn.utils, nn.utils.clip_grad)
        for name in ("clip_grad_norm_", "clip_grad_value_")
    )
)
LOADER_MADE = Probe((DataLoader, "__init__"))
LOADER_ITER = Probe((DataLoader, "__iter__"))
ITERATOR_MADE = Probe((_Iterator, "__init__"))
ITERATOR_RESET = Probe((_Iterator, "_reset"))
NEXT_INDEX = Probe((_Iterator, "_next_index"))
NEXT_BATCH = Probe((_Iterator, "__next__"))
SAVE = Probe((torch, "save"))
LOAD = Probe((torch, "load"))
INIT_GROUP = Probe((dist, "init_process_group"), (c10d, "init_process_group"))
PRINT = Probe((builtins, "print"))
LOG = Probe((logging.Logger, "handle"))
