"""The trackers that can be chosen, and the checks before a training starts.

The clients take a second or more to import, so they speak in their own processes: which key it is,
whether it has the right form, which server it is for. Here only the environment and files are read.
"""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from urllib.parse import urlsplit

from samestep.base.errors import UserError, did_you_mean
from samestep.base.plugins import Names
from samestep.base.run.directory import names_secret
from samestep.base.settings import Settings

PACKAGES = {
    "comet": "comet_ml",
    **{name: name for name in ("mlflow", "tensorboard", "trackio", "wandb")},
}
"""The trackers that come with samestep, and the package that each needs."""

TRACKERS = Names({name: f"samestep.show.tracking.{name}" for name in PACKAGES}, "trackers")
"""Those, and the trackers of installed packages, each with its module."""

PROJECT_VARIABLES = {
    "comet": "COMET_PROJECT_NAME",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "wandb": "WANDB_PROJECT",
}
"""The trackers' variables for the project, used without --track-project."""

_MAX_NAME = 128  # of W&B; MLflow takes 500
_NOT_IN_PROJECTS = "/\\#?%:"  # W&B's own list


def chosen(text: str | None) -> list[str]:
    """Return the trackers of `--track comet,wandb`; none for `none`."""
    names = split(text)
    return [] if names == ["none"] else names


def split(text: str | None) -> list[str]:
    """Split text at commas and strip each part."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def short_name(tracker: str) -> str:
    """Return the name of a tracker's files: `wandb`, or `my_tracker` for lib/my_tracker.py."""
    return Path(tracker).stem if tracker.endswith(".py") else tracker


def default_project(recipe: str) -> str:
    """Return the default project: the recipe's name, without characters that trackers refuse."""
    return re.sub(f"[{re.escape(_NOT_IN_PROJECTS)}]", "-", recipe)[:_MAX_NAME]


def check_choice(settings: Settings) -> None:
    """Check the tracker settings."""
    trackers = chosen(settings.track)
    for tracker in trackers:
        _check_tracker(tracker)
    names = [short_name(tracker) for tracker in trackers]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--track {settings.track} names {min(twice)} twice: name it once.")
    sources = {"--track-project": settings.track_project}
    if settings.track_project is None:
        variables = [PROJECT_VARIABLES[t] for t in trackers if t in PROJECT_VARIABLES]
        sources = {name: os.environ.get(name) or None for name in variables}
    sources["--track-workspace"] = settings.track_workspace
    for flag, name in sources.items():
        _check_name(flag, name, _NOT_IN_PROJECTS)
    _check_name("--track-name", settings.track_name)
    for tag in split(settings.track_tags):
        if len(tag) > 64:
            raise UserError(f"--track-tags: {tag!r} has {len(tag)} characters; W&B takes 64.")


def check_installed(trackers: list[str]) -> None:
    """Check that what the trackers need is installed, without importing it."""
    for tracker in trackers:
        package = PACKAGES.get(tracker)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"--track {tracker} needs the package {package}, which is not installed here: "
                f"pip install 'samestep[{tracker}]'"
            )
        if tracker.endswith(".py"):
            _check_file(Path(tracker))
        elif tracker not in TRACKERS:
            # Only its package is looked for: the training does not import it.
            folder = tracker.partition(".")[0]
            if PathFinder.find_spec(folder, [*sys.path, str(Path.cwd())]) is None:
                raise UserError(
                    f"--track {tracker}: there is no package {folder} here. A tracker of your own "
                    "is a file (my_tracker.py), or a module that can be imported from this folder."
                )


def _check_tracker(tracker: str) -> None:
    is_file = tracker.endswith(".py")
    if is_file and Path(tracker).stem in PACKAGES:
        raise UserError(
            f"--track {tracker}: the name {Path(tracker).stem} is taken by samestep's own "
            "tracker. Give the file another name."
        )
    is_module = "." in tracker and all(part.isidentifier() for part in tracker.split("."))
    if tracker in TRACKERS or is_file or is_module:
        return
    raise UserError(
        f"There is no tracker {tracker!r}. {did_you_mean(tracker, [*TRACKERS, 'none'])}"
        f"The trackers are: {', '.join(TRACKERS)}; or give your own as a file (my_tracker.py) or a "
        "module (package.module); none for no tracker."
    )


def _check_name(flag: str, name: str | None, refused: str = "") -> None:
    if name is None:
        return
    bad = sorted({c for c in name if c in refused or not c.isprintable()})
    if not name.strip() or len(name) > _MAX_NAME or bad:
        problem = f"holds {' '.join(map(repr, bad))}" if bad else f"has {len(name)} characters"
        raise UserError(
            f"{flag} {name!r} {problem}; trackers refuse that. Take 1 to {_MAX_NAME} characters"
            + (f" and none of {' '.join(refused)}" if refused else "")
            + "."
        )


