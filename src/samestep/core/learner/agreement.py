"""What all ranks must agree on: rounding, the order of sums, settings, weights; random state."""

import contextlib
import hashlib
import math
import platform
import random
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.base.errors import UserError, listed
from samestep.base.trees import map_tensors, real_parts
from samestep.core.data.keyed_random import seed_alike
from samestep.core.data.order import held_parts
from samestep.core.learner.optimizer_state import Joint
from samestep.launch.ranks.world import World

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def arithmetic(device: torch.device) -> dict[str, str]:
    """Return PyTorch's version and the device's model, which decide how results are rounded."""
    if device.type == "cuda":
        model = torch.cuda.get_device_name(device)
    else:
        model = f"{_cpu()}, {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "device": model}


def check_same_arithmetic(world: World) -> None:
    """Refuse virtual ranks on ranks that round differently: other devices, another PyTorch."""
    if not world.virtual_ranks:
        return
    ranks = world.gather(arithmetic(world.device))
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            first, this = (", ".join(rank_has.values()) for rank_has in (ranks[0], other))
            raise UserError(
                f"--virtual-ranks: rank {rank} computes with {this}, rank 0 with {first}, and they "
                "round differently.",
                remedy="Start all ranks on the same model of device with the same PyTorch (Slurm: "
                "--constraint), or leave --virtual-ranks out.",
                on_all_ranks=True,
            )


def check_same_samples(marks: Sequence[Sequence[float]]) -> None:
    """Refuse other data on another rank, as of a generator without a seed, or of a rank's own part.

    `marks` are numbers of each rank's samples. Nodes of several kinds may round differently what
    `data()` computes.
    """
    first, *others = marks
    allowed = 1e-3 * max((abs(value) for value in first if math.isfinite(value)), default=0.0)
    for rank, marks_of_rank in enumerate(others, 1):
        pairs = zip(first, marks_of_rank, strict=False)
        if any(abs(one - other) > allowed for one, other in pairs):  # NaN is not
            raise UserError(
                f"Rank {rank} has other values of the training samples than rank 0. Read or make "
                "the same on all ranks (in data(), or within open_run), with a generator that is "
                "seeded, and leave it to samestep to share them out.",
                on_all_ranks=True,
            )


