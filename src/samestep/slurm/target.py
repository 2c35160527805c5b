"""What is submitted: samestep's own training of a recipe, or any script of the user's."""

import ast
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.errors import UserError
from samestep.run.directory import is_run, new_run_path


@dataclass(frozen=True, kw_only=True)
class Target:
    """What each rank runs, and where its run lies."""

    name: str
    kind: Literal["recipe", "script"]
    run: Path
    """Absolute path of the run directory."""
    command: tuple[str, ...]
    """Words for the Python interpreter."""


def find_target(text: str, arguments: list[str], recipes: list[str]) -> Target:
    """Return the target that a recipe's name, a file or a run directory names.

    Args:
        text: what the user typed.
        arguments: of the training or the script.
        recipes: names of the recipes that come with samestep.

    Raises:
        UserError: there is nothing of this name, or its own flags name what the job decides.
    """
    path = Path(text)
    if text not in recipes and path.suffix == ".py" and not path.is_file():
        raise UserError(
            f"There is no file {text}. Give a script or a recipe file that exists, a run "
            f"directory, or a recipe: {', '.join(recipes)}."
        )
    if text not in recipes and path.is_file() and not _is_recipe_file(path):
        run = new_run_path(path.stem).absolute()
        command = (str(path.absolute()), *arguments)
        return Target(name=path.stem, kind="script", run=run, command=command)
    if text not in recipes and path.is_dir() and not is_run(path):
        raise _not_begun(path)
    nproc = [word for word in arguments if word.split("=")[0] == "--nproc"]
    if nproc:
        raise UserError("--nproc is for one machine; a job takes --nodes and --ntasks-per-node.")
    if is_run(path) and text not in recipes:
        run, name = path.absolute(), path.absolute().name
    else:
        name = path.stem if path.suffix == ".py" else text
        wanted, arguments = _without_run_dir(arguments)
        run = Path(wanted).absolute() if wanted else new_run_path(name).absolute()
    what = str(path.absolute()) if text not in recipes and path.exists() else text
    rest = [word for word in arguments if word != "--resume"]
    place = () if is_run(path) and text not in recipes else ("--run-dir", str(run))
    command = ("-m", "samestep", "train", what, *rest, *place, "--resume")
    return Target(name=name, kind="recipe", run=run, command=command)


def _not_begun(path: Path) -> UserError:
    script = path / "job.sbatch"
    if not script.is_file():
        return UserError(f"{path} is a folder without settings.toml, so it is not a run's.")
    return UserError(
        f"{path} has no settings.toml: no training has begun there that could go on. Its job can "
        f"be handed in once more: sbatch {shlex.quote(str(script))}"
    )


def _without_run_dir(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Take --run-dir out of the training's flags: the job has it in one place."""
    found, rest, words = None, [], iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == "--run-dir":  # both are read as the same flag
            found = value if equals else next(words, "")
            if not found:
                raise UserError("--run-dir needs a directory behind it.")
        else:
            rest.append(word)
    return found, rest


def _is_recipe_file(path: Path) -> bool:
    """Whether a Python file assigns `recipe` and imports samestep; it is read, not run."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no Python that can be read: {error}.") from error
    named = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    return "recipe" in named and any(name.split(".")[0] == "samestep" for name in imported)
