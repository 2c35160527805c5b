"""Whether a recipe still is the one that a run was trained with.

A run keeps a copy of its recipe's file, and of a recipe made in Python what its functions and
values were. Whoever goes on with the run or asks its checkpoints compares them with the recipe of
today: its code, without comments and layout.
"""

import ast
import dis
import hashlib
import json
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch

from samestep.errors import UserError, listed
from samestep.option_calls import without_options
from samestep.recipe import Recipe, find_recipe
from samestep.run.files import read_object, write_text
from samestep.training.hidden_state import closure_of

RECIPE_COPY = "recipe.py"
"""A user's recipe file as it was when the run began, in the run's directory."""
FROM_PYTHON = "python:"
"""Begins the source of a recipe that was handed over as an object: no file has it."""
_PIECES = "recipe.json"
"""What the functions and values of such a recipe were."""
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# Settings are compared as such; what predicts, shows and draws trains nothing.
_NOT_OF_THE_TRAINING = frozenset(
    {
        *("settings", "name", "file", "accepts"),
        *("read", "show", "picture", "pictures", "baselines"),
    }
)
_SHOWN = 40
_DEPTH = 8
_MAIN = "`if __name__ == '__main__':`"
_RECORD = 2
"""The form of the pieces; the first one had no number, and the modules in its names."""
_PLAIN = (bool, int, float, str, type(None), torch.Tensor)
_MOST = 10_000
_CHANGING = frozenset(
    {
        *("append", "extend", "insert", "add", "update", "setdefault", "appendleft"),
        *("pop", "popitem", "remove", "discard", "clear", "sort", "reverse"),
    }
)
"""Methods that change what they are called on, beside those of tensors that end in _."""

Pieces = dict[str, str]
"""The name of each function and value → its code, or `name = value`."""


def recipe_changes(run: Path, source: str, recipe: Recipe | None = None) -> list[str]:
    """Return which functions and values of a run's recipe are not what they were.

    Args:
        run: the run's directory.
        source: the recipe as the run names it.
        recipe: instead of what the source leads to.
    """
    kept = run / RECIPE_COPY
    if source.endswith(".py"):
        if not kept.is_file():
            return []
        if recipe is not None and not recipe.file:
            return [f"it was made in Python, and the run's is the file {source}"]
        file = Path(recipe.file if recipe is not None else source)
        return _differences(_imported(kept), _imported(file)) if file.is_file() else []
    made = recipe is not None and source.startswith(FROM_PYTHON)
    before = read_object(run / _PIECES) if made else {}
    if recipe is None or before.get("python") != _PYTHON:  # another version has other byte code
        return []
    then, now = before["pieces"], _Walk().pieces_of(recipe)
    if before.get("record") != _RECORD:
        shared = then.keys() & now.keys() - {"metrics"}
        then, now = ({name: _as_first_told(of[name]) for name in shared} for of in (then, now))
    return _differences(then, now)


def check_recipe_unchanged(run: Path, source: str) -> None:
    """Check that the recipe that a run names is the one that it was trained with.

    Raises:
        UserError: it is not.
    """
    if changes := recipe_changes(run, source):
        raise UserError(
            f"{source} has changed since {run} began: {listed(changes, 5)}. Use the "
            f"recipe as it was: --recipe {run / RECIPE_COPY}; or as it is now: "
            f"--recipe {source}"
        )


def accepted_changes(
    run: Path | None, source: str, recipe: Recipe, allowed: Sequence[str]
) -> tuple[str, ...]:
    """Return what differs in the recipe of a run that goes on.

    Raises:
        UserError: something does, and --allow-change does not name the recipe.
    """
    changes = recipe_changes(run, source, recipe) if run is not None else []
    if changes and "recipe" not in allowed:
        is_file = source.endswith(".py")
        kept = "go on with the run's own copy: --recipe-of-run; " if is_file else ""
        raise UserError(
            f"{source if is_file else 'The recipe'} has changed since {run} began: "
            f"{listed(changes, 5)}. When the run goes on this would make it another training: "
            f"{kept}start a new run without --resume; or insist with --allow-change recipe."
        )
    return tuple(changes)


def copy_of_run(run: Path, source: str) -> Recipe | None:
    """Return the recipe as the run's own copy has it; None where it keeps none."""
    kept = run / RECIPE_COPY
    return find_recipe(str(kept), source) if kept.is_file() else None


def keep_recipe(run: Path, source: str, recipe: Recipe, *, changed: bool) -> None:
    """Write into a run what its recipe is; what it was before stays beside it."""
    if source.endswith(".py"):
        kept, text = run / RECIPE_COPY, Path(recipe.file).read_text(encoding="utf-8")
    elif source.startswith(FROM_PYTHON):
        kept, pieces = run / _PIECES, _Walk().pieces_of(recipe)
        table = {"record": _RECORD, "python": _PYTHON, "pieces": pieces}
        text = json.dumps(table, indent=2) + "\n"
    else:
        return
    if kept.exists():
        if not changed:
            return
        number = sum(1 for _ in run.glob(f"{kept.stem}_before_*{kept.suffix}")) + 1
        kept.rename(kept.with_stem(f"{kept.stem}_before_{number}"))
    write_text(kept, text)


