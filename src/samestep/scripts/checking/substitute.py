"""Let the CPU answer a script's calls to CUDA, and note which device each rank asks for."""

import contextlib
import importlib
import os
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from samestep.base.patches import Patch, patched, patched_when_imported
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.ranks_of_script import Job
from samestep.scripts.checking.recorder import Recorder
from samestep.scripts.probes import Probe, listening

_Device = torch.device
_CPU = _Device("cpu")
_MEMORY = 80 << 30
_ANSWERED = "The script asks for CUDA: the CPU and Gloo answered in place of CUDA and NCCL."
_ALONE = ("localhost", "::1")
_STREAMS = ("current_stream", "default_stream", "stream")
_SINGLE = ("gather_single", "gather_into_tensor")  # PyTorch 2.14, and Gloo has none of them
_SET_DEVICE = Probe((torch.cuda, "set_device"))
_ON_CPU = (Tensor.cuda, Tensor.pin_memory, Tensor.record_stream)


class _Devices:
    """The devices that one rank asks for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.current = 0

    def note(self, index: object) -> None:
        """Note an index that is asked for, once for each line."""
        if not isinstance(index, int):
            return
        variables = os.environ.copy()  # a copy counts as no reader of a launcher's variables
        self._recorder.once(
            ev.DeviceAsked(
                index,
                rank=self._recorder.rank,
                local_rank=int(variables.get("LOCAL_RANK", "0")),
                alone=self._recorder.job.alone or variables.get("MASTER_ADDR") in _ALONE,
            )
        )

    def choose(self, device: Any) -> None:
        device = _Device(device) if isinstance(device, str) else device
        index = device.index if isinstance(device, _Device) else device
        self.current = index if isinstance(index, int) else 0
        self.note(index)

    def on_cpu(self, device: Any) -> Any:
        """Return the CPU for a CUDA device, given by its index, name or object; else the same."""
        asked = _Device(device) if isinstance(device, str) and device[:4] == "cuda" else device
        if isinstance(asked, _Device) and asked.type == "cuda":
            self.note(asked.index)
            return _CPU
        if isinstance(asked, int) and not isinstance(asked, bool):
            self.note(asked)
            return _CPU
        return device

    def around_module(
        self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Move a module: to nowhere, where CUDA is meant."""
        if original.__name__ == "cuda":
            self.note(args[0] if args else kwargs.get("device"))
            return module
        given = {name: self.on_cpu(v) if name == "device" else v for name, v in kwargs.items()}
        return original(module, *map(self.on_cpu, args), **given)

    def around_load(self, original: Callable[..., Any], f: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            kwargs, args = kwargs | {"map_location": args[0]}, args[1:]
        where = kwargs.pop("map_location", None)
        if isinstance(where, dict):
            where = dict.fromkeys(where, "cpu")
        return original(f, self.on_cpu(where), *args, **kwargs)

    def around_mesh(
        self, original: Callable[..., Any], mesh: Any, device_type: str, *args: Any, **kwargs: Any
    ) -> None:
        original(mesh, str(self.on_cpu(device_type)), *args, **kwargs)

    def around_ddp(
        self, original: Callable[..., Any], ddp: Any, module: Any, *args: Any, **kwargs: Any
    ) -> None:
        for index in (args[0] if args else kwargs.get("device_ids")) or ():
            self.on_cpu(index)
        others = _except(kwargs, "device_ids", "output_device")
        original(ddp, module, None, None, *args[2:], **others)


class _OnCpu(TorchFunctionMode):
    """Functions of PyTorch that name a device."""

    def __init__(self, devices: _Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ON_CPU:
            self._devices.note(args[1] if len(args) > 1 else kwargs.get("device"))
            return args[0]
        if "device" in kwargs:
            kwargs = kwargs | {"device": self._devices.on_cpu(kwargs["device"])}
        if func is Tensor.to and len(args) > 1:
            args = (args[0], self._devices.on_cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


class _StandIn(type):
    """Lets a replaced class be asked for what the real one made."""

    real: type

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.real)


_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}


@contextmanager
def frameworks_adapted(job: Job) -> Iterator[None]:
    """Give Lightning's Trainer and Fabric the ranks that there are.

    They take one device of a CPU, and as many ranks as torchrun started only if they are asked for
    as many devices: on the CPU, every rank would train on its own.
    """

    def around(original: Callable[..., Any], connector: Any, *args: Any, **given: Any) -> None:
        if given.get("devices") not in (1, "1", [0]) and not job.alone:
            given["devices"] = 1 if job.one_per_node else job.nproc
            given["num_nodes"] = job.nproc if job.one_per_node else 1
        if job.substitute and given.get("accelerator") in ("auto", "gpu", "cuda"):
            given["accelerator"] = "cpu"
        original(connector, *args, **given)

    def patches(name: str, module: types.ModuleType) -> list[Patch]:
        return [(getattr(module, name), "__init__", around)]

    with patched_when_imported({m: partial(patches, name) for m, name in _CONNECTORS.items()}):
        yield


@contextmanager
def substituting(recorder: Recorder) -> Iterator[None]:
    """Note the devices while inside; with `job.substitute`, let the CPU answer for them."""
    devices, job = _Devices(recorder), recorder.job
    if not job.substitute:
        with listening((_SET_DEVICE, lambda call: devices.choose(call.argument(0, "device")))):
            yield
        return
    importlib.import_module("torch._dynamo")  # while what it annotates with is real
    recorder.note(ev.Remark(_ANSWERED), where="")
    generator = torch.Generator

    def make_device(_kind: type, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 1:  # a name, an index, or a device
            on_cpu = devices.on_cpu([*args, *kwargs.values()][0])
            return on_cpu if isinstance(on_cpu, _Device) else _Device(on_cpu)
        return devices.on_cpu(_Device(*args, **kwargs))

    def make_generator(_kind: type, device: Any = "cpu") -> Any:
        return generator(devices.on_cpu(device))

    def stand_in(real: type, make: Callable[..., Any]) -> type:
        # A pickled device names its class, by where it is found.
        inside = {"__new__": make, "real": real, "__module__": "torch"}
        return _StandIn(real.__name__, (), inside)

    classes = [
        (torch, "device", stand_in(_Device, make_device)),
        (torch, "Generator", stand_in(generator, make_generator)),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
    ]
    with contextlib.ExitStack() as stack:
        for place, name, kind in classes:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, kind)
        stack.enter_context(patched(*_patches(devices, 1 if job.one_per_node else job.nproc)))
        stack.enter_context(_OnCpu(devices))
        yield


def _patches(devices: _Devices, count: int) -> list[Patch]:
    """Return patches of functions that have no answer on a CPU."""
    shown = SimpleNamespace(
        name="CPU", total_memory=_MEMORY, major=8, minor=0, multi_processor_count=108
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": count,
        "get_device_name": "CPU",
        "get_device_capability": (8, 0),
        "get_device_properties": shown,
        "is_bf16_supported": True,
        "mem_get_info": (_MEMORY, _MEMORY),
        "is_tf32_supported": True,
        "is_current_stream_capturing": False,
        "can_device_access_peer": True,
        "initial_seed": 0,
        "memory_summary": "",
        "memory_stats": {},
        "get_arch_list": [],
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), 0),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), 0),
    }
    nothing = (
        *("synchronize", "empty_cache", "ipc_collect", "init", "set_stream"),
        *("manual_seed", "manual_seed_all", "seed", "seed_all"),
        *("set_rng_state", "set_rng_state_all", "set_per_process_memory_fraction"),
        *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    )
    cuda: list[Patch] = [
        *((torch.cuda, name, _answer(value)) for name, value in answers.items()),
        *((torch.cuda, name, _answer(None)) for name in nothing),
        *((torch.cuda.nvtx, name, _answer(None)) for name in ("range_push", "range_pop", "mark")),
        (torch.cuda, "set_device", lambda _original, device: devices.choose(device)),
        (torch.cuda, "current_device", lambda _original: devices.current),
        (torch.cuda, "get_rng_state", lambda _original, *_: torch.get_rng_state()),
        (torch.cuda, "get_rng_state_all", lambda _original: [torch.get_rng_state()] * count),
        *((torch.cuda, n, lambda _o, *_, **__: _Stream()) for n in _STREAMS),
        (torch.accelerator, "is_available", _answer(True)),
        (torch.accelerator, "device_count", _answer(count)),
        (torch.accelerator, "current_accelerator", _answer(_Device("cuda"))),
        (torch.accelerator, "current_device_index", lambda _original: devices.current),
        (torch.accelerator, "synchronize", _answer(None)),
        (torch.accelerator, "current_stream", lambda _original, *_: _Stream()),
    ]
    cuda += [
        (torch.accelerator, name, lambda _original, device: devices.choose(device))
        for name in ("set_device_index", "set_device_idx")
    ]
    places = (dist, distributed_c10d)
    return [
        *cuda,
        *((nn.Module, name, devices.around_module) for name in ("to", "cuda")),
        (torch, "load", devices.around_load),
        (DataLoader, "__init__", _without(pin_memory=False, pin_memory_device="")),
        (DistributedDataParallel, "__init__", devices.around_ddp),
        (nn.DataParallel, "forward", lambda _original, outer, *a, **kw: outer.module(*a, **kw)),
        (DeviceMesh, "__init__", devices.around_mesh),
        (DistributedDataParallel, "_passing_sync_batchnorm_handle", _answer(None)),
        (DistributedDataParallel, "_check_comm_hook", _answer(None)),  # NCCL for bf16
        (SyncBatchNorm, "forward", _sync_batch_norm),
        *((place, "init_process_group", _by_gloo) for place in (*places, device_mesh)),
        *((place, "new_group", _by_gloo) for place in places),
        *((place, "barrier", _without(device_ids=None)) for place in places),
        *(
            (place, name, _gather_single)
            for place in places
            for name in _SINGLE
            if name in vars(place)
        ),
    ]


