"""What a forward does besides returning outputs: state it changes, random numbers it draws.

A fingerprint hashes each place where an object keeps plain state, to a depth. Two fingerprints
around a forward differ where it has changed such state.
"""

import contextlib
import functools
import hashlib
import inspect
import pickle
import random
import re
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.base.errors import is_not_deterministic, is_users, users_frame
from samestep.base.trees import tree_leaves
from samestep.core.learner.optimizer_state import parameters_in, with_inner

GENERATORS = np.random.Generator | np.random.RandomState | random.Random | torch.Generator

Prints = dict[str, str]
"""Place of an attribute, such as "the model's encoder.cache" → a hash of what is there."""

_DEPTH = 4

_FEW = 16

_MOST = 1000
"""Of a container's entries that are looked at, from its beginning and from its end."""

_OF_ANY_MODULE = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_is_hf_initialized"})

_OF_A_SCHEDULE = ("step", "_opt_called", "_step_count")
"""What a learning-rate schedule of PyTorch writes into its optimizer."""


def model_prints(model: nn.Module, loss: object = None) -> Prints:
    """Fingerprint what a model's modules, and a loss's, keep besides parameters and buffers."""
    prints: Prints = {}
    for owner, root in (("the model's", model), ("the loss's", loss)):
        for name, part in root.named_modules() if isinstance(root, nn.Module) else ():
            if type(part).__module__.startswith("torchmetrics"):
                continue  # what it counts trains nothing
            prefix = f"{owner} {name}." if name else f"{owner} "
            prints |= _of_attributes(prefix, vars(part), _OF_ANY_MODULE)
    return prints


def closure_prints(loss: object) -> Prints:
    """Fingerprint what a function has in its closure, or a callable object in its attributes."""
    return _of_attributes("the loss's ", kept_by(loss))


def forward_prints(model: nn.Module, function: object = None) -> Prints:
    """Fingerprint what a forward keeps: the modules, their classes, and the recipe's function.

    What a module returns as extra state is in checkpoints, so its attributes are left out.
    """
    plain = nn.Module.get_extra_state
    extra = {n for n, m in model.named_modules() if type(m).get_extra_state is not plain}
    prints = {
        name: text
        for name, text in model_prints(model).items()
        if name.removeprefix("the model's ").rpartition(".")[0] not in extra
    }
    for kind in {type(module) for module in model.modules()}:
        if not kind.__module__.startswith("torch."):
            prints |= _of_attributes(f"{kind.__name__}'s ", kept_by(kind.forward))
    return prints | _of_attributes("forward's ", kept_by(function))


def kept_by(loss: object) -> dict[str, Any]:
    """Return by name what a loss keeps, a module's in its buffers and attributes.

    A function may keep it in its closure, in attributes, in defaults, or in what is global, and
    call others of its file that do; an object also in its class.
    """
    values: dict[str, Any] = {}
    while isinstance(loss, functools.partial | MethodType):
        if isinstance(loss, functools.partial):
            values |= {f"argument {n}": v for n, v in enumerate(loss.args)} | loss.keywords
        loss = loss.func if isinstance(loss, functools.partial) else loss.__self__
    if isinstance(loss, FunctionType):
        return values | _kept_by_function(loss, set())
    named = dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}
    plain = getattr(loss, "__dict__", {}).items()
    for kind in type(loss).__mro__[::-1]:
        if kind.__module__ != "builtins" and not kind.__module__.startswith("torch."):
            values |= {n: v for n, v in vars(kind).items() if n[0] != "_" and _may_count(v)}
    method = getattr(type(loss), "forward" if isinstance(loss, nn.Module) else "__call__", None)
    values |= _kept_by_function(method, set()) if isinstance(method, FunctionType) else {}
    return values | named | {n: v for n, v in plain if n not in _OF_ANY_MODULE}


def _kept_by_function(function: FunctionType, visited: set[FunctionType]) -> dict[str, Any]:
    """Return by name what a function keeps, and those of its file that it calls by their names."""
    visited.add(function)
    own = function.__globals__
    used = {n: own[n] for n in function.__code__.co_names if n in own}
    values: dict[str, Any] = {}
    for value in used.values():
        if isinstance(value, FunctionType) and value.__globals__ is own and value not in visited:
            values |= _kept_by_function(value, visited)
    values |= {n: value for n, value in used.items() if _may_count(value, own.get("__name__"))}
    named = function.__code__.co_varnames[: function.__code__.co_argcount]
    defaults = function.__defaults__ or ()
    values |= zip(named[len(named) - len(defaults) :], defaults, strict=True)
    return values | (function.__kwdefaults__ or {}) | vars(function) | closure_of(function)


