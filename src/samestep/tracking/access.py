"""Whether a tracker can go online from here.

Before the training only what needs no client is asked: whether there is a key at all. The clients
take a second or more to import, so they speak in their own processes: which key it is, whether it
has the right form, which server it is for, and whether their configuration says to be offline.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from samestep.run.environment import names_secret

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
"""Variables that hold a key, the command that keeps one, and what its files say if they have it."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What is known of the way to a tracker before its client is imported."""

    offline: bool = False
    """Whether it writes files in the run directory and sends nothing."""
    why: str | None = None
    """Why it is offline, where the user may not expect it."""
    has_server: bool = True
    """Whether there is another place than its files, so that these are to be sent."""


def find_access(tracker: str) -> Access:
    """Return what the environment says of the way to a tracker."""
    if tracker == "tensorboard":
        return Access(offline=True, has_server=False)
    if tracker == "mlflow":
        return _mlflow_access()
    if tracker not in _KEYS or _may_have_key(tracker):
        return Access()
    (variable, *_), login, _ = _KEYS[tracker]
    return Access(offline=True, why=f"{variable} is not set, nor is there a key of `{login}`")


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
    """Return MLflow's access: its variables are all that its client would look at."""
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
            f"MLFLOW_TRACKING_URI names a folder ({uri}), a store that MLflow has given up; "
            "take sqlite:///FILE, or a server"
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
    """Return why an address does not answer, or None if it does, whatever it says.

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
        what = f"no answer in {_ANSWER_S:.0f} s" if slow else "no connection"
        with contextlib.suppress(ValueError):
            address = urlsplit(address).hostname or address
        return f"{without_credentials(address)} cannot be reached: {what}"
    return None
