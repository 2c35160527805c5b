"""What a script keeps in variables from epoch to epoch: no checkpoint holds it.

A variable counts if the body of the loop over the epochs reads it before it writes it, in the order
of the text, and its value changes; so does an attribute that an object's own methods change so.
"""

import ast
import contextlib
import hashlib
import inspect
import linecache
import sys
import textwrap
import time
from collections.abc import Collection, Iterable
from functools import cache
from itertools import chain
from typing import Any

import torch

from samestep.base.errors import is_users, listed, users_frame
from samestep.base.trees import tree_leaves
from samestep.core.learner.side_effects import content
from samestep.core.loops.kept_state import Stateful

_CLOCKS = time.time, time.perf_counter, time.monotonic
_MOST_BYTES = 16 << 20
"""Of a tensor that is looked at in each epoch."""
_PLAIN = bool | int | float | str | None
_APART = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Forgotten:
    """Looks at the variables of a script before each of its epochs."""

    def __init__(self, values: dict[str, Any], state: Collection[Any]) -> None:
        # What is in `run.state`, in `state`, or in an object of the script's there is kept.
        own = (dict(_of(part)).values() for part in state if not isinstance(part, torch.nn.Module))
        parts = [part for part in chain(state, *own) if not isinstance(part, _PLAIN)]
        self._kept, self._values = {id(values), *map(id, parts)}, values
        self._before, self._told = dict[str, Any](), set[str]()
        self._began = [clock() for clock in _CLOCKS]

    def look(self) -> str:
        """Return a note of what has changed since the last look, or nothing."""
        before, self._before = self._before, {}
        with contextlib.suppress(Exception):  # no text to read, or an object that cannot be asked
            self._before = self._prints()
        pairs = [(n, *before[n], *now) for n, now in self._before.items() if n in before]
        # Another object of the same name was made in the epoch, and clocks always change.
        both = [(n, then, now) for n, of, then, same, now in pairs if of == same and then and now]
        names = {name for name, then, now in both if then != now}
        self._told |= names
        told = listed(sorted(n for n in names if "time" not in n), 4)
        return told and (
            f"note: {told} changed during an epoch, and no checkpoint holds that: a resumed run "
            "starts from the initial value. Keep numbers in run.state, as run.state['best'] = …, "
            "tensors in a module's buffers, and anything else in an object with state_dict and "
            "load_state_dict in state=…."
        )

    def _prints(self) -> dict[str, tuple[int, Any]]:
        """Return for each name the object that holds its value, and what that is compared by."""
        frame = users_frame(sys._getframe())  # noqa: SLF001
        if frame is None:
            return {}
        holders = frame.f_locals | {f"self.{n}": v for n, v in _of(frame.f_locals.get("self"))}
        names = {f"{n}.{of}" for n, h in holders.items() for of in _carried_by(h.__class__)}
        names |= _carried_at(frame.f_code.co_filename, frame.f_lineno)
        variables = frame.f_globals | frame.f_locals
        return {name: self._print(variables, *name.split(".")) for name in names - self._told}

    def _print(self, variables: dict[str, Any], first: str, *parts: str) -> tuple[int, Any]:
        holder, value = 0, variables.get(first)
        for part in parts:
            holder, value = id(value), None if self._is_kept(value) else dict(_of(value)).get(part)
        leaves = [] if self._is_kept(value) else tree_leaves(value)
        leaves = [v for v in leaves if getattr(v, "nbytes", 0) <= _MOST_BYTES]
        return holder, [repr(v) if isinstance(v, _PLAIN) else _digest(v) for v in leaves]

    def _is_kept(self, value: Any) -> bool:
        """Whether checkpoints hold a value, or it is the time."""
        spans = zip(self._began, _CLOCKS, strict=True)
        is_time = isinstance(value, float) and any(t <= value <= clock() for t, clock in spans)
        known = isinstance(value, _PLAIN) and value in self._values.values()
        return is_time or known or id(value) in self._kept or isinstance(value, Stateful)


def _digest(value: Any) -> bytes:
    return hashlib.sha256(content(value) or b"").digest()


def _of(holder: Any) -> Iterable[tuple[str, Any]]:
    is_own = hasattr(holder, "__dict__") and not type(holder).__module__.startswith("samestep.")
    return vars(holder).items() if is_own and not isinstance(holder, type) else ()


@cache
def _carried_at(file: str, line: int) -> set[str]:
    """Return what the loop at this line carries from epoch to epoch."""
    nodes = ast.walk(ast.parse("".join(linecache.getlines(file))))
    at = [n for n in nodes if type(n) is ast.For and n.lineno <= line < n.body[0].lineno]
    own = {*_uses([at[-1].target])} if at else set()  # the loop itself counts them
    return {n for n, uses in _uses(at[-1].body).items() if "rw" in uses} - own if at else set()


@cache
def _carried_by(kind: type) -> set[str]:
    """Return the attributes that a class of the script's changes by itself, and never resets."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or not is_users(file):
        return set()
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    carried, reset = set[str](), set[str]()
    for method in getattr(node, "body", ()):
        if isinstance(method, ast.FunctionDef) and method.name != "__init__" and method.args.args:
            own = f"{method.args.args[0].arg}."
            sets = ast.Assign | ast.AnnAssign
            plain = _uses(part for part in method.body if isinstance(part, sets))
            carried |= {n for n, uses in _uses(method.body).items() if "rw" in uses and own in n}
            reset |= {n for n, uses in plain.items() if uses[0] == "w"}
    return {name.partition(".")[2] for name in carried - reset}


def _uses(nodes: Iterable[Any], known: dict[str, str] | None = None) -> dict[str, str]:
    """Return "r", "w" or "rw" for names and their attributes: "rw" is read before it is written."""
    uses: dict[str, str] = {} if known is None else known
    for node in nodes:
        if isinstance(node, _APART) or hasattr(node, "decorator_list"):  # or a definition
            continue
        target = node.target if isinstance(node, ast.AugAssign) else node
        is_read = target is not node or isinstance(getattr(node, "ctx", None), ast.Load)
        if isinstance(target, ast.Subscript) and not (is_read and target is node):
            target = target.value  # `x[0] = 1` writes x
        if isinstance(target, ast.Name | ast.Attribute):
            name, use = ast.unparse(target), "r" if is_read else "w"
            before = uses.get(name, "")
            uses[name] = before + use if before in ("", "r") and before != use else before
        # A value is there before what it is assigned to.
        parts = sorted(ast.iter_fields(node), key=lambda part: part[0] not in ("value", "iter"))
        for _, part in parts:
            inside = part if isinstance(part, list) else [part]
            _uses([n for n in inside if isinstance(n, ast.AST)], uses)
    return uses
