"""What a recipe made in Python is: its functions and values that are the user's own, as text."""

import dis
import hashlib
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samestep.base.run.code_pieces import Pieces, named_pieces
from samestep.base.run.code_source import NOT_OF_THE_TRAINING, Parts
from samestep.base.run.user_modules import finder
from samestep.core.learner.side_effects import closure_of
from samestep.core.recipe import Recipe
from samestep.core.recipe_checks import without_options

_DEPTH = 8
_PLAIN = (bool, int, float, str, type(None), torch.Tensor)
_MOST = 10_000
_CHANGING = frozenset(
    {
        *("append", "extend", "insert", "add", "update", "setdefault", "appendleft"),
        *("pop", "popitem", "remove", "discard", "clear", "sort", "reverse"),
    }
)
"""Methods that change their object. So do methods of tensors whose name ends in _."""


def pieces_of(recipe: Recipe) -> Pieces:
    """Return the pieces of a recipe made in Python that affect training."""
    return _Walk().pieces_of(recipe)


@dataclass
class _Walk:
    """Follows a recipe made in Python to the functions and values that are the user's own."""

    pieces: Pieces = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    moving: set[str] = field(default_factory=set)
    """Names that the user's functions change themselves, as a cache or a counter."""
    imported: set[Parts] = field(default_factory=set)
    """What they take from modules, as dotted names."""

    def pieces_of(self, recipe: Recipe) -> Pieces:
        for f in fields(recipe):
            if f.name not in NOT_OF_THE_TRAINING:
                # A metric's attributes change with every batch: compare its class and code only.
                depth = _DEPTH - 1 if f.name == "metrics" else 0
                self._add(f.name, f"{f.name} = {self._repr(getattr(recipe, f.name), depth)}")
        moved = {name for name in self.pieces if name.partition("[")[0] in self.moving}
        moved -= {f.name for f in fields(recipe)}
        pieces = {name: text for name, text in self.pieces.items() if name not in moved}
        imported = named_pieces(self.imported, finder(None))
        return pieces | {name: f"# {_hash(text)}" for name, text in imported.items()}

    def _add(self, name: str, text: str) -> None:
        before = self.pieces.get(name)  # two lambdas have the same name
        self.pieces[name] = text if before is None else _hash(before, text)

    def _repr(self, value: Any, depth: int = 0) -> str:
        """Return a value as text that is the same in each process."""
        try:
            return self._text(without_options(value), depth)
        except Exception:  # an object that cannot be read ends no training
            return type(value).__qualname__

    def _text(self, value: Any, depth: int) -> str:  # noqa: C901, PLR0911 - a case a kind
        show = self._repr
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case list() | tuple() if depth < _DEPTH:
                return f"[{', '.join(show(part, depth + 1) for part in value)}]"
            case set() | frozenset() if depth < _DEPTH:
                return f"{{{', '.join(sorted(show(part, depth + 1) for part in value))}}}"
            case Mapping() if depth < _DEPTH:
                parts = (f"{show(k, depth + 1)}: {show(v, depth + 1)}" for k, v in value.items())
                return f"{{{', '.join(parts)}}}"
            case partial():
                parts = (show(part, depth) for part in (value.func, value.args, value.keywords))
                return f"partial([{', '.join(parts)}])"
            case types.FunctionType() | type():
                return self._code(value)
            case types.MethodType():
                return f"{show(value.__func__, depth)} of {show(value.__self__, depth)}"
            case torch.Tensor() | np.ndarray():
                kind = "tensor" if isinstance(value, torch.Tensor) else "array"
                return f"{kind} {tuple(value.shape)} {value.dtype} #{_content(value)}"
            case types.CodeType():  # what is computed; neither lines nor a docstring
                names = value.co_names + value.co_varnames
                return f"{value.co_code.hex()} {show(_constants(value), depth)} {names}"
            case torch.dtype() | torch.device() | Path():
                return str(value)
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> str:
        """Return an object's class and plain attributes: what a loss is made with is in them.

        Others, as the sums of a metric, may move with each use.
        """
        kind = self._code(type(value))
        if depth >= _DEPTH:
            return kind
        public = {k: v for k, v in getattr(value, "__dict__", {}).items() if k[0] != "_"}
        plain = {k: v for k, v in public.items() if isinstance(v, _PLAIN[:-1]) and k != "training"}
        buffers = dict(value.named_buffers()) if isinstance(value, torch.nn.Module) else {}
        return f"{kind}({self._repr({**plain, **buffers}, depth + 1)})"

    def _code(self, value: Any) -> str:
        """Return the name of a function or class; what the user's own say becomes a piece."""
        # The module of a script says nothing: it is __main__, or has the script's name.
        is_own = _is_own(value.__module__)
        name = value.__qualname__ if is_own else f"{value.__module__}.{value.__qualname__}"
        if id(value) in self.seen or not is_own:
            return name
        self.seen.add(id(value))
        short = value.__qualname__.replace("<locals>.", "")
        if isinstance(value, types.FunctionType):
            self._add(f"{short}()", f"# {_hash(self._function(value))}")
            return name
        for key, member in vars(value).items():
            inner = getattr(member, "__func__", getattr(member, "fget", member))
            if isinstance(inner, types.FunctionType):
                self._add(f"{short}.{key}()", f"# {_hash(self._function(inner))}")
            elif not key.startswith("__"):
                self._add(f"{short}.{key}", f"{short}.{key} = {self._repr(member, _DEPTH - 2)}")
        if not is_dataclass(value):
            self._add(f"class {short}", f"# {[self._repr(base) for base in value.__bases__]}")
        return name

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        self.moving |= _changed_by(code)
        self.imported |= _imported_by(function)
        with_defaults = [function.__defaults__, function.__kwdefaults__]
        for name, value in closure_of(function).items():
            self._name(name, value, _keys(code, name))
        for name in _names(code):
            if name in function.__globals__:
                self._name(name, function.__globals__[name], _keys(code, name))
        return f"{self._repr(code)} {self._repr(with_defaults)}"

    def _name(self, name: str, value: Any, keys: set[Any] | None = None) -> None:
        """Follow what a function uses by a name: functions, classes, and values that stay.

        Of a dict whose `keys` the function names, only these: others may set how long to train.
        """
        if keys and isinstance(value, dict):
            for key in sorted(keys & value.keys(), key=repr):
                self._name(f"{name}[{key!r}]", value[key])
            return
        if name[:2] == "__" or name in self.pieces:
            return
        if isinstance(value, (*_PLAIN, np.ndarray, tuple, partial, types.FunctionType, type)):
            self._add(name, f"{name} = {self._repr(value)}")
        elif isinstance(value, dict | list | set) and value and _is_plain(value):
            self._add(name, f"# {_hash(self._repr(value))}")


