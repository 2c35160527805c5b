"""What one Python file says, without running it: what each statement defines, uses and imports."""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import decode_source
from pathlib import Path
from typing import TypeGuard

Parts = tuple[str, ...]
"""A dotted name: ("mylib", "models", "Net")."""

NOT_OF_THE_TRAINING = frozenset(
    {
        *("settings", "name", "file", "accepts", "read", "show", "plot", "picture", "pictures"),
        "baselines",
    }
)
"""Fields of a recipe: settings are compared as such; what predicts and draws trains nothing."""
_SHOWN = 40
_MAY_IMPORT = re.compile(
    r"(?:^|[:;])[ \t]*((?:from[ \t]+[\w.]+[ \t]+)?import\b(?:[^\n(\\]*\([^)]*\)|(?:[^\n\\]|\\\n)*))"
    r"|((?:import_module|__import__)\(\s*(?:'[\w.]+'|\"[\w.]+\"))",
    re.MULTILINE,
)
"""Import statements in a text, wherever they stand, and calls that import."""
_SAYS = frozenset({"print", "warnings", "logging"})
"""Calls of these change no training."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)


def imported_by(file: Path, name: str = "") -> frozenset[str]:
    """Return the names of all modules that a file may import, wherever in it."""
    return _all_imports(_read(file), _package(file, name))


def source_of(file: Path, name: str = "") -> "ModuleText":
    """Return the parsed text of a module's file."""
    return _parsed(_read(file), _package(file, name))


@dataclass(frozen=True)
class Statement:
    """A statement at the top level of a file."""

    names: frozenset[str]
    """Names that it binds, or whose objects it changes."""
    acts: bool
    """Whether it does more than that when the file is imported."""
    pieces: tuple[tuple[str, str], ...]
    uses: frozenset[Parts] = frozenset()
    """Names of the file, with their attributes."""
    inner_uses: frozenset[Parts] = frozenset()
    """The same of what its functions import themselves: names from the top-level module on."""
    imports: frozenset[str] = frozenset()
    """Modules that it imports, or its functions."""
    decorators: frozenset[Parts] = frozenset()
    bases: frozenset[str] = frozenset()
    hooks: bool = False
    """Whether it is a class that acts on its subclasses: `__init_subclass__`, or a metaclass."""


@dataclass(frozen=True)
class ModuleText:
    """What a file says."""

    statements: tuple[Statement, ...]
    bound: Mapping[str, Parts]
    """Names that an import binds → what it stands for."""
    stars: tuple[str, ...]
    """Modules whose names are imported all."""
    imports: frozenset[str]
    """Modules that importing the file may import."""

    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Names that the file itself defines → the statements that do it, or change them."""
    unused: frozenset[str] = frozenset()
    """Functions that a recipe here names for what trains nothing."""


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError:  # importing it says so
        return ""
    try:
        return decode_source(content)
    except (SyntaxError, UnicodeDecodeError):
        return content.decode("latin-1")


def _package(file: Path, name: str) -> str:
    """Return the package that a module's relative imports begin at."""
    return name if file.name == "__init__.py" else name.rpartition(".")[0]


@lru_cache(maxsize=2000)
def _all_imports(text: str, package: str) -> frozenset[str]:
    """Return the modules that a file may import; a start of a training waits for it."""
    imported = set[str]()
    for match in _MAY_IMPORT.finditer(text):
        with suppress(SyntaxError, ValueError):  # words in a docstring
            nodes = ast.walk(ast.parse(match[1] or f"{match[2]})"))
            imported |= {name for node in nodes for name in _imports(node, package)}
    return frozenset(imported)