def _check_file(path: Path) -> None:
    """Check a tracker's file by compiling it: the training does not run it."""
    try:
        text = path.read_bytes()
        names = compile(text, str(path), "exec").co_names
    except OSError as error:
        raise UserError(f"--track {path}: it cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError) as error:
        raise UserError(f"--track {path}: it is not valid Python: {error}.") from error
    missing = [name for name in ("start", "record", "finish") if name not in names]
    if missing and b"import *" not in text:
        raise UserError(
            f"--track {path}: it has no function {missing[0]}(). A tracker has three: start(run), "
            "record(client, entries), finish(client, result); docs/how-to/trackers.md shows one."
        )


_ANSWER_S = 5.0
_KEYS = {
    "comet": (("COMET_API_KEY",), "comet login", r"api_key"),
    # The server of a key in .netrc is the client's matter; `login user` is what it writes there.
    "wandb": (
        ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
        "wandb login",
        r"api_key|base_url|wandb|login\s+user\b",
    ),
}
"""Variables with a key, the command that stores one, and a pattern of the files that hold it."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Whether a tracker can go online, before its client is imported."""

    offline: bool = False
    """Whether it only writes files in the run directory."""
    why: str | None = None
    """Why it is offline, if that may surprise the user."""
    has_server: bool = True
    """Whether its offline files can be sent to a server later."""


def find_access(tracker: str) -> Access:
    """Return whether the environment lets a tracker go online."""
    if tracker in ("tensorboard", "trackio"):
        return Access(offline=True, has_server=False)
    if tracker == "mlflow":
        return _mlflow_access()
    if tracker not in _KEYS or _may_have_key(tracker):
        return Access()
    (variable, *_), login, _ = _KEYS[tracker]
    return Access(offline=True, why=f"{variable} is not set, and `{login}` has stored no key")


def _may_have_key(tracker: str) -> bool:
    """Whether a variable has a key, or a file of the client looks as if it had one."""
    variables, _, sign = _KEYS[tracker]
    if any(os.environ.get(name) for name in variables):
        return True
    if tracker == "wandb":
        config = os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb"
        netrc = os.environ.get("NETRC") or "~/.netrc"
        files = [netrc, "~/_netrc", f"{config}/settings", "wandb/settings"]
    else:
        config = os.environ.get("COMET_CONFIG") or "~"
        files = [config, f"{config}/.comet.config", "~/.comet.config", ".comet.config", ".env"]
    for file in files:
        path = Path(os.path.expanduser(file))  # noqa: PTH111 - Path's own raises without a home
        with contextlib.suppress(OSError):
            if re.search(sign, path.read_text(errors="replace"), re.IGNORECASE):
                return True
    return False


def _mlflow_access() -> Access:
    """Return MLflow's access: its client reads nothing but these variables."""
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return Access(offline=True, has_server=False)
    try:
        scheme = urlsplit(uri).scheme
    except ValueError as error:
        why = without_credentials(f"MLFLOW_TRACKING_URI cannot be used ({error})")
        return Access(offline=True, why=why)
    if scheme in ("", "file"):
        why = (
            f"MLFLOW_TRACKING_URI names a folder ({uri}), a store that MLflow no longer supports; "
            "use sqlite:///FILE, or a server"
        )
        return Access(offline=True, why=why, has_server=False)
    for first, second in (("USERNAME", "PASSWORD"), ("PASSWORD", "USERNAME")):
        have = os.environ.get(f"MLFLOW_TRACKING_{first}")
        if have and not os.environ.get(f"MLFLOW_TRACKING_{second}"):
            why = f"MLFLOW_TRACKING_{first} is set without MLFLOW_TRACKING_{second}"
            return Access(offline=True, why=why)
    return Access(has_server=scheme in ("http", "https"))


def without_credentials(text: str) -> str:
    """Return a text whose addresses have no names and passwords: http://me:key@host is http://host."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables that are named like a secret, and passwords in addresses."""
    secrets = [value for name, value in environment.items() if names_secret(name)]
    for name, value in environment.items():
        if name.endswith("_URI"):
            with contextlib.suppress(ValueError):  # an address that is none
                secrets += [urlsplit(value).password or ""]
    return tuple(value for value in secrets if len(value) >= 6)  # shorter ones are ordinary words


def why_unreachable(address: str) -> str | None:
    """Return why an address does not answer; None if it answers anything.

    Asked before a tracker starts online: without a network some hang, and some drop everything.
    """
    import requests  # noqa: PLC0415 - only where something has to be reached

    try:
        # By the proxy of the environment, as the trackers do, but without any credentials.
        requests.head(address, timeout=_ANSWER_S, auth=lambda request: request).close()
    except requests.exceptions.SSLError:
        return None  # it has answered; whose certificate it takes is the tracker's matter
    except (requests.RequestException, ValueError, OSError) as error:
        slow = isinstance(error, requests.Timeout)
        problem = f"no answer in {_ANSWER_S:.0f} s" if slow else "no connection"
        with contextlib.suppress(ValueError):
            address = urlsplit(address).hostname or address
        return f"{without_credentials(address)} cannot be reached: {problem}"
    return None