def _may_count(value: object, module: object = None) -> bool:
    """Whether a function may count in a global: a number, a few, or an object of its module."""
    if isinstance(value, list | dict | deque):
        inside = [*value.values()] if isinstance(value, dict) else value
        return len(inside) <= _FEW and all(isinstance(number, int | float) for number in inside)
    if isinstance(value, Tensor):
        return value.numel() <= _FEW
    counts = isinstance(value, int | float | count | GeneratorType | GENERATORS)
    return counts or (not isinstance(value, nn.Module) and type(value).__module__ == module)


def optimizer_prints(optimizer: torch.optim.Optimizer) -> Prints:
    """Fingerprint what an optimizer keeps outside what its `state_dict` returns."""
    held = parameters_in(optimizer)
    with contextlib.suppress(KeyError):  # one of several that share a state has keys of the others
        held += tree_leaves(optimizer.state_dict())
    in_state = [id(t) for t in held if isinstance(t, Tensor)]
    for inner in with_inner(optimizer):  # it may hold the state of others as its own
        tensors = [t for t in tree_leaves([*inner.state.values()]) if isinstance(t, Tensor)]
        if all(id(t) in in_state for t in tensors):
            in_state += [id(inner.state), *map(id, (inner.param_groups, *inner.param_groups))]
    # Not at import: the first optimizer imports torch._dynamo, which takes a second.
    usual = {*vars(torch.optim.SGD([torch.zeros(1)])), *_OF_A_SCHEDULE}
    return _of_attributes("the optimizer's ", kept_by_optimizer(optimizer), usual, in_state)


def kept_by_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return by name an optimizer's attributes, and the generators that its step finds by name."""
    step = inspect.unwrap(type(optimizer).step)
    values = {} if step.__module__.startswith("torch.") else _kept_by_function(step, set())
    own = {name: value for name, value in values.items() if isinstance(value, GENERATORS)}
    return own | vars(optimizer)


def differing(before: Prints, after: Prints) -> list[str]:
    """Return the places at which two fingerprints differ, in order."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _of_attributes(
    prefix: str,
    attributes: Mapping[str, Any],
    apart: Collection[str] = (),
    left_out: Collection[int] = (),
) -> Prints:
    prints = {}
    for name, value in attributes.items():
        if name not in apart:
            digest = hashlib.sha256()
            with contextlib.suppress(Exception):  # of an object that does not let itself be read
                for piece in _content_bytes(value, _DEPTH, {*left_out}):
                    digest.update(piece)
            prints[f"{prefix}{name}"] = digest.hexdigest()
    return prints


def _content_bytes(value: Any, depth: int, visited: set[int]) -> Iterator[bytes]:
    """Yield bytes that differ where a value's content does; each object's content once."""
    yield type(value).__name__.encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif id(value) not in visited:
        visited.add(id(value))
        if (own := content(value)) is not None:
            yield own
        elif depth:
            for part in _contents_of(value):
                yield from _content_bytes(part, depth - 1, visited)


def content(value: Any) -> bytes | None:
    """Return the content of a tensor, an array or a generator; None of anything else."""
    match value:
        case Tensor():
            return _values(value)
        case np.ndarray():
            content = repr(value).encode() if value.dtype.hasobject else value.tobytes()
            return f"{value.dtype}{value.shape}".encode() + content
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.RandomState():
            state: Any = value.get_state()
        case np.random.Generator():
            state = value.bit_generator.state
        case random.Random():
            state = value.getstate()
        case count():
            state = value
        case _:
            return None
    return repr(state).encode()


def _values(tensor: Tensor) -> bytes:
    kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    unreadable = tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized
    if unreadable or not tensor.numel():
        return kind
    # Of a copy: numpy() forbids PyTorch to resize a storage, which FSDP does to free weights.
    flat = tensor.detach().resolve_conj().to("cpu", copy=True).contiguous().view(-1)
    return kind + flat.view(torch.uint8).numpy().tobytes()


def _contents_of(value: Any) -> Iterable[Any]:  # noqa: PLR0911 - a case a kind
    """Return the parts of a container, a module, a function or another object."""
    match value:
        case type() | ModuleType():
            return ()
        case Mapping():
            return (part for pair in _entries_at_ends(value.items(), len(value)) for part in pair)
        case set() | frozenset():
            return sorted(map(repr, value))
        case list() | tuple() | deque():
            return (len(value), *_entries_at_ends(value, len(value)))
        case nn.Module():
            plain = [v for name, v in vars(value).items() if name not in _OF_ANY_MODULE]
            return [*value.parameters(), *value.buffers(), *plain]
        case functools.partial():
            return value.func, value.args, value.keywords
        case MethodType():
            return (value.__self__,)
        case FunctionType():
            return closure_of(value).values()
        case GeneratorType():
            return value.gi_frame.f_locals.values() if value.gi_frame else ()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**attributes, **getattr(value, "__dict__", {})}.values()


def _entries_at_ends(values: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield a container's entries; of a long one, only those at both ends."""
    for place, value in enumerate(islice(values, size)):
        if min(place, size - 1 - place) < _MOST:
            yield value


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return a function's closure variables by name."""
    variables = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not made yet
            variables[name] = cell.cell_contents
    return variables


