"""Note each collective that a script calls, and each backward pass, in its rank's pulse.

The script is not changed. While it runs, functions of `torch.distributed` also write down what was
called from which line. A function that a script has imported by name before is not seen.
"""

import functools
import inspect
import itertools
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from samestep.base.patches import Patch, patched, patched_when_imported
from samestep.launch.stall.pulse import PEER, UNKNOWN, WORLD, Pulse, Visit, users_place

OnCollective: TypeAlias = Callable[[str, list[Tensor], str, str], object]
"""Called with kind, tensors, the user's FILE:LINE and group; `pulse.now` has the whole visit."""

# Not isend and irecv: a P2POp that was made with a function imported before would be refused.
_COLLECTIVES = (
    *("all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "reduce"),
    *("all_gather", "all_gather_single", "all_gather_into_tensor", "_all_gather_base"),
    *("all_gather_object", "all_gather_coalesced", "gather", "gather_object"),
    *("gather_single", "gather_into_tensor"),
    *("scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single"),
    *("barrier", "monitored_barrier"),
)
_BETWEEN_TWO = (*("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv"),)
_RECONFIGURE = "_reconfigure"  # PyTorch 2.14: connects a group anew, with other ranks
_LIFE = ("init_process_group", "new_group", "destroy_process_group", _RECONFIGURE)
# What these return waits for the other ranks where it is first used.
_FUNCTIONAL = "torch.distributed._functional_collectives"
_FUNCTIONAL_COLLECTIVES = (
    *("all_reduce", "broadcast", "permute_tensor", "all_gather_single", "all_gather_tensor"),
    *("all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"),
    "all_to_all_single",
)
_FORMS = ("", "_autograd", "_coalesced")

# The argument that must be alike on all ranks: a gather's list is only on its root.
_ALIKE = ("tensor", "input_tensor", "output", "tensors", "input_tensor_list", "self", "inputs")
_MAY_DIFFER = ("all_to_all", "all_to_all_single", "all_to_all_single_autograd")
_LONGEST = 60  # a pulse has little room
_ROOTS = ("op", "reduceOp", "src", "dst", "group_src", "group_dst")


@contextmanager
def watch_collectives(pulse: Pulse, on_collective: OnCollective | None = None) -> Iterator[None]:
    """Note the script's collectives and backward passes in a pulse while inside."""
    # Not by the shared probes of `scripts`, which `launch` may not know: to a probe, only calls
    # within its own function are nested, and here those within any of these functions.
    notes = _Notes(pulse, on_collective)
    ddp = DistributedDataParallel
    inner = [(torch.autograd, "backward", "backward"), (ddp, "__init__", ddp.__name__)]
    inner += [(ddp, "_sync_buffers", "forward")]  # a forward sends rank 0's buffers
    patches: list[Patch] = [
        (module, name, notes.around(name, vars(module)[name]))
        for name in (*_COLLECTIVES, *_BETWEEN_TWO, *_LIFE)
        for module in (c10d, dist)
        if name in vars(module)  # not every version of PyTorch has all of them
    ]
    patches += [
        (place, name, functools.partial(notes.around_inner, kind))
        for place, name, kind in inner
        if name in vars(place)
    ]
    patches += [(dist.Work, "wait", notes.around_wait)]
    with patched(*patches), patched_when_imported({_FUNCTIONAL: notes.functional}):
        yield


class _Arguments:
    """Finds the arguments of one function of torch.distributed in its calls."""

    def __init__(self, kind: str, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        self._places = {name: place for place, name in enumerate(parameters)}
        self._defaults = {name: p.default for name, p in parameters.items() if p.default != p.empty}
        self._alike = next((name for name in _ALIKE if name in parameters), "")
        self._roots = [name for name in _ROOTS if name in parameters]
        self._compared = kind not in _MAY_DIFFER

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an argument's value; None if the function has none of this name."""
        place = self._places.get(name, len(args))
        return args[place] if place < len(args) else kwargs.get(name, self._defaults.get(name))

    def described(self, *call: Any) -> tuple[list[Tensor], str]:
        """Return the tensors, and what must be alike on all ranks as text."""
        value = self.get(self._alike, *call)
        values = value if isinstance(value, list | tuple) else [value]
        tensors = [item for item in values if isinstance(item, Tensor)]
        shapes = [f"{str(t.dtype)[6:]}{[*t.shape]}" for t in tensors] if self._compared else []
        roots = [(name, self.get(name, *call)) for name in self._roots]
        parts = [f"{name}={getattr(v, 'name', v)}" for name, v in roots if v is not None]
        parts = [f"op={g[9:].upper()}" if g.startswith("reduceOp=") else g for g in parts]
        return tensors, " ".join(shapes + parts)


class _Notes:
    def __init__(self, pulse: Pulse, on_collective: OnCollective | None) -> None:
        self._pulse, self._on_collective = pulse, on_collective
        self._nested = threading.local()  # all_gather_object calls all_gather
        self._begun: weakref.WeakKeyDictionary[Any, Visit] = weakref.WeakKeyDictionary()
        self._results: dict[int, Visit] = {}  # address of a functional collective's result → call
        self._labels: dict[str, str] = {}
        self._world = WORLD

    def functional(self, module: ModuleType) -> list[Patch]:
        """Return the patches of the functional collectives, once a script imports them."""
        names = map("".join, itertools.product(_FUNCTIONAL_COLLECTIVES, _FORMS))
        functions = [(name, vars(module)[name]) for name in names if name in vars(module)]
        patches: list[Patch] = [(module, name, self.around(name, f)) for name, f in functions]
        return [*patches, (module, "wait_tensor", self.around_wait)]

    def around(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the wrapper of a function of torch.distributed, which is its first argument."""
        if kind == _RECONFIGURE:
            return self.around_reconfigure
        arguments = _Arguments(kind, function)
        is_collective = kind not in _BETWEEN_TWO + _LIFE

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if self._is_nested():
                return original(*args, **kwargs)
            group = arguments.get("group", args, kwargs)
            if group == dist.GroupMember.NON_GROUP_MEMBER:
                return original(*args, **kwargs)
            tensors, detail = arguments.described(args, kwargs)
            label = self._label(_process_group(group)) if is_collective else "life"
            if kind in _BETWEEN_TWO:
                peer = (arguments.get(name, args, kwargs) for name in ("src", "dst"))
                label = PEER + next((str(rank) for rank in peer if rank is not None), "")
            with self._once(), self._pulse.inside(kind, detail, _users_line(), label) as visit:
                if self._on_collective is not None and is_collective:
                    self._on_collective(kind, tensors, visit.where, label)
                result = original(*args, **kwargs)
            for begun in result if isinstance(result, list) else [result]:
                if isinstance(begun, dist.Work):
                    self._begun[begun] = visit
                elif isinstance(begun, Tensor):
                    self._results[_address(begun)] = visit
            return result

        return around

    def around_reconfigure(
        self,
        original: Callable[..., Any],
        uuid: int,
        handles: Any,
        group: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Connect a group anew: from then on its calls are counted from 1, as a newcomer's are."""
        label = f"{_RECONFIGURE} {uuid}"
        with self._once(), self._pulse.inside(_RECONFIGURE, "", _users_line(), label) as visit:
            work = original(uuid, handles, group, *args, **kwargs)
        self._begun[work] = visit
        if group is None or group is dist.group.WORLD:
            self._world = f"group {uuid}"
        else:
            self._labels[group.group_name] = f"{group.group_name} {uuid}"
        return work

    def around_wait(
        self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wait for a collective that was begun before: the same visit, at the line that waits."""
        if self._is_nested():
            return original(work, *args, **kwargs)
        is_tensor = isinstance(work, Tensor)
        begun = self._results.pop(_address(work), None) if is_tensor else self._begun.get(work)
        begun = begun or Visit(UNKNOWN, group=PEER)
        with self._once(), self._pulse.inside(*begun[:2], _users_line(), begun.group, begun.seq):
            return original(work, *args, **kwargs)

    def around_inner(
        self, kind: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Note a call whose collectives run unseen in C++: it has a number of its own."""
        if self._is_nested():
            return original(*args, **kwargs)
        with self._pulse.inside(kind, "", _users_line(), kind):
            return original(*args, **kwargs)

    def _is_nested(self) -> bool:
        # Nor must this become part of a compiled graph.
        return torch.compiler.is_compiling() or getattr(self._nested, "is_inside", False)

    @contextmanager
    def _once(self) -> Iterator[None]:
        self._nested.is_inside = True
        try:
            yield
        finally:
            self._nested.is_inside = False

    def _label(self, group: Any) -> str:
        if group is None or group is dist.group.WORLD:
            return self._world
        name = group.group_name
        if name not in self._labels:
            ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
            self._labels[name] = f"{name}:{ranks if len(ranks) < _LONGEST else ''}"
        return self._labels[name]


def _process_group(group: Any) -> Any:
    """Return a process group that a functional collective may be given in another form."""
    if isinstance(group, DeviceMesh | tuple):
        mesh, *dim = group if isinstance(group, tuple) else (group,)
        return mesh.get_group(*dim)
    if isinstance(group, str):
        return c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type] # noqa: SLF001
    if isinstance(group, list):
        return c10d._find_pg_by_ranks_and_tag("", group)  # noqa: SLF001 - there is no public way
    return group


def _address(tensor: Tensor) -> int:
    """Return a tensor's address, also of one that waits at its first use; 0 if it has none."""
    try:
        return getattr(tensor, "elem", tensor).untyped_storage().data_ptr()
    except RuntimeError:  # it has no memory while a graph is traced
        return 0


def _users_line() -> str:
    stack = traceback.walk_stack(sys._getframe(1))  # noqa: SLF001 - the fast way
    return users_place((frame.f_code.co_filename, line, "") for frame, line in stack)
