"""What a Python file of the user is, without running it: a recipe, a loop of its own, a script."""

import ast
import os
import re
from pathlib import Path

from samestep.base.errors import UserError
from samestep.base.nearby import nearby

_MADE_BY = ("Trainer", "LightningCLI")
_OF_TRAINERS = {
    "huggingface": (re.compile(r"(sentence_)?transformers|trl"), ("Trainer", "*")),
    "lightning": (re.compile(r"(pytorch_)?lightning"), (*_MADE_BY, "*")),
}
"""The packages of each kind of Trainer, and the ends of names that are one or make one."""
_ENDS = (".py", "/__init__.py")
_TRAINS = {"huggingface": {"train", "hyperparameter_search"}, "lightning": {"fit", "LightningCLI"}}
_OF_MODELS = re.compile(r"(model|net(work)?|module|coder|nator)$", re.IGNORECASE)
"""The ends of names whose `train()` only sets a mode."""


def names_recipe(tree: ast.Module) -> bool:
    """Whether a file ends up with a `recipe`, assigned or imported at its top level."""
    names: list[str | None] = []
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=imported):
                names += [alias.asname or alias.name for alias in imported]
            case ast.Assign(targets=targets):
                names += [getattr(target, "id", None) for target in targets]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return "recipe" in names


def is_recipe_file(path: Path) -> bool:
    """Whether a Python file defines `recipe`; any other is a script."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except OSError as error:
        where = nearby(path, "file")
        raise UserError(f"{path} cannot be read: {error.strerror}.{where}") from error
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UserError(f"{path}:{line}: {getattr(error, 'msg', error)}.") from error
    return names_recipe(tree)


def opens_run(source: bytes) -> int | None:
    """Return the line in which a file without a recipe calls `open_run`, if it does so."""
    if b"open_run" not in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # running it says more
        return None
    if names_recipe(tree):
        return None
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    names = ((getattr(c.func, "attr", getattr(c.func, "id", "")), c.lineno) for c in calls)
    return next((line for name, line in names if name == "open_run"), None)


def cannot_have_recipe(source: bytes) -> bool:
    """Whether a file surely has no recipe, which is found without running it."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):  # running it says more
        return False
    return re.search(rb"\brecipe\b|import\s*\*", source) is None


def _binds_recipe(node: ast.AST) -> bool:
    """Whether a node, wherever it stands, gives something the name `recipe`."""
    match node:
        case ast.alias(name=name, asname=other):
            return (other or name) == "recipe"
        case ast.Name(id=name, ctx=ast.Store()):
            return name == "recipe"
    return False


def trainer_of(path: Path, folder: Path) -> str:
    """Return "huggingface" or "lightning" for a script without a recipe that trains by a Trainer.

    It may do so in modules of its own, from its `folder`; "" for any other.
    """
    takes, trains = set[tuple[str, str]](), set[str]()  # kinds, by what the file calls a Trainer
    used = {"*"}
    waiting = [path]
    read = set[Path]()
    while waiting:
        read.add(file := waiting.pop())
        try:
            nodes = [*ast.walk(ast.parse(file.read_bytes()))]
        except (OSError, SyntaxError, ValueError):  # running it says more
            continue
        if file == path and any(_binds_recipe(node) for node in nodes):
            return ""
        modules: list[tuple[Path, str]] = []  # and the folders that they are in
        packages: dict[str, str] = {}  # by the name that the file gives it
        for node in nodes:
            match node:
                case ast.Import(names=names):
                    modules += [(folder, alias.name) for alias in names]
                    packages |= {alias.asname or alias.name: alias.name for alias in names}
                case ast.ImportFrom(module=module, names=names, level=level):
                    module, at = module or "", [folder, *file.resolve().parents][: level + 1][-1]
                    named = (module, *(f"{module}.{alias.name}".strip(".") for alias in names))
                    modules += [(at, name) for name in named if name]
                    packages |= {alias.asname or alias.name: module for alias in names}
                    own = ((a.asname or a.name, _kinds(module, a.name)) for a in names)
                    takes |= {(kind, name) for name, kinds in own for kind in kinds}
                case ast.Attribute(value=package, attr=name) if name.endswith(_MADE_BY):
                    text = ast.unparse(package)
                    known = packages.get(text) or packages.get(text.partition(".")[0], "")
                    takes |= {(kind, "*") for kind in _kinds(known, name)}
                case ast.Name(id=name):  # called, or a class's base
                    used |= {name}
                case ast.Call(func=ast.Attribute(value=of, attr=name)):
                    owner = getattr(of, "attr", getattr(of, "id", ""))
                    # What is called of a model only sets its mode.
                    trains |= set() if _OF_MODELS.search(owner) else {name}
        files = {at / f"{n.replace('.', '/')}{end}" for at, n in modules for end in _ENDS}
        waiting += [own for own in files - read if own.is_file()]
    taken, trains = {kind for kind, name in takes if name in used}, trains | used & {"LightningCLI"}
    return next((kind for kind in _OF_TRAINERS if kind in taken and _TRAINS[kind] & trains), "")


def _kinds(package: str, name: str) -> set[str]:
    """Return of which kind the Trainer is that a name of a package is, if it is one."""
    kinds = _OF_TRAINERS.items()
    return {kind for kind, (of, ends) in kinds if of.match(package) and name.endswith(ends)}


def loop_of(target: str | os.PathLike[str]) -> Path | None:
    """Return the script that a target names, if it has a loop of its own."""
    path = Path(target)
    is_script = path.suffix == ".py" and path.is_file()
    return path if is_script and opens_run(path.read_bytes()) else None
