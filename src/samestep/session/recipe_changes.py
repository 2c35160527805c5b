"""Whether a recipe still is the one that a run was trained with.

A run keeps a copy of its recipe's file, and of a recipe made in Python what its functions and
values were. They are compared with the recipe of today, without comments and layout, when the run
is resumed or a checkpoint is used.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeGuard

from samestep.errors import UserError, listed
from samestep.recipe import Recipe, find_recipe
from samestep.run.files import read_object, write_text
from samestep.session.recipe_pieces import NOT_OF_THE_TRAINING, Pieces, pieces_of

RECIPE_COPY = "recipe.py"
"""A user's recipe file as it was when the run began, in the run's directory."""
FROM_PYTHON = "python:"
"""Begins the source of a recipe that was handed over as an object: no file has it."""
_PIECES = "recipe.json"
"""What the functions and values of such a recipe were."""
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_SHOWN = 40
_MAIN = "`if __name__ == '__main__':`"
_RECORD = 2
"""The form of the pieces; the first one had no number, and the modules in its names."""


def recipe_changes(run: Path, source: str, recipe: Recipe | None = None) -> list[str]:
    """Return which functions and values of a run's recipe are not what they were.

    The run names the recipe `source`; `recipe` takes the place of what that leads to.
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
    then, now = before["pieces"], pieces_of(recipe)
    # A field that the run's version did not have yet is not a change where it has its default.
    left = {one.name for one in fields(recipe) if getattr(recipe, one.name) is one.default}
    now = {name: text for name, text in now.items() if name in then or name not in left}
    if before.get("record") != _RECORD:
        shared = then.keys() & now.keys() - {"metrics"}
        then, now = ({name: _in_first_form(of[name]) for name in shared} for of in (then, now))
    return _differences(then, now)


def check_recipe_unchanged(run: Path, source: str) -> None:
    """Check that the recipe that a run names is the one that it was trained with."""
    if changes := recipe_changes(run, source):
        raise UserError(
            f"{source} has changed since {run} began: {listed(changes, 5)}. Use the "
            f"recipe as it was: --recipe {run / RECIPE_COPY}; or as it is now: "
            f"--recipe {source}"
        )


def accepted_changes(
    run: Path | None, source: str, recipe: Recipe, allowed: Sequence[str]
) -> tuple[str, ...]:
    """Return what differs in the recipe of a resumed run, as far as it is allowed."""
    changes = recipe_changes(run, source, recipe) if run is not None else []
    if changes and "recipe" not in allowed:
        is_file = source.endswith(".py")
        kept = "continue with the run's own copy: --recipe-of-run; " if is_file else ""
        raise UserError(
            f"{recipe.file if is_file else 'The recipe'} is not the recipe that {run} began with: "
            f"{listed(changes, 5)}. Resuming with it would make it another training: "
            f"{kept}start a new run without --resume; or insist with --allow-change recipe."
        )
    return tuple(changes)


def copy_of_run(run: Path, source: str) -> Recipe | None:
    """Return the recipe as the run's own copy has it; None where it keeps none."""
    kept = run / RECIPE_COPY
    return find_recipe(str(kept), source) if kept.is_file() else None


def keep_recipe(
    run: Path, source: str, recipe: Recipe, pieces: Pieces | None = None, *, changed: bool
) -> None:
    """Write the recipe into the run's directory; the copy of an earlier attempt is kept, too.

    `pieces` describe a recipe made in Python. Take them before its functions run and fill caches.
    """
    if source.endswith(".py"):
        kept, text = run / RECIPE_COPY, Path(recipe.file).read_text(encoding="utf-8")
    elif source.startswith(FROM_PYTHON):
        kept, pieces = run / _PIECES, pieces or pieces_of(recipe)
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


def _in_first_form(text: str) -> str:
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
    unused = [word.value for word in words if word.arg in NOT_OF_THE_TRAINING]
    left_out = {f"{one.id}()" for one in unused if isinstance(one, ast.Name)}
    for name, node in _statements(tree, ""):
        if name in left_out:
            continue
        for inner in ast.walk(node):  # leave out docstrings, and what trains nothing
            if isinstance(inner, ast.FunctionDef) and ast.get_docstring(inner) is not None:
                inner.body = inner.body[1:] or [ast.Pass()]
            if _is_recipe(inner):
                inner.keywords = [w for w in inner.keywords if w.arg not in NOT_OF_THE_TRAINING]
        pieces[name] = "\n".join(filter(None, (pieces.get(name), ast.unparse(node))))
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


def _is_recipe(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "Recipe"
