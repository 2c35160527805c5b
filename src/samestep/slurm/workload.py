"""What is submitted: samestep's own training of a recipe, or any script of the user's."""

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from samestep.errors import UserError
from samestep.nearby import nearby
from samestep.run.directory import is_run, new_run_path
from samestep.scripts import names_recipe


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What each rank runs, and where its run lies: an absolute path."""

    name: str
    kind: Literal["recipe", "script"]
    run: Path
    command: tuple[str, ...]
    """Words for the Python interpreter."""


def find_workload(text: str, arguments: list[str], recipes: list[str]) -> Workload:
    """Return the target that a recipe's name, a file or a run directory names.

    The arguments are those of the training or the script; recipes come with samestep.

    Raises:
        UserError: there is nothing of this name, or its own flags name what the job decides.
    """
    path = Path(text)
    if text in recipes:  # a recipe's name wins over a file or a folder of this name
        is_file = goes_on = False
    else:
        is_file, goes_on = path.is_file(), is_run(path)
        if path.suffix == ".py" and not is_file:
            raise UserError(
                f"There is no file {text}. Give a script or a recipe file that exists, a run "
                f"directory, or a recipe: {', '.join(recipes)}.{nearby(path, 'file')}"
            )
        if path.is_dir() and not goes_on:
            raise _not_begun(path)
    if is_file and not _is_recipe_file(path):
        run = new_run_path(path.stem).absolute()
        command = (str(path.absolute()), *arguments)
        return Workload(name=path.stem, kind="script", run=run, command=command)
    if any(word.split("=")[0] == "--nproc" for word in arguments):
        raise UserError("--nproc is for one machine; a job takes --nodes and --ntasks-per-node.")
    what = str(path.absolute()) if is_file or goes_on else text
    place: tuple[str, ...] = ()
    if goes_on:
        run, name = path.absolute(), path.absolute().name
    else:
        name = path.stem if path.suffix == ".py" else text
        wanted, arguments = _without_run_dir(arguments)
        run = Path(wanted).absolute() if wanted else new_run_path(name).absolute()
        place = ("--run-dir", str(run))
    rest = [word for word in arguments if word not in ("--resume", "--recipe-of-run")]
    own = () if text in recipes else ("--recipe-of-run",)  # its file may be edited meanwhile
    command = ("-m", "samestep", "train", what, *rest, *place, "--resume", *own)
    return Workload(name=name, kind="recipe", run=run, command=command)


def is_script(run: Path) -> bool:
    """Whether the job of a run directory runs a script of the user's."""
    try:
        return "--kind script" in (run / "job.sbatch").read_text()
    except OSError:
        return False


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
    if _is_shell_script(path):
        raise UserError(
            f"{path} is a shell script; submit makes the job script by itself. Hand yours in with: "
            f"sbatch {shlex.quote(str(path))}; or name the Python file that it starts: samestep "
            "slurm submit train.py."
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as error:
        at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(
            f"{path}{at} cannot be read as Python: {why}. Mend it, or name another file."
        ) from error
    nodes = list(ast.walk(tree))
    imported = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return names_recipe(tree) and any(name.split(".")[0] == "samestep" for name in imported)


def _is_shell_script(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(200)
    if first.startswith(b"#!"):
        return re.search(rb"\b(ba|da|z|k)?sh\b", first) is not None
    return path.suffix in (".sh", ".bash", ".sbatch", ".slurm")