class _Stream:
    """A stream or an event of CUDA: on the CPU all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: 1.0 if name == "elapsed_time" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _answer(value: Any) -> Callable[..., Any]:
    return lambda _original, *_args, **_kwargs: value


def _without(**instead: Any) -> Callable[..., Any]:
    """Return a wrapper that passes these values instead of the given arguments."""

    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs | {n: v for n, v in instead.items() if n in kwargs})

    return around


def _sync_batch_norm(_original: Callable[..., Any], norm: Any, x: Tensor) -> Tensor:
    """Compute SyncBatchNorm of inputs (batch, channels, …), as PyTorch does on GPUs only."""
    group = norm.process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if not norm.training or group is None or dist.get_world_size(group) == 1:
        return _BatchNorm.forward(norm, x)
    other = [dim for dim in range(x.dim()) if dim != 1]
    sums = torch.stack([x.sum(other), x.square().sum(other), torch.ones_like(x).sum(other)])
    # What `all_reduce` there calls, which also warns that it is deprecated.
    reduce = dist.nn.functional._AllReduce.apply  # noqa: SLF001
    total, squares, count = reduce(dist.ReduceOp.SUM, group, sums)  # type: ignore[no-untyped-call]
    mean = total / count
    variance = squares / count - mean.square()
    if norm.track_running_stats:
        norm.num_batches_tracked += 1
        share = norm.momentum or 1.0 / float(norm.num_batches_tracked)
        unbiased = variance * count / (count - 1)
        norm.running_mean.lerp_(mean.detach(), share)
        norm.running_var.lerp_(unbiased.detach(), share)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    scale = (variance + norm.eps).rsqrt() * (1.0 if norm.weight is None else norm.weight)
    shift = (0.0 if norm.bias is None else norm.bias) - mean * scale
    normalised: Tensor = x * scale.view(shape) + shift.view(shape)
    return normalised


def _by_gloo(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if original.__name__ == "init_process_group" and args:
        kwargs, args = kwargs | {"backend": args[0]}, args[1:]
        kwargs |= dict(zip(("init_method",), args, strict=False))
        args = ()
    # Without a backend, a build for CUDA chooses NCCL.
    if original.__name__ == "init_process_group" or kwargs.get("backend") is not None:
        kwargs = kwargs | {"backend": "gloo"}
    return original(*args, **_except(kwargs, "device_id", "pg_options"))


def _gather_single(
    _original: Callable[..., Any],
    tensor: Tensor,
    gather_tensor: Tensor | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Any:
    root = group_dst
    parts = None
    if root is None:
        root = dst or 0 if group is None else dist.get_group_rank(group, dst or 0)
    if gather_tensor is not None and dist.get_rank(group) == root:
        parts = [*gather_tensor.view(-1, *tensor.shape)]
    return dist.gather(tensor, parts, dst, group, async_op, group_dst)


def _except(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}