@lru_cache(maxsize=2000)
def _parsed(text: str, package: str) -> ModuleText:
    """Parse a file's text; text that cannot be parsed is one piece."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        whole = Statement(frozenset(), acts=True, pieces=(("the file", text),))
        return ModuleText((whole,), {}, (), frozenset())
    # `if TYPE_CHECKING:` does not run.
    ifs = {n for n in tree.body if isinstance(n, ast.If) and not n.orelse}
    for_types = {n for n in ifs if ast.unparse(n.test).split(".")[-1] == "TYPE_CHECKING"}
    body = [node for node in tree.body if node not in for_types]
    outer = [node for top in body for node in _outside_functions(top)]
    bound, stars = dict[str, Parts](), list[str]()
    for node in outer:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            stars.append(".".join(_from(node, package)))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= _bindings(node, package)
    defined = frozenset(name for node in outer for name in _defined(node))
    everywhere = [node for top in body for node in ast.walk(top)]
    words = [word for node in everywhere if _is_recipe(node) for word in node.keywords]
    unused = [word.value for word in words if word.arg in NOT_OF_THE_TRAINING]
    statements = tuple(
        _statement(node, package, defined)
        for node in body
        if not isinstance(node, ast.Import | ast.ImportFrom)
    )
    places = dict[str, list[int]]()
    for place, statement in enumerate(statements):
        for name in statement.names:
            places.setdefault(name, []).append(place)
    return ModuleText(
        statements=statements,
        bound=bound,
        stars=tuple(stars),
        imports=frozenset(name for node in outer for name in _imports(node, package)),
        places={name: tuple(pieces) for name, pieces in places.items()},
        unused=frozenset(statement.id for statement in unused if isinstance(statement, ast.Name)),
    )


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is in it, but nothing inside of functions and classes."""
    yield node
    if not isinstance(node, _SCOPES):
        for inner in ast.iter_child_nodes(node):
            yield from _outside_functions(inner)


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
            yield name
        case ast.MatchStar(name=str(name)):
            yield name


def _from(node: ast.ImportFrom, package: str) -> Parts:
    """Return the module that names are imported from."""
    above = package.split(".") if package else []
    base = above[: len(above) - node.level + 1] if node.level else []
    return (*base, *(node.module.split(".") if node.module else ()))


def _bindings(node: ast.Import | ast.ImportFrom, package: str) -> dict[str, Parts]:
    """Return the names that an import binds, and what each stands for."""
    if isinstance(node, ast.ImportFrom):
        module = _from(node, package)
        return {alias.asname or alias.name: (*module, alias.name) for alias in node.names}
    parts = {alias: tuple(alias.name.split(".")) for alias in node.names}
    return {alias.asname or of[0]: of if alias.asname else of[:1] for alias, of in parts.items()}


def _imports(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the modules that a node may import; of `from a import b`, b may be one."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(names=names):
            module = ".".join(_from(node, package))
            yield from (module, *(f"{module}.{alias.name}" for alias in names if alias.name != "*"))
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            if (_chain(function) or ("",))[-1] in ("import_module", "__import__"):
                above = package.split(".") if package else []
                level = len(name) - len(name.lstrip("."))
                start = above[: len(above) - level + 1] if level else []
                yield ".".join([*start, name.lstrip(".")])


def _chain(node: ast.AST) -> Parts | None:
    """Return a name with its attributes as they are written: (a, b, c) for a.b.c."""
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=value, attr=attribute):
            before = _chain(value)
            return None if before is None else (*before, attribute)
    return None


