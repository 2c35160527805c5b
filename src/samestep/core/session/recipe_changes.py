"""Whether a recipe still is the one that a run was trained with.

A run keeps a copy of its recipe's file and of what that imports of the user's own, and of a recipe
made in Python what its functions and values were. They are compared with the recipe of today,
without comments and layout, when the run is resumed or a checkpoint is used.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from samestep.base.errors import UserError, listed
from samestep.base.run.code_pieces import Pieces, differences, no_user_module, reached_pieces
from samestep.base.run.files import read_object, write_text
from samestep.base.run.user_modules import keep_modules, kept_modules, modules_of
from samestep.core.recipe import Recipe, find_recipe
from samestep.core.recipe_checks import FROM_PYTHON
from samestep.core.session.recipe_pieces import pieces_of

RECIPE_COPY = "recipe.py"
"""A user's recipe file as it was when the run began, in the run's directory."""
SCRIPT_COPY = "script.py"
"""A user's script with a loop of its own, as it was when the run began."""
_PIECES = "recipe.json"
"""What the functions and values of such a recipe were."""
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_RECORD = 3
"""The form of the pieces."""


def recipe_changes(run: Path, source: str, recipe: Recipe | None = None) -> list[str]:
    """Return the functions and values of a run's recipe that have changed.

    The run names the recipe `source`; `recipe` takes the place of what that leads to.
    """
    copy = run / RECIPE_COPY
    if source.endswith(".py"):
        if not copy.is_file():
            return []
        if recipe is not None and not recipe.file:
            return [f"it was built in Python, and the run's is the file {source}"]
        file = Path(recipe.file if recipe is not None else source)
        return _file_changes(run, copy, file) if file.is_file() else []
    in_python = recipe is not None and source.startswith(FROM_PYTHON)
    before = read_object(run / _PIECES) if in_python else {}
    form = (before.get("python"), before.get("record"))
    if recipe is None or form != (_PYTHON, _RECORD):  # another Python has other byte code
        return []
    then, now = before["pieces"], pieces_of(recipe)
    # A field that the run's version did not have yet is not a change where it has its default.
    left = {f.name for f in fields(recipe) if getattr(recipe, f.name) is f.default}
    now = {name: text for name, text in now.items() if name in then or name not in left}
    return differences(then, now)


def _file_changes(run: Path, copy: Path, file: Path, *, main_block: bool = False) -> list[str]:
    """Return the differences between a run's copy of a file and the file, with their imports."""
    copies = kept_modules(run)
    if copies is None:  # it imports nothing of the user's own
        then, now = (reached_pieces(f, no_user_module, main_block=main_block) for f in (copy, file))
        return differences(then, now)
    both = ((copy, copies), (file, modules_of(file, like=copies)))
    then, now = (
        reached_pieces(path, of.files.get, of.whole, main_block=main_block) for path, of in both
    )
    return differences(then, now)


def check_recipe_unchanged(run: Path, source: str) -> None:
    """Check that the recipe that a run names is the one that it was trained with."""
    if changes := recipe_changes(run, source):
        raise UserError(
            f"{source} has changed since {run} started: {listed(changes, 5)}. Use the recipe as it "
            f"was: --recipe {run / RECIPE_COPY}; or as it is now: --recipe {source}"
        )


def accepted_changes(
    run: Path | None, source: str, recipe: Recipe, allowed: Sequence[str]
) -> tuple[str, ...]:
    """Return the allowed changes to the recipe of a resumed run."""
    changes = recipe_changes(run, source, recipe) if run is not None else []
    if changes and "recipe" not in allowed:
        is_file = source.endswith(".py")
        remedy = "continue with the run's own copy: --recipe-of-run; " if is_file else ""
        raise UserError(
            f"{recipe.file if is_file else 'The recipe'} is not the recipe that {run} began with: "
            f"{listed(changes, 5)}. Resuming with it would be a different training: {remedy}start "
            "a new run without --resume; or add --allow-change recipe."
        )
    return tuple(changes)


def copy_of_run(run: Path, source: str) -> Recipe | None:
    """Return the recipe as the run's own copy has it; None where it keeps none."""
    copy = run / RECIPE_COPY
    return find_recipe(str(copy), source) if copy.is_file() else None


def keep_recipe(
    run: Path, source: str, recipe: Recipe, pieces: Pieces | None = None, *, changed: bool
) -> None:
    """Write the recipe into the run's directory; the copy of an earlier attempt is kept, too.

    With a recipe's file go the modules of the user's own that it imports.

    `pieces` describe a recipe made in Python. Take them before its functions run and fill caches.
    """
    if source.endswith(".py"):
        copy, text = run / RECIPE_COPY, Path(recipe.file).read_text(encoding="utf-8")
    elif source.startswith(FROM_PYTHON):
        copy, pieces = run / _PIECES, pieces or pieces_of(recipe)
        table = {"record": _RECORD, "python": _PYTHON, "pieces": pieces}
        text = json.dumps(table, indent=2) + "\n"
    else:
        return
    number = None
    if copy.exists() and changed:
        number = sum(1 for _ in run.glob(f"{copy.stem}_before_*{copy.suffix}")) + 1
        copy.rename(copy.with_stem(f"{copy.stem}_before_{number}"))
    is_copy = recipe.file == str(copy.resolve())
    if copy.suffix == ".py" and not is_copy and (changed or kept_modules(run) is None):
        keep_modules(run, modules_of(Path(recipe.file)), number)
    if not copy.exists():
        write_text(copy, text)
        if copy.suffix == ".py":
            shutil.copymode(recipe.file, copy)


def keep_script(run: Path, script: Path) -> None:
    """Write a script with a loop of its own into its run, with the modules that it imports."""
    if script.suffix == ".py" and not (run / SCRIPT_COPY).exists():
        with suppress(OSError, UnicodeDecodeError):
            write_text(run / SCRIPT_COPY, script.read_text(encoding="utf-8"))
            shutil.copymode(script, run / SCRIPT_COPY)
            keep_modules(run, modules_of(script))


def script_changes(run: Path, script: Path) -> list[str]:
    """Return the differences of a run's script and the one that continues it."""
    copy = run / SCRIPT_COPY
    there = copy.is_file() and script.is_file()
    return _file_changes(run, copy, script, main_block=True) if there else []
