"""See what a model's forward draws at random, and hold it still where that is asked for.

Three things differ with the number of ranks by themselves: batch normalisation in training, random
numbers of torch (dropout), and random numbers of Python and NumPy.
"""

import contextlib
import functools
import hashlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.data.trees import tree_leaves
from samestep.errors import is_users

Kind = Literal["batchnorm", "dropout", "state"]
KINDS: tuple[Kind, ...] = ("batchnorm", "dropout", "state")
ALL_KINDS = frozenset(KINDS)


@dataclass
class Seen:
    """What forward and loss drew from."""

    draws: dict[str, str] = field(default_factory=dict)
    """Random operation of torch → the user's line that called it, or nothing."""
    generators: set[str] = field(default_factory=set)
    """"Python's random", "NumPy's random"."""
    own: dict[str, list[str]] = field(default_factory=dict)
    """The user's line that drew from a `torch.Generator` of its own → where that stood, by call."""


def users_line(frame: FrameType | None) -> str:
    """Return the innermost line that is neither samestep's nor a library's: `model.py:31`."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return place_of(frame)
        frame = frame.f_back
    return ""


def place_of(frame: FrameType) -> str:
    """Return the line at which a frame stands: `model.py:31`."""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note every random operation, and give each a constant result if it is to be held still."""

    def __init__(self, seen: Seen, *, hold: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen, self._hold = seen, hold

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        known = func._schema.arguments  # noqa: SLF001
        given = {a.name: a.default_value for a in known if a.has_default_value()}
        given |= {a.name: v for a, v in zip(known, args, strict=False)} | kwargs
        name = func.overloadpacket.__name__
        if _draws_nothing(name, given):
            return func(*args, **kwargs)
        line = users_line(sys._getframe(1))  # noqa: SLF001
        self._seen.draws.setdefault(name, line)
        generator = given.get("generator")
        # Those of the devices are seeded by samestep in every step.
        if generator not in (None, torch.default_generator, *torch.cuda.default_generators):
            state = generator.get_state().numpy().tobytes()
            stood = hashlib.blake2b(state, digest_size=8).hexdigest()
            self._seen.own.setdefault(line, []).append(stood)
        return _constant(name, func, given) if self._hold else func(*args, **kwargs)


def _draws_nothing(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a random operation is told to change nothing, as by an evaluation."""
    if given.get("train") is False or given.get("training") is False:
        return True
    fraction = given.get("dropout_p", given.get("dropout"))
    return fraction == 0 or (name == "native_dropout" and given.get("p") == 0)


def _constant(name: str, func: Any, given: Mapping[str, Any]) -> Any:
    """Return what a random operation would, with every number the same."""
    if name == "native_dropout":
        kept: Tensor = given["input"]
        return kept / (1 - given["p"]), torch.ones_like(kept, dtype=torch.bool)
    for fraction in ("dropout_p", "dropout"):
        if fraction in given:
            return func(**{**given, fraction: 0.0})
    result = func(**given)
    if name.startswith("randperm"):
        return result.copy_(torch.arange(len(result), device=result.device))
    low = given.get("low", given.get("from", 0)) or 0
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            middle = 0.5 if leaf.is_floating_point() else low
            leaf.fill_(1 if name.startswith("bernoulli") else middle)
    return result


def watched(
    function: Callable[..., Any], seen: Seen, held: frozenset[Kind] = frozenset()
) -> Callable[..., Any]:
    """Return a forward or a loss that notes what it draws from, and holds some of it still."""

    @functools.wraps(function)  # with its arguments' names
    def call(*args: Any, **kwargs: Any) -> Any:
        with outside(seen, hold="state" in held), Draws(seen, hold="dropout" in held):
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def outside(seen: Seen, *, hold: bool) -> Iterator[None]:
    """Note whether Python's or NumPy's generator is used; held, both begin at the same place."""
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
        seen.generators |= {name for name, a, b in zip(names, before, after, strict=True) if a != b}
        if hold:
            random.setstate(saved[0])
            np.random.set_state(saved[1])  # noqa: NPY002


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch normalisations of a model by their names."""
    return {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm)}