def _cpu() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if model := re.search(r"^model name\s*:(.*)$", text, re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


def may_draw(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step may draw random numbers: PyTorch's own draw none."""
    if isinstance(optimizer, Joint):
        return any(map(may_draw, optimizer))
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):  # Muon says "torch.optim"
        return True
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks  # noqa: SLF001
    step = vars(optimizer).get("step")
    if getattr(step, "__wrapped__", None) is type(optimizer).step:
        step = None  # a scheduler counts the steps in it
    return bool(hooks) or step is not None


OF_A_RANK = frozenset(
    [
        *("device", "backend", "threads", "num_workers", "oversubscribe", "timeout_s", "stall_s"),
        *("run_dir", "pictures", "track", "track_project", "track_name", "track_workspace"),
        *("track_tags", "track_offline", "track_checkpoints", "track_timeout"),
        *("rank", "local_rank", "global_rank", "node_rank", "node", "host", "hostname", "gpu"),
    ]
)
"""Settings that may differ between ranks: where and how fast each computes, what only rank 0 does.

The last line is what scripts of their own have among theirs.
"""
_OF_A_MACHINE = re.compile(r"(/|[A-Za-z]:\\).*|(cpu|cuda|mps|xpu)(:\d+)?", re.DOTALL)
"""A path or a device, which another node may have elsewhere."""


def check_same(values: Mapping[str, Any], world: World, of: str, *, where: str = "") -> None:
    """Check that all ranks have the same values, by name; all ranks call it.

    They compare one number, and the values only where it differs. Absolute paths and names of
    devices may be each node's own.

    Args:
        values: numbers, texts, and lists and dicts of them.
        world: the ranks.
        of: what begins the message, such as "The settings".
        where: where the values come from, for the message.

    Raises:
        UserError: a value differs, on every rank.
    """
    if not world.connected:
        return
    shown = {name: _as_text(value) for name, value in values.items()}
    digest = hashlib.sha256(repr(sorted(shown.items())).encode(errors="replace")).digest()
    number = torch.tensor(int.from_bytes(digest[:7]))
    most, least = world.reduce(torch.stack([number, -number]), "max")
    if most == -least:
        return
    ranks = world.gather(shown)
    differences = []
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        texts = [rank.get(name, "not there") for rank in ranks]
        if other := next((r for r, text in enumerate(texts) if text != texts[0]), 0):
            differences.append(
                f"{name} is {texts[0]:.80} on rank 0 and {texts[other]:.80} on rank {other}"
            )
    raise UserError(
        f"{of} differ between the ranks: {listed(differences)}.",
        where=where,
        remedy="Give all ranks the same: what is taken from a rank's own samples, the clock, the "
        "rank or the memory of a node differs on each.",
        on_all_ranks=True,
    )


def _as_text(value: Any) -> str:
    """Return a value as ranks compare it, and as a message shows it."""
    if isinstance(value, Mapping):
        pairs = sorted((str(name), _as_text(item)) for name, item in value.items())
        return f"{{{', '.join(f'{name}: {text}' for name, text in pairs)}}}"
    if isinstance(value, list | tuple | set | frozenset):
        texts = [_as_text(item) for item in value]
        return f"[{', '.join(sorted(texts) if isinstance(value, set | frozenset) else texts)}]"
    if isinstance(value, str | Path) and _OF_A_MACHINE.fullmatch(str(value)):
        return "a path or a device"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


_NOT_SENT = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
"""What neither Gloo nor NCCL sends."""


def check_same_model(model: nn.Module, world: World, name: str = "") -> None:
    """Check that all ranks train the same tensors of a model; all ranks call it.

    `name` is that of the model in a state.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for of, tensor in tensors.items() if world.connected else ():
        if tensor.dtype in _NOT_SENT:
            raise UserError(
                f"The model's {name}{of} is a tensor of {tensor.dtype}, which ranks cannot send "
                "each other.",
                remedy="Let it be int32 or int64.",
                on_all_ranks=True,
            )
    forms = {
        f"{name}{of}": f"{'trained' if t.requires_grad else 'frozen'}, {t.dtype} {tuple(t.shape)}"
        for of, t in tensors.items()
    }
    check_same(forms, world, "The models")


def check_same_tensors(
    tensors: Sequence[Tensor], world: World, of: str, *, where: str = ""
) -> None:
    """Check that ranks, if they round alike, have the same tensors; all ranks call it."""
    if not world.connected:
        return
    rounds = world.gather(arithmetic(world.device) | {"threads": str(torch.get_num_threads())})
    if all(digest == rounds[0] for digest in rounds):
        pairs = zip(tensors, bits_of(tensors).tolist(), strict=True)
        forms = [f"{t.dtype} {tuple(t.shape)} with bits {bits}" for t, bits in pairs]
        check_same({f"tensor {n}": form for n, form in enumerate(forms)}, world, of, where=where)


def is_checked(before: int, after: int) -> bool:
    """Whether ranks compare their weights after these steps: the 1st, 2nd, 4th, 8th … of a run."""
    return before.bit_length() < after.bit_length()


_SET = ("lr", "weight_decay", "momentum", "betas")
"""Entries of an optimizer's groups that are set for an update, and not made by it."""


def check_weights(
    named: Mapping[str, Tensor],
    world: World,
    step: int,
    added: str,
    *,
    draws: bool = True,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    modules: Mapping[str, nn.Module] = types.MappingProxyType({}),
) -> None:
    """Check by one number per weight that all ranks, if they round alike, have the same weights.

    Two things are for the message: `added` says what may be wrong with a gradient that differs, and
    `draws` whether the update may draw random numbers or read a rank's own. The groups of the
    optimizers tell whether a setting of theirs, such as the learning rate, differs. What `modules`
    keep by `get_extra_state` must be the same, too: a resumed run gives rank 0's to all.
    """
    # What is packed into bytes may name a rank's device.
    states = {
        f"{f'{name}.{of}'.strip('.')}.get_extra_state()": state
        for name, module in modules.items()
        for of, part in module.named_modules()
        if type(part).get_extra_state is not nn.Module.get_extra_state
        and getattr(state := part.get_extra_state(), "dtype", None) != torch.uint8
    }
    if states:
        check_same(map_tensors(Tensor.cpu, states), world, "The extra states of modules")
    if not (world.connected and named):
        return
    bits = bits_of([*named.values()])
    most, least = world.reduce(torch.stack([bits, -bits]), "max")
    if torch.equal(most, -least):
        return
    gradients = [p.grad for p in named.values()]
    dense = [g for g in gradients if g is not None and g.layout == torch.strided]
    of_gradients = bits_of(dense).tolist() if len(dense) == len(gradients) else None
    rounds = arithmetic(world.device) | {"threads": str(torch.get_num_threads())}
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    set_to = [{n: _as_text(group[n]) for n in _SET if n in group} for group in groups]
    ranks = world.gather((bits.tolist(), of_gradients, rounds, set_to))
    if any(rank[2] != ranks[0][2] for rank in ranks):
        return
    place, name = next((i, n) for i, n in enumerate(named) if int(most[i]) != -int(least[i]))
    rank = next(r for r, sums in enumerate(ranks) if sums[0][place] != ranks[0][0][place])
    summed = [sums[1] and sums[1][place] for sums in ranks]
    if not named[name].requires_grad:
        why = "It is not trained: something sets it from a rank's own samples or random numbers."
    elif summed.count(summed[0]) < len(summed):
        why = f"So does its gradient: {added}."
    elif setting := _other_setting(ranks[0][3], ranks[rank][3]):
        name_of, here, there = setting
        why = (
            f"Its gradient is the same, and the optimizer's {name_of} is {here} on rank 0 and "
            f"{there} on rank {rank}: make it of the step and of what is the same on all ranks."
        )
    else:
        same = "" if None in summed else "Its gradient is the same. "
        written = (
            "Forward writes it from a rank's own samples, as ActNorm does in its first batch: set "
            "it in model(), or from the samples of all ranks; or after_epoch does, with what each "
            "rank draws or reads for itself; or an evaluation, such as evaluate_batch, which must "
            "leave the model as it is"
        )
        update = (
            "the update draws from a generator that each rank seeds differently, or reads the "
            "rank, the clock or a rank's own samples: draw from the global generators of torch, "
            "Python or NumPy, which samestep seeds alike for the update"
        )
        why = f"{same}{written}. Or {update}." if draws else f"{same}{written}."
    raise UserError(
        f"The weights of the ranks have drifted apart: after step {step}, {name} differs between "
        f"ranks 0 and {rank}. {why} Earlier checkpoints are kept.",
        on_all_ranks=True,
    )


def _other_setting(
    ours: list[dict[str, str]], theirs: list[dict[str, str]]
) -> tuple[str, str, str] | None:
    """Return the first entry of optimizers' groups that differs, and both values."""
    for mine, other in zip(ours, theirs, strict=False):
        for name, value in mine.items():
            if value != other.get(name):
                return name, value, str(other.get(name))
    return None


def bits_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return a sum of each tensor's bits (tensors,), int64 on the CPU; the host waits once."""
    sums = []
    for tensor in tensors:
        real = real_parts(tensor.detach())
        bits = real.view(_BITS[real.element_size()])
        # A type of the same size needs no copy; an overflow does no harm.
        total = bits.sum(dtype=bits.dtype if bits.element_size() > 2 else torch.int64)
        sums.append(total.to(tensors[0].device, torch.int64))
    return torch.stack(sums).cpu()


def sum_over_parts(rows: Tensor, world: World) -> Tensor:
    """Return the sums (values,) of all ranks' rows (parts, values); every rank calls it."""
    if not world.virtual_ranks:
        return world.reduce(rows.sum(dim=0))
    from samestep.core.learner.tree import add_up  # noqa: PLC0415 - of virtual ranks

    held = held_parts(world)
    table = rows.new_zeros(world.num_parts, rows.shape[1])
    table[held.start : held.stop] = rows
    return add_up(world.reduce(table).unbind(), lambda left, right: left + right)


@contextlib.contextmanager
def random_numbers(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed every global generator; afterwards those of the host and the device are as they were."""
    states = rng_state()
    module = None
    if device is not None and device.type != "cpu":
        module = torch.get_device_module(device)
    of_device = module and module.get_rng_state()
    seed_alike(seed)
    try:
        yield
    finally:
        set_rng_state(states)
        if module:
            module.set_rng_state(of_device)


def rng_state() -> dict[str, Any]:
    """Return the states of the host's generators; each step and evaluation seeds the device's."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
