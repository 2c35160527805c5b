"""Watch how a rank lives: which variables it reads, the collectives it calls, how it ends.

Notes `environment` {name, value, own}: a launcher's variable was read, by the user's own code or by
a library; `init` {rank, world_size, own}; `destroy`; `collective` {kind, op, root, shapes, dtype,
group}, before it is called; `cuda`: the user's code asked whether there is a GPU;
`caught` {error, text, raised, training}: an exception that the script may be about to swallow.
"""

import builtins
import inspect
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import dataloader, get_worker_info

from samestep.base.patches import Patch, patched
from samestep.launch.ranks.launch import OPEN_MPI, PMI, TORCHRUN
from samestep.launch.stall.collectives import watch_collectives
from samestep.scripts.checking.recorder import Recorder

_VARIABLES = frozenset(
    {*TORCHRUN, *OPEN_MPI, *PMI, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID"}
)
_GLOO_DROPS_S = 0.02
_LONGEST = 100
_COPIES = frozenset({"copy", "__or__", "__ror__", "__iter__"})
# Calls in which an exception that is caught in the script may be shown, or the exit code lost.
_TELLING = (
    (builtins, "print"),
    (traceback, "print_exc"),
    (traceback, "format_exc"),
    (traceback, "print_exception"),
    (logging.Logger, "handle"),
    (sys, "exit"),
    (os, "_exit"),
)
_TRAINING = tuple(  # PyTorch's part of a training step
    os.path.join(os.path.dirname(torch.__file__), *part)  # noqa: PTH118, PTH120 - many frames
    for part in (("nn", ""), ("_tensor.py",), ("autograd", ""), ("optim", ""), ("utils", "data"))
)


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Note while inside."""
    life = _Life(recorder)
    iterator = dataloader._BaseDataLoaderIter  # noqa: SLF001 - there is no public place
    patches: tuple[Patch, ...] = (
        (type(os.environ), "__getitem__", life.around_variable),
        (torch.cuda, "is_available", life.around_cuda),
        *((place, "init_process_group", life.around_init) for place in (dist, c10d)),
        *((place, "destroy_process_group", life.around_destroy) for place in (dist, c10d)),
        *((place, name, life.around_telling) for place, name in _TELLING),
        (iterator, "__next__", life.around_training),
        (torch.autograd, "backward", life.around_training),
    )
    with watch_collectives(recorder.pulse, life.on_collective), patched(*patches):
        yield


class _Life:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._told: tuple[int, str] | None = None

    def around_variable(self, original: Callable[..., Any], environment: Any, name: str) -> Any:
        """Note who reads a launcher's variable; a copy of all variables reads none."""
        if name in _VARIABLES:
            reader = sys._getframe(2).f_code.co_name  # noqa: SLF001 - below `patched`
            if reader not in _COPIES:
                own = self._recorder.is_direct("os", "collections")
                value = os.environ.copy().get(name)
                self._recorder.once("environment", name=name, value=value, own=own)
        return original(environment, name)

    def around_cuda(self, original: Callable[..., Any]) -> Any:
        if not torch.compiler.is_compiling() and self._recorder.is_direct():
            self._recorder.once("cuda")
        return original()

    def around_init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note which rank of how many this process takes itself for, even if no rank answers."""
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
        by_environment = (given.get("init_method") or "env://").startswith("env://")
        numbers: dict[str, Any] = {}
        variables = os.environ.copy()  # which is not a reader
        for fact, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
            number = given.get(fact, -1)
            if number < 0 and by_environment and variables.get(variable, "").isdecimal():
                number = int(variables[variable])
            numbers[fact] = number if number >= 0 else None
        self._recorder.note("init", own=self._recorder.is_direct(), **numbers)
        return original(*args, **kwargs)

    def around_destroy(self, original: Callable[..., Any], group: Any = None) -> Any:
        if group is None or group is dist.group.WORLD:
            self._recorder.note("destroy")
        # Gloo's thread drops a backward pass's last all-reduce under the GIL. If that is still due
        # when the group goes, both wait for each other: PyTorch's race, and none of the script.
        time.sleep(_GLOO_DROPS_S)
        return original(group)

    def on_collective(self, kind: str, tensors: list[Tensor], _where: str, group: str) -> None:
        visit = self._recorder.pulse.now
        assert visit is not None
        given = dict(part.split("=") for part in visit.detail.split() if "=" in part)
        op = given.pop("op", None)
        may_differ = kind.startswith("all_to_all")
        self._recorder.note(
            "collective",
            kind=kind,
            op=op,
            root=next(iter(given.values()), None),
            shapes=[] if may_differ else [list(tensor.shape) for tensor in tensors],
            dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
            group=group,
            strides=next((list(tensor.stride()) for tensor in tensors if _has_gaps(tensor)), None),
        )

    def around_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            self._caught(error, self._recorder.where(), training=True)
            raise

    def around_telling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note an exception that the script has in hand as it prints, logs or exits."""
        error = sys.exc_info()[1]
        # Python's own code tells it, too, as it ends a process by it.
        own = error is not None and self._recorder.is_direct("traceback", "logging")
        if error is not None and own and get_worker_info() is None:
            frames = traceback.walk_tb(error.__traceback__)
            training = any(frame.f_code.co_filename.startswith(_TRAINING) for frame, _ in frames)
            self._caught(error, self._recorder.raised_at(error), training=training)
        return original(*args, **kwargs)

    def _caught(self, error: BaseException, raised: str, *, training: bool) -> None:
        if (
            (id(error), str(error)) == self._told
            or not isinstance(error, Exception)
            or isinstance(error, StopIteration)
        ):
            return
        # Not the exception itself: its frames would keep the model beyond the process group.
        self._told = id(error), str(error)
        text = (str(error).splitlines() or [""])[0]
        if text.startswith("["):  # where in Gloo's source
            text = text.partition("] ")[2] or text
        self._recorder.note(
            "caught",
            error=type(error).__name__,
            text=text[:_LONGEST],
            raised=raised,
            training=training,
        )


def _has_gaps(tensor: Tensor) -> bool:
    """Whether there is memory between a tensor's elements that is not of it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 != tensor.numel()
