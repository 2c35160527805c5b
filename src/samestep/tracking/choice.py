"""Which trackers there are, and what can be said of a choice before anything is started."""

import importlib.util
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from samestep.errors import UserError, did_you_mean
from samestep.settings import Settings

PACKAGES = {"comet": "comet_ml", "mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb"}
"""The trackers that come with samestep, and the package that each needs."""

PROJECT_VARIABLES = {
    "comet": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "wandb": "WANDB_PROJECT",
}
"""The trackers' own variables that name a project, where no flag does."""

_FUNCTIONS = ("start", "record", "finish")
_MAX_NAME = 128  # of W&B; MLflow takes 500
_NOT_IN_PROJECTS = "/\\#?%:"  # W&B's own list


def chosen(text: str | None) -> list[str]:
    """Return the trackers of `--track comet,wandb`; none for `none`."""
    names = split(text)
    return [] if names == ["none"] else names


def split(text: str | None) -> list[str]:
    """Return the parts between commas, without white space around them."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def short_name(tracker: str) -> str:
    """Return what a tracker's files are called: `wandb`, `my_tracker` for lib/my_tracker.py."""
    return tracker if tracker in PACKAGES else Path(tracker).stem if _is_file(tracker) else tracker


def default_project(recipe: str) -> str:
    """Return the project of runs that name none: the recipe, as every tracker takes it."""
    return re.sub(f"[{re.escape(_NOT_IN_PROJECTS)}]", "-", recipe)[:_MAX_NAME]


def check_choice(settings: Settings) -> None:
    """Check what the settings say of trackers.

    Raises:
        UserError: a tracker is unknown, or a name would be refused by its service.
    """
    trackers = chosen(settings.track)
    for tracker in trackers:
        _check_tracker(tracker)
    names = [short_name(tracker) for tracker in trackers]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"--track {settings.track} names {min(twice)} twice: name it once.")
    _check_name("--track-project", settings.track_project, _NOT_IN_PROJECTS)
    for variable in (PROJECT_VARIABLES[t] for t in trackers if t in PROJECT_VARIABLES):
        if settings.track_project is None:
            _check_name(variable, os.environ.get(variable) or None, _NOT_IN_PROJECTS)
    _check_name("--track-name", settings.track_name)
    _check_name("--track-workspace", settings.track_workspace, _NOT_IN_PROJECTS)
    for tag in split(settings.track_tags):
        if len(tag) > 64:
            raise UserError(f"--track-tags: {tag!r} has {len(tag)} characters; W&B takes 64.")


def check_installed(trackers: list[str]) -> None:
    """Check that what the trackers need is installed, without importing it.

    Raises:
        UserError: a package or a file is missing, or the file lacks one of the three functions.
    """
    for tracker in trackers:
        package = PACKAGES.get(tracker)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"--track {tracker} needs the package {package}, which is not installed here: "
                f"pip install 'samestep[{tracker}]'"
            )
        if _is_file(tracker):
            _check_file(Path(tracker))
        elif package is None:
            _check_module(tracker)


def _is_file(tracker: str) -> bool:
    return tracker.endswith(".py")


def _check_tracker(tracker: str) -> None:
    if tracker in PACKAGES:
        return
    if _is_file(tracker):
        if Path(tracker).stem in PACKAGES:
            raise UserError(
                f"--track {tracker}: the name {Path(tracker).stem} is taken by samestep's own "
                "tracker. Give the file another name."
            )
        return
    if "." in tracker and all(part.isidentifier() for part in tracker.split(".")):
        return
    hint = did_you_mean(tracker, [*PACKAGES, "none"])
    raise UserError(
        f"There is no tracker {tracker!r}. {hint}The trackers are: {', '.join(PACKAGES)}; or give "
        "your own as a file (my_tracker.py) or a module (package.module); none for no tracker."
    )


def _check_name(flag: str, name: str | None, refused: str = "") -> None:
    if name is None:
        return
    bad = sorted({c for c in name if c in refused or not c.isprintable()})
    if not name.strip() or len(name) > _MAX_NAME or bad:
        what = f"holds {' '.join(map(repr, bad))}" if bad else f"has {len(name)} characters"
        raise UserError(
            f"{flag} {name!r} {what}; trackers refuse that. Take 1 to {_MAX_NAME} characters"
            + (f" and none of {' '.join(refused)}" if refused else "")
            + "."
        )


def _check_module(module: str) -> None:
    """Check that the package of a tracker's module is there: the training does not import it."""
    package = module.partition(".")[0]
    if PathFinder.find_spec(package, [*sys.path, str(Path.cwd())]) is None:
        raise UserError(
            f"--track {module}: there is no package {package} here. A tracker of your own is a "
            "file (my_tracker.py), or a module that can be imported from this folder."
        )


def _check_file(path: Path) -> None:
    """Check a tracker's file by compiling it: the training does not run it."""
    try:
        text = path.read_bytes()
        names = compile(text, str(path), "exec").co_names
    except OSError as error:
        raise UserError(f"--track {path}: it cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"--track {path}: it is no Python: {error}.") from error
    missing = [name for name in _FUNCTIONS if name not in names and b"import *" not in text]
    if missing:
        raise UserError(
            f"--track {path}: it has no function {missing[0]}(). A tracker has three: start(run), "
            "record(client, entries), finish(client, result); docs/trackers.md shows one."
        )
