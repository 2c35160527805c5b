"""Watch how a rank lives: which variables it reads, the collectives it calls, how it ends."""

import inspect
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import get_worker_info

from samestep.launch.ranks.launch import OPEN_MPI, PMI, TORCHRUN
from samestep.launch.stall.collectives import watch_collectives
from samestep.scripts import probes
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.recorder import GATHERED_VALUES, Recorder, frames
from samestep.scripts.probes import Around, Probe, ProbedCall, listening

_VARIABLES = frozenset(
    {*TORCHRUN, *OPEN_MPI, *PMI, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID"}
)
_GLOO_DROPS_S = 0.02
_LONGEST = 100
_COPIES = frozenset({"copy", "__or__", "__ror__", "__iter__"})
_ENVIRONMENT = Probe((type(os.environ), "__getitem__"))
_CUDA = Probe((torch.cuda, "is_available"))
_DESTROY = Probe((dist, "destroy_process_group"), (c10d, "destroy_process_group"))
# In these, as in prints and logs, a caught exception may be shown, or the exit code lost.
_ENDINGS = Probe(
    *((traceback, name) for name in ("print_exc", "format_exc", "print_exception")),
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
    with (
        watch_collectives(recorder.pulse, life.on_collective),
        listening(
            (_ENVIRONMENT, life.on_variable),
            (_CUDA, life.on_cuda),
            (probes.INIT_GROUP, life.on_init),
            (_DESTROY, life.on_destroy),
            *((probe, life.on_report) for probe in (probes.PRINT, probes.LOG, _ENDINGS)),
            *((probe, life.on_training) for probe in (probes.NEXT_BATCH, probes.BACKWARD)),
        ),
    ):
        yield


class _Life:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._noted_error: tuple[int, str] | None = None

    def on_variable(self, call: ProbedCall) -> None:
        """Record the reader of a launcher's variable; a copy of all variables reads none."""
        name = call.args[1]
        if name not in _VARIABLES:
            return
        reader = sys._getframe(3).f_code.co_name  # noqa: SLF001 - below the probe
        if reader not in _COPIES:
            own = self._recorder.is_direct("os", "collections")
            self._recorder.once(ev.VariableRead(name, value=os.environ.copy().get(name), own=own))

    def on_cuda(self, _call: ProbedCall) -> None:
        if self._recorder.is_direct():
            self._recorder.once(ev.CudaAsked())

    def on_init(self, call: ProbedCall) -> None:
        """Record the rank and world size that this process assumes, even if no rank answers."""
        signature = inspect.signature(call.function)
        arguments = signature.bind_partial(*call.args, **call.kwargs).arguments
        by_environment = (arguments.get("init_method") or "env://").startswith("env://")
        variables = os.environ.copy()  # which is not a reader

        def number(argument: str, variable: str) -> int | None:
            value: int = arguments.get(argument, -1)
            if value < 0 and by_environment and variables.get(variable, "").isdecimal():
                value = int(variables[variable])
            return value if value >= 0 else None

        rank, world_size = number("rank", "RANK"), number("world_size", "WORLD_SIZE")
        own = self._recorder.is_direct()
        self._recorder.note(ev.GroupMade(rank, world_size=world_size, own=own))

    def on_destroy(self, call: ProbedCall) -> None:
        if call.argument(0, "group") in (None, dist.group.WORLD):
            self._recorder.note(ev.GroupDestroyed())
        # Gloo's thread drops a backward pass's last all-reduce under the GIL. If that is still due
        # when the group goes, both wait for each other: PyTorch's race, and none of the script.
        time.sleep(_GLOO_DROPS_S)

    def on_collective(self, kind: str, tensors: list[Tensor], _where: str, group: str) -> None:
        visit = self._recorder.pulse.now
        assert visit is not None
        details = dict(part.split("=") for part in visit.detail.split() if "=" in part)
        op = details.pop("op", None)
        may_differ = kind.startswith("all_to_all")
        gaps = (list(tensor.stride()) for tensor in tensors if _has_gaps(tensor))
        if "gather" in kind and not self._recorder.quiet:
            few = [tensor.detach() for tensor in tensors if tensor.numel() <= GATHERED_VALUES]
            self._recorder.gathered.extend(t.float() for t in few if t.is_floating_point())
            if self._recorder.evaluated is not None:
                self._recorder.evaluated.given.extend(t for t in few if t.ndim)
        self._recorder.note(
            ev.CollectiveCalled(
                kind,
                op=op,
                root=next(iter(details.values()), None),
                shapes=[] if may_differ else [list(tensor.shape) for tensor in tensors],
                dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else None,
                group=group,
                strides=next(gaps, None),
                trims=self._trims() if "gather" in kind else None,
            )
        )

    def _trims(self) -> bool | None:
        stack = ((str(f.f_globals.get("__name__")), f.f_code.co_name) for f in frames())
        called = {name for module, name in stack if module.startswith("accelerate.")}
        own = "gather" in called and self._recorder.is_direct("torch", "accelerate")
        return True if "gather_for_metrics" in called else False if own else None

    def on_training(self, _call: ProbedCall) -> Around:
        try:
            yield
        except Exception as error:
            self._note_caught(error, self._recorder.where(), training=True)
            raise

    def on_report(self, _call: ProbedCall) -> None:
        """Note an exception that the script has in hand as it prints, logs or exits."""
        error = sys.exc_info()[1]
        # Python's own code reports it, too, as it ends a process by it.
        own = error is not None and self._recorder.is_direct("traceback", "logging")
        if error is not None and own and get_worker_info() is None:
            frames = traceback.walk_tb(error.__traceback__)
            training = any(frame.f_code.co_filename.startswith(_TRAINING) for frame, _ in frames)
            self._note_caught(error, self._recorder.raised_at(error), training=training)

    def _note_caught(self, error: BaseException, raised: str, *, training: bool) -> None:
        key = id(error), str(error)
        if key == self._noted_error or not isinstance(error, Exception):
            return
        if isinstance(error, StopIteration):
            return
        # Not the exception itself: its frames would keep the model beyond the process group.
        self._noted_error = key
        text = (str(error).splitlines() or [""])[0]
        if text.startswith("["):  # where in Gloo's source
            text = text.partition("] ")[2] or text
        name = type(error).__name__
        self._recorder.note(
            ev.ErrorCaught(name, text=text[:_LONGEST], raised=raised, training=training)
        )


def _has_gaps(tensor: Tensor) -> bool:
    """Whether there is memory between a tensor's elements that is not of it."""
    if tensor.layout != torch.strided or not tensor.numel():
        return False
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 != tensor.numel()
