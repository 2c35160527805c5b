"""State that no checkpoint holds and no rank shares: what objects keep in plain attributes.

A fingerprint names each such place and hashes what is there: tensors, numbers, generators, and
containers, objects and closures that hold them, to a depth. Two fingerprints around a forward
differ where it has changed such state.
"""

import contextlib
import functools
import hashlib
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Prints = dict[str, str]
"""Place of an attribute, such as "the model's encoder.cache" → a hash of what is there."""

_DEPTH = 4
_MOST = 1000
"""Of a container's entries that are looked at, from its beginning and from its end."""
_OF_ANY_MODULE = frozenset({*vars(nn.Module()), "_compiled_call_impl", "_is_hf_initialized"})
_OF_A_SCHEDULE = ("step", "_opt_called", "_step_count")
"""What a learning-rate schedule of PyTorch writes into its optimizer."""


def model_prints(model: nn.Module, loss: object = None) -> Prints:
    """Return the fingerprints of what a model's modules keep beside parameters and buffers.

    Those of a loss, too, if it is a module.
    """
    found: Prints = {}
    for owner, root in (("the model's", model), ("the loss's", loss)):
        for name, part in root.named_modules() if isinstance(root, nn.Module) else ():
            if type(part).__module__.startswith("torchmetrics"):
                continue  # what it counts trains nothing
            prefix = f"{owner} {name}." if name else f"{owner} "
            found |= _of_attributes(prefix, vars(part), _OF_ANY_MODULE)
    return found


def closure_prints(loss: object) -> Prints:
    """Return the fingerprints of what a function has in its closure, or a callable object keeps."""
    while isinstance(loss, functools.partial | MethodType):
        loss = loss.func if isinstance(loss, functools.partial) else loss.__self__
    if isinstance(loss, nn.Module):
        return {}
    kept = closure_of(loss) if isinstance(loss, FunctionType) else getattr(loss, "__dict__", {})
    return _of_attributes("the loss's ", kept)


def optimizer_prints(optimizer: torch.optim.Optimizer) -> Prints:
    """Return the fingerprints of what an optimizer keeps outside its `state`."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    held += [t for state in optimizer.state.values() for t in state.values()]
    known = [id(t) for t in held if isinstance(t, Tensor)]
    # Not at import: the first optimizer imports torch._dynamo, which takes a second.
    usual = {*vars(torch.optim.SGD([torch.zeros(1)])), *_OF_A_SCHEDULE}
    return _of_attributes("the optimizer's ", vars(optimizer), usual, known)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that the backward of a loss gives a gradient to."""
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        nodes += [following for following, _ in node.next_functions]


def differing(before: Prints, after: Prints) -> list[str]:
    """Return the places that two fingerprints differ in, in their order."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _of_attributes(
    prefix: str,
    attributes: Mapping[str, Any],
    apart: Collection[str] = (),
    known: Collection[int] = (),
) -> Prints:
    found = {}
    for name, value in attributes.items():
        if name not in apart:
            digest = hashlib.sha256()
            with contextlib.suppress(Exception):  # of an object that does not let itself be read
                for piece in _pieces(value, _DEPTH, {*known}):
                    digest.update(piece)
            found[f"{prefix}{name}"] = digest.hexdigest()
    return found


def _pieces(value: Any, depth: int, seen: set[int]) -> Iterator[bytes]:
    """Yield bytes that differ where a value's content does; each object's content once."""
    yield type(value).__name__.encode()
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value).encode()
    elif id(value) not in seen:
        seen.add(id(value))
        content = _content(value)
        if content is not None:
            yield content
        elif depth:
            for part in _parts(value):
                yield from _pieces(part, depth - 1, seen)


def _content(value: Any) -> bytes | None:  # noqa: PLR0911 - a case a kind
    """Return the content of a tensor, an array or a generator; None of anything else."""
    match value:
        case Tensor():
            return _values(value)
        case np.ndarray():
            content = repr(value).encode() if value.dtype.hasobject else value.tobytes()
            return f"{value.dtype}{value.shape}".encode() + content
        case torch.Generator():
            return value.get_state().numpy().tobytes()
        case np.random.Generator():
            return repr(value.bit_generator.state).encode()
        case np.random.RandomState():
            return repr(value.get_state()).encode()
        case random.Random():
            return repr(value.getstate()).encode()
    return None


def _values(tensor: Tensor) -> bytes:
    kind = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    unreadable = tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized
    if unreadable or not tensor.numel():
        return kind
    flat = tensor.detach().resolve_conj().cpu().contiguous().view(-1)
    return kind + flat.view(torch.uint8).numpy().tobytes()


def _parts(value: Any) -> Iterable[Any]:  # noqa: PLR0911 - a case a kind
    """Return what a container, a module, a function or another object is made of."""
    match value:
        case type() | ModuleType():
            return ()
        case Mapping():
            return (part for pair in _some(value.items(), len(value)) for part in pair)
        case set() | frozenset():
            return sorted(map(repr, value))
        case list() | tuple() | deque():
            return (len(value), *_some(value, len(value)))
        case nn.Module():
            plain = [kept for name, kept in vars(value).items() if name not in _OF_ANY_MODULE]
            return [*value.parameters(), *value.buffers(), *plain]
        case functools.partial():
            return value.func, value.args, value.keywords
        case MethodType():
            return (value.__self__,)
        case FunctionType():
            return closure_of(value).values()
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    kept = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return {**kept, **getattr(value, "__dict__", {})}.values()


def _some(values: Iterable[Any], size: int) -> Iterator[Any]:
    """Yield a container's entries, of a long one those at both ends."""
    for place, value in enumerate(islice(values, size)):
        if min(place, size - 1 - place) < _MOST:
            yield value


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return what a function has from where it was made, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not made yet
            found[name] = cell.cell_contents
    return found