def script_changes(kept: Path, script: Path) -> list[str]:
    """Return which functions and values of a script are not what they were."""
    there = kept.is_file() and script.is_file()
    return _differences(_in_file(kept), _in_file(script)) if there else []


def _as_first_told(text: str) -> str:
    """Return a piece as far as records of the first form can be compared."""
    names = re.sub(r"(?:[\w<>]+\.)+(?=[A-Za-z_<])", "", text)
    return re.sub(r"tensor \([\d, ]*\)[\w. #]*", "tensor", names)


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    found = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        start = f"{name} = "
        values = [text.removeprefix(start) for text in (old, new) if text and text[:1] != "#"]
        short = len(values) == 2 and all(len(v) <= _SHOWN and not {*v} & {*"\n#"} for v in values)
        if old is None or new is None:
            found.append(f"{name} ({'new' if old is None else 'gone'})")
        elif short and old.startswith(start):
            found.append(f"{name} (was {values[0]}, is {values[1]})")
        else:
            found.append(name)
    return found


def _imported(file: Path) -> Pieces:
    """Return what a recipe's file defines: it is imported, and no script's main block runs."""
    pieces = _in_file(file)
    if (main := pieces.get(_MAIN)) and "\nelse:" not in main and "\nelif " not in main:
        del pieces[_MAIN]
    return pieces


def _in_file(file: Path) -> Pieces:
    """Return what a Python file defines; a name that is given twice has both."""
    text = file.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return {"the file": text}
    pieces: Pieces = {}
    words = [word for node in ast.walk(tree) if _is_recipe(node) for word in node.keywords]
    unused = [word.value for word in words if word.arg in _NOT_OF_THE_TRAINING]
    left_out = {f"{one.id}()" for one in unused if isinstance(one, ast.Name)}
    for name, node in _statements(tree, ""):
        if name in left_out:
            continue
        pieces[name] = "\n".join(filter(None, (pieces.get(name), ast.unparse(_bare(node)))))
    return pieces


def _statements(tree: ast.Module | ast.ClassDef, within: str) -> Iterator[tuple[str, ast.stmt]]:
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant()):
                pass  # a docstring
            case ast.ClassDef():
                yield from _statements(node, f"{within}{node.name}.")
                yield f"class {within}{node.name}", ast.ClassDef(**{**vars(node), "body": []})
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield f"{within}{name}()", node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield f"{within}{name}", node
            case _:
                first = ast.unparse(node).splitlines()[0]
                yield f"`{first[:_SHOWN]}`", node