def _root(node: ast.AST) -> str:
    """Return the name that an expression begins with; "" if it begins otherwise."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _statement(node: ast.stmt, package: str, defined: frozenset[str]) -> Statement:
    pieces = tuple((name, ast.unparse(_plain(part))) for name, part in _named(node, ""))
    names, acts = set[str](), False
    for inner in _outside_functions(node):
        match inner:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=ast.Call(func=called)) if _root(called) in _SAYS:
                pass
            case ast.Expr(value=ast.Call(func=ast.Attribute() as called)):
                names |= {root := _root(called)} & defined
                acts |= root not in defined
            case ast.Expr():
                acts = True
            case ast.Attribute(ctx=context) | ast.Subscript(ctx=context):
                if not isinstance(context, ast.Load):
                    names |= {root := _root(inner)} & defined
                    acts |= root not in defined
            case _:
                names |= {*_defined(inner)}
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    names |= {*_bindings(inner, package)}
    uses = {*_uses(node, {}, package)}
    bases, hooks = frozenset[str](), False
    if isinstance(node, ast.ClassDef):
        bases = frozenset(chain[-1] for base in node.bases if (chain := _chain(base)))
        hooks = any(getattr(part, "name", "") == "__init_subclass__" for part in node.body)
        hooks |= any(part.arg == "metaclass" for part in node.keywords)
    return Statement(
        names=frozenset(names),
        acts=acts or "_" in names,
        pieces=pieces,
        uses=frozenset(parts for own, parts in uses if not own),
        inner_uses=frozenset(parts for own, parts in uses if own),
        imports=frozenset(name for part in ast.walk(node) for name in _imports(part, package)),
        decorators=frozenset(
            chain
            for part in getattr(node, "decorator_list", ())
            if (chain := _chain(part.func if isinstance(part, ast.Call) else part))
        ),
        bases=bases,
        hooks=hooks,
    )


def _named(node: ast.stmt, within: str) -> Iterator[tuple[str, ast.stmt]]:
    """Yield a statement with a name for it; of a class its parts."""
    match node:
        case ast.Expr(value=ast.Constant()):
            pass  # a docstring
        case ast.ClassDef():
            for inner in node.body:
                yield from _named(inner, f"{within}{node.name}.")
            yield f"class {within}{node.name}", ast.ClassDef(**{**vars(node), "body": []})
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield f"{within}{name}()", node
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            yield f"{within}{name}", node
        case _:
            yield f"`{ast.unparse(node).splitlines()[0][:_SHOWN]}`", node


def _plain(node: ast.stmt) -> ast.stmt:
    """Return a statement without docstrings, and without what trains nothing."""
    for inner in ast.walk(node):
        if isinstance(inner, _FUNCTIONS) and ast.get_docstring(inner) is not None:
            inner.body = inner.body[1:] or [ast.Pass()]
        if _is_recipe(inner):
            inner.keywords = [w for w in inner.keywords if w.arg not in NOT_OF_THE_TRAINING]
    return node


def _is_recipe(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and (_chain(node.func) or ("",))[-1] == "Recipe"


def _uses(
    node: ast.AST, local: Mapping[str, Parts | None], package: str
) -> Iterator[tuple[bool, Parts]]:
    """Yield the names that code takes from its module, with attributes, or imports itself.

    `local` are the names of the functions around it, and what they stand for if imported.
    """
    if (chain := _chain(node)) is not None:
        if chain[0] not in local:
            yield False, chain
        elif (target := local[chain[0]]) is not None:
            yield True, (*target, *chain[1:])
        return
    if isinstance(node, ast.Call):  # what importlib returns may be used in any way
        yield from ((True, tuple(name.split("."))) for name in _imports(node, package))
    inside = local
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        inside = {**local, **_local_names(node, package)}
    for name, value in ast.iter_fields(node):
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, ast.AST):
                yield from _uses(inner, inside if name == "body" else local, package)


def _local_names(
    function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, package: str
) -> dict[str, Parts | None]:
    """Return the names of a function itself; those that it imports with what they stand for."""
    local: dict[str, Parts | None] = {}
    others = set[str]()
    arguments = [part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)]
    body = function.body if isinstance(function.body, list) else [function.body]
    for node in (inner for top in body for inner in _outside_functions(top)):
        local |= dict.fromkeys(_defined(node))
        if isinstance(node, ast.Import | ast.ImportFrom):
            local |= _bindings(node, package)
        elif isinstance(node, ast.Global):
            others |= {*node.names}
    local |= dict.fromkeys(arguments)
    return {name: target for name, target in local.items() if name not in others}
