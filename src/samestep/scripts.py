"""What a Python file of the user's is, told by its text alone: a recipe, or a loop of its own.

It stands beside the rooms because a recipe's loader, `profile` and `slurm submit` all ask it.
"""

import ast


def names_recipe(tree: ast.Module) -> bool:
    """Whether a file ends up with a `recipe`, assigned or imported at its top level."""
    for node in tree.body:
        match node:
            case ast.ImportFrom(names=names):
                found = [alias.asname or alias.name for alias in names]
            case ast.Assign(targets=targets):
                found = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                found = [name]
            case _:
                continue
        if "recipe" in found:
            return True
    return False


def opens_run(source: bytes) -> int | None:
    """Return the line in which a file without a recipe calls `open_run`, if it does so."""
    if b"open_run" not in source:
        return None
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # to run it tells more
        return None
    if names_recipe(tree):
        return None
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="open_run") | ast.Attribute(attr="open_run")):
                return node.lineno
    return None