def _bare(node: ast.stmt) -> ast.stmt:
    """Return a statement without docstrings, and a recipe without what trains nothing."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
        if _is_recipe(inner):
            inner.keywords = [w for w in inner.keywords if w.arg not in _NOT_OF_THE_TRAINING]
    return node


def _is_recipe(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Recipe"


@dataclass
class _Walk:
    """Follows a recipe made in Python to the functions and values that are the user's own."""

    pieces: Pieces = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    moving: set[str] = field(default_factory=set)
    """Names that the user's functions change themselves, as a cache or a counter."""

    def pieces_of(self, recipe: Recipe) -> Pieces:
        for one in fields(recipe):
            if one.name not in _NOT_OF_THE_TRAINING:
                # A metric counts what it has seen: only its class is told, and the code.
                depth = _DEPTH - 1 if one.name == "metrics" else 0
                self._add(one.name, f"{one.name} = {self._told(getattr(recipe, one.name), depth)}")
        own = {one.name for one in fields(recipe)}
        return {n: text for n, text in self.pieces.items() if n in own or n not in self.moving}

    def _add(self, name: str, text: str) -> None:
        before = self.pieces.get(name)  # two lambdas have the same name
        self.pieces[name] = text if before is None else _hash(before, text)

    def _told(self, value: Any, depth: int = 0) -> str:
        """Return a value as text that is the same in each process."""
        try:
            return self._text(without_options(value), depth)
        except Exception:  # an object that cannot be read ends no training
            return type(value).__qualname__

    def _text(self, value: Any, depth: int) -> str:  # noqa: C901, PLR0911 - a case a kind
        told = self._told
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case list() | tuple() if depth < _DEPTH:
                return f"[{', '.join(told(one, depth + 1) for one in value)}]"
            case set() | frozenset() if depth < _DEPTH:
                return f"{{{', '.join(sorted(told(one, depth + 1) for one in value))}}}"
            case Mapping() if depth < _DEPTH:
                parts = (f"{told(k, depth + 1)}: {told(v, depth + 1)}" for k, v in value.items())
                return f"{{{', '.join(parts)}}}"
            case partial():
                parts = (told(one, depth) for one in (value.func, value.args, value.keywords))
                return f"partial([{', '.join(parts)}])"
            case types.FunctionType() | type():
                return self._code(value)
            case types.MethodType():
                return f"{told(value.__func__, depth)} of {told(value.__self__, depth)}"
            case torch.Tensor() | np.ndarray():
                kind = "tensor" if isinstance(value, torch.Tensor) else "array"
                return f"{kind} {tuple(value.shape)} {value.dtype} #{_content(value)}"
            case types.CodeType():  # what is computed; neither lines nor a docstring
                names = value.co_names + value.co_varnames
                return f"{value.co_code.hex()} {told(_constants(value), depth)} {names}"
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
        kept = {
            name: one
            for name, one in getattr(value, "__dict__", {}).items()
            if isinstance(one, _PLAIN[:-1]) and name[0] != "_" and name != "training"
        }
        buffers = dict(value.named_buffers()) if isinstance(value, torch.nn.Module) else {}
        return f"{kind}({self._told({**kept, **buffers}, depth + 1)})"

    def _code(self, value: Any) -> str:
        """Return the name of a function or class; what the user's own say becomes a piece."""
        is_own = _is_own(
            value.__module__
        )  # a script is __main__ or has its name: that says nothing
        name = value.__qualname__ if is_own else f"{value.__module__}.{value.__qualname__}"
        if id(value) in self.seen or not is_own:
            return name
        self.seen.add(id(value))
        short = value.__qualname__.replace("<locals>.", "")
        if isinstance(value, types.FunctionType):
            self._add(f"{short}()", f"# {_hash(self._function(value))}")
            return name
        for key, one in vars(value).items():
            inner = getattr(one, "__func__", getattr(one, "fget", one))
            if isinstance(inner, types.FunctionType):
                self._add(f"{short}.{key}()", f"# {_hash(self._function(inner))}")
            elif not key.startswith("__"):
                self._add(f"{short}.{key}", f"{short}.{key} = {self._told(one, _DEPTH - 2)}")
        if not is_dataclass(value):
            self._add(f"class {short}", f"# {[self._told(base) for base in value.__bases__]}")
        return name

    def _function(self, function: types.FunctionType) -> str:
        code = function.__code__
        self.moving |= _changed_by(code)
        with_defaults = [function.__defaults__, function.__kwdefaults__]
        for name, one in closure_of(function).items():
            self._name(name, one)
        for name in _names(code):
            if name in function.__globals__:
                self._name(name, function.__globals__[name])
        return f"{self._told(code)} {self._told(with_defaults)}"

    def _name(self, name: str, value: Any) -> None:
        """Follow what a function uses by a name: functions, classes, and values that stay."""
        if name[:2] == "__" or name in self.pieces:
            return
        if isinstance(value, (*_PLAIN, np.ndarray, tuple, partial, types.FunctionType, type)):
            self._add(name, f"{name} = {self._told(value)}")
        elif isinstance(value, dict | list | set) and value and _is_plain(value):
            self._add(name, f"# {_hash(self._told(value))}")


def _names(code: types.CodeType) -> list[str]:
    """Return the names of what code takes from its module."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    used = [
        i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    return sorted({*used, *(name for one in inner for name in _names(one))})


def _changed_by(code: types.CodeType) -> set[str]:
    """Return the names of a module, or of an outer function, of which code changes the values."""
    steps, found = list(dis.get_instructions(code)), set()
    loaded = {}  # where an expression begins → the name that it begins with
    for step in steps:
        at = step.positions and (step.positions.lineno, step.positions.col_offset)
        match step.opname:
            case "LOAD_GLOBAL" | "LOAD_DEREF":
                loaded[at] = step.argval
            case "STORE_GLOBAL":
                found.add(step.argval)
            case "STORE_DEREF" if step.argval in code.co_freevars:
                found.add(step.argval)
            case "STORE_SUBSCR" | "DELETE_SUBSCR" if at in loaded:
                found.add(loaded[at])
            case "STORE_ATTR" if at in loaded:
                found |= {loaded[at], f"{loaded[at]}.{step.argval}"}
            case "LOAD_ATTR" | "LOAD_METHOD" if at in loaded:
                if step.argval in _CHANGING or step.argval.endswith("_"):
                    found.add(loaded[at])
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return found.union(*map(_changed_by, inner))


def _is_plain(value: Any) -> bool:
    """Whether a container holds what is written in code, and not what a cache would."""
    leaves = [value]
    for one in leaves:  # which grows
        if isinstance(one, dict):
            leaves += [*one, *one.values()]
        elif isinstance(one, list | tuple | set):
            leaves += one
        elif not isinstance(one, (*_PLAIN[:-1], types.FunctionType, type)):
            return False
        if len(leaves) > _MOST:
            return False
    return True


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """Return the constants of code, without its docstring."""
    found = code.co_consts
    may_have = sys.version_info < (3, 13) or code.co_flags & 0x4000000  # CO_HAS_DOCSTRING
    is_doc = may_have and code.co_name[0] != "<" and found and isinstance(found[0], str)
    return found[1:] if is_doc else found


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