Kind = Literal["batchnorm", "dropout", "state"]

KINDS: tuple[Kind, ...] = get_args(Kind)

ALL_KINDS = frozenset(KINDS)


@dataclass
class RandomDraws:
    """The generators that forward and loss drew from."""

    draws: dict[str, str] = field(default_factory=dict)
    """Random operation of torch → the user's line that called it, or nothing."""
    generators: set[str] = field(default_factory=set)
    """"Python's random", "NumPy's random"."""
    own: dict[str, list[str]] = field(default_factory=dict)
    """The user's line that drew from a `torch.Generator` of its own → where that stood, by call."""


def users_line(frame: FrameType | None) -> str:
    """Return the innermost line that is neither samestep's nor a library's: `model.py:31`."""
    own = users_frame(frame)
    return "" if own is None else place_of(own)


def place_of(frame: FrameType) -> str:
    """Return the line at which a frame stands: `model.py:31`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note every random operation; with `hold`, give each a constant result."""

    def __init__(self, draws: RandomDraws, *, hold: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._hold = draws, hold

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        parameters = func._schema.arguments  # noqa: SLF001
        arguments = {a.name: a.default_value for a in parameters if a.has_default_value()}
        arguments |= {a.name: v for a, v in zip(parameters, args, strict=False)} | kwargs
        name = func.overloadpacket.__name__
        fraction = arguments.get("dropout_p", arguments.get("dropout"))
        drops_none = fraction == 0 or (name == "native_dropout" and arguments.get("p") == 0)
        if drops_none or arguments.get("train") is False or arguments.get("training") is False:
            return func(*args, **kwargs)
        line = users_line(sys._getframe(1))  # noqa: SLF001
        self._seen.draws.setdefault(name, line)
        generator = arguments.get("generator")
        # Those of the devices are seeded by samestep in every step.
        if generator not in (None, torch.default_generator, *torch.cuda.default_generators):
            state = generator.get_state().numpy().tobytes()
            stood = hashlib.blake2b(state, digest_size=8).hexdigest()
            self._seen.own.setdefault(line, []).append(stood)
        return _constant(name, func, arguments) if self._hold else func(*args, **kwargs)


def _constant(name: str, func: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a random operation's result with every number the same."""
    if name == "native_dropout":
        tensor: Tensor = arguments["input"]
        return tensor / (1 - arguments["p"]), torch.ones_like(tensor, dtype=torch.bool)
    for fraction in ("dropout_p", "dropout"):
        if fraction in arguments:
            return func(**{**arguments, fraction: 0.0})
    result = func(**arguments)
    if name.startswith("randperm"):
        return result.copy_(torch.arange(len(result), device=result.device))
    low = arguments.get("low", arguments.get("from", 0)) or 0
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            middle = 0.5 if leaf.is_floating_point() else low
            leaf.fill_(1 if name.startswith("bernoulli") else middle)
    return result


def watched(
    function: Callable[..., Any], draws: RandomDraws, held: frozenset[Kind] = frozenset()
) -> Callable[..., Any]:
    """Return a forward or a loss that notes what it draws, with some of it held constant."""

    @functools.wraps(function)  # with its arguments' names
    def call(*args: Any, **kwargs: Any) -> Any:
        with outside(draws, hold="state" in held), Draws(draws, hold="dropout" in held):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def outside(draws: RandomDraws, *, hold: bool) -> Iterator[None]:
    """Note whether Python's or NumPy's generator is used; `hold` seeds both first."""
    saved = random.getstate(), np.random.get_state()  # noqa: NPY002 - as recipes draw
    if hold:
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002
    try:
        yield
    finally:
        after = random.getstate(), pickle.dumps(np.random.get_state())  # noqa: NPY002
        names = ("Python's random", "NumPy's random")
        draws.generators |= {n for n, a, b in zip(names, before, after, strict=True) if a != b}
        if hold:
            random.setstate(saved[0])
            np.random.set_state(saved[1])  # noqa: NPY002


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch normalisations of a model by their names."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}


def dropouts(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that drop something, each with its attribute that says how much."""
    dropouts: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        name = "p" if isinstance(module, _DropoutNd) else "dropout"
        kinds = _DropoutNd | nn.RNNBase | nn.MultiheadAttention
        if isinstance(module, kinds) and getattr(module, name) > 0:
            dropouts.append((module, name))
    return dropouts


def differs_by_ranks(model: nn.Module) -> list[str]:
    """Return the kinds of layers whose results depend on the number of ranks."""
    norms = [n for n in batch_norms(model).values() if not isinstance(n, nn.SyncBatchNorm)]
    layers = {"BatchNorm": norms, "dropout": dropouts(model)}
    return [name for name, there in layers.items() if there]


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')

Frame = tuple[str, int]
"""File and line."""


def refused_operation(model: nn.Module, error: Exception, again: Callable[[], Any]) -> str:
    """Return " in the module NAME (CLASS) at FILE:LINE", as far as it can be found.

    `error` was raised by a forward or backward of the model; `again` repeats it.
    """
    frames = [(f.filename, f.lineno or 0) for f in traceback.extract_tb(error.__traceback__)]
    names = _modules_at(model, frames)
    if not names:  # within a backward, which begins in the loss
        frames = _forward_of(again)
        names = _modules_at(model, frames)
    own = [f"{file}:{line}" for file, line in frames if is_users(file)]
    return (f" in the module {names}" if names else "") + (f" at {own[-1]}" if own else "")


def _modules_at(model: nn.Module, frames: Sequence[Frame]) -> str:
    """Return the innermost modules whose forward contains one of the frames: up (Upsample)."""
    names: dict[type, list[str]] = {}
    for name, module in model.named_modules():
        names.setdefault(type(module), []).append(name or "itself")
    spans: dict[type, tuple[str, range]] = {}
    for kind in names:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            code = kind.forward.__code__  # type: ignore[attr-defined]
            lines, first = inspect.getsourcelines(code)
            spans[kind] = code.co_filename, range(first, first + len(lines))
    for file, line in reversed(frames):
        for kind, (source, span) in spans.items():
            if file == source and line in span:
                return f"{' or '.join(names[kind][:3])} ({kind.__name__})"
    return ""


def _forward_of(again: Callable[[], Any]) -> list[Frame]:
    """Return the lines of the forward whose backward fails, by PyTorch's anomaly mode."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True):
            try:
                again()
            except RuntimeError as error:
                if not is_not_deterministic(error):
                    return []
    text = "".join(str(w.message) for w in warned if "Error detected in" in str(w.message))
    return [(file, int(line)) for file, line in _FRAME.findall(text)]


class BufferPlace(NamedTuple):
    """Where a buffer is: a module may put another tensor there."""

    module: nn.Module
    key: str
    name: str

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now."""
        buffer = self.module._buffers[self.key]  # noqa: SLF001 - what `self.key = …` writes to
        assert buffer is not None
        return buffer


def buffer_places(model: nn.Module) -> list[BufferPlace]:
    """Return the place of each of a model's buffers."""
    return [
        BufferPlace(module, key, f"{prefix}.{key}" if prefix else key)
        for prefix, module in model.named_modules()
        for key, buffer in module._buffers.items()  # noqa: SLF001
        if buffer is not None
    ]


@torch.no_grad()
def keep_buffers(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores a model's buffers to their current values."""
    places = buffer_places(model)
    copies = [place.tensor.clone() for place in places]

    @torch.no_grad()
    def put_back() -> None:
        for place, before in zip(places, copies, strict=True):
            if place.tensor.shape == before.shape and not torch.equal(place.tensor, before):
                place.tensor.copy_(before)

    return put_back