def _with_inner(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _with_inner(const)


def _names(code: types.CodeType) -> list[str]:
    """Return the names of what code takes from its module."""
    steps = (step for part in _with_inner(code) for step in dis.get_instructions(part))
    return sorted({s.argval for s in steps if s.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def _imported_by(function: types.FunctionType) -> set[Parts]:
    """Return the dotted names that a function uses of modules: `models.Net`, or its own imports."""
    package = function.__globals__.get("__package__") or ""
    known = {**function.__globals__, **closure_of(function)}
    modules = {name for name, value in known.items() if isinstance(value, types.ModuleType)}
    imported = set[Parts]()
    for value in _with_inner(function.__code__):
        steps = list(dis.get_instructions(value))
        for place, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME") and step.argval in modules:
                rest = itertools.takewhile(
                    lambda s: s.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[place + 1 :]
                )
                imported.add((*known[step.argval].__name__.split("."), *(s.argval for s in rest)))
            elif step.opname == "IMPORT_NAME":
                level, names = (before.argval for before in steps[place - 2 : place])
                above = package.split(".")[: len(package.split(".")) + 1 - level] if level else ()
                module = (*above, *filter(None, step.argval.split(".")))
                imported |= {(*module, name) for name in names} if names else {module}
    return imported


def _keys(code: types.CodeType, name: str) -> set[Any] | None:
    """Return the keys by which code reads the dict of this name; None if it has other uses."""
    keys = set[Any]()
    for part in _with_inner(code):
        steps = list(dis.get_instructions(part))
        for step, key, use in zip(steps, steps[1:], [*steps[2:], steps[-1]], strict=False):
            if step.argval == name and step.opname in ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
                if key.opname != "LOAD_CONST" or use.opname != "BINARY_SUBSCR":
                    return None
                keys.add(key.argval)
    return keys


def _changed_by(code: types.CodeType) -> set[str]:
    """Return the names of a module, or of an outer function, whose values code changes."""
    changed = set()
    for part in _with_inner(code):
        loaded = {}  # where an expression begins → the name that it begins with
        for step in dis.get_instructions(part):
            at = step.positions and (step.positions.lineno, step.positions.col_offset)
            match step.opname:
                case "LOAD_GLOBAL" | "LOAD_DEREF":
                    loaded[at] = step.argval
                case "STORE_GLOBAL":
                    changed.add(step.argval)
                case "STORE_DEREF" if step.argval in part.co_freevars:
                    changed.add(step.argval)
                case "STORE_SUBSCR" | "DELETE_SUBSCR" if at in loaded:
                    changed.add(loaded[at])
                case "STORE_ATTR" if at in loaded:
                    changed |= {loaded[at], f"{loaded[at]}.{step.argval}"}
                case "LOAD_ATTR" | "LOAD_METHOD" if at in loaded:
                    if step.argval in _CHANGING or step.argval.endswith("_"):
                        changed.add(loaded[at])
    return changed


def _is_plain(value: Any) -> bool:
    """Whether a container holds what is written in code, and not what a cache would."""
    leaves = [value]
    for leaf in leaves:  # which grows
        if isinstance(leaf, dict):
            leaves += [*leaf, *leaf.values()]
        elif isinstance(leaf, list | tuple | set):
            leaves += leaf
        elif not isinstance(leaf, (*_PLAIN[:-1], types.FunctionType, type)):
            return False
        if len(leaves) > _MOST:
            return False
    return True


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    constants = code.co_consts
    may_have = sys.version_info < (3, 13) or code.co_flags & 0x4000000  # CO_HAS_DOCSTRING
    is_doc = may_have and code.co_name[0] != "<" and constants and isinstance(constants[0], str)
    return constants[1:] if is_doc else constants


def _is_own(module: str | None) -> bool:
    """Whether code is the user's: of a script, a notebook or a file, not of a library."""
    top = (module or "").partition(".")[0]
    if top == "__main__":
        return True
    if top in sys.stdlib_module_names or top in ("samestep", "torch", ""):
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


def _content(value: torch.Tensor | np.ndarray[Any, Any]) -> str:
    """Return the hash of a tensor's or an array's bytes, or the layout of one that has none."""
    try:
        if isinstance(value, torch.Tensor):
            flat = value.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
            value = flat.view(torch.uint8).numpy()
        return _hash(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    except Exception:  # sparse, on the meta device, quantized, or of Python objects
        return str(getattr(value, "layout", ""))


def _hash(*parts: str | memoryview) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:16]
