"""Whether a tracker can go online from here: its key, by its own ways, and its address.

Only looked at, never kept: a key is read to see that it is there and has the right form.
"""

import base64
import configparser
import contextlib
import json
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from samestep.run.environment import names_secret

_LOOK_S = 5.0
_OFF = ("0", "false", "no", "off")


@dataclass(frozen=True, kw_only=True)
class Access:
    """What is known of the way to a tracker before it is tried."""

    offline: bool = False
    """Whether it writes files in the run directory and sends nothing."""
    why: str | None = None
    """Why it is offline, where the user may not expect it."""
    address: str | None = None
    """What must answer before the tracker is started online."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What must not appear in any file."""


def find_access(
    tracker: str, environment: Mapping[str, str] = os.environ, home: Path | None = None
) -> Access:
    """Return what the environment and the tracker's own configuration say of the way to it."""
    find = {"wandb": _wandb, "comet": _comet, "mlflow": _mlflow, "tensorboard": _tensorboard}
    # expanduser goes by HOME, which may be unset; so may the user's name.
    home = home or Path(os.path.expanduser("~"))  # noqa: PTH111
    try:
        return find.get(tracker, _own)(environment, home)
    except (ValueError, RuntimeError, OSError) as error:  # an address or a path that is none
        why = f"what is set for {tracker} in the environment cannot be used ({error})"
        return Access(offline=True, why=without_credentials(why))


def without_credentials(text: str) -> str:
    """Return a text whose addresses have no names and passwords: http://me:key@host is http://host."""
    return re.sub(r"://[^/@\s]+@", "://", text)


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of variables that are named like a secret, and passwords in addresses."""
    named = [value for name, value in environment.items() if names_secret(name)]
    for name, value in environment.items():
        if name.endswith("_URI"):
            with contextlib.suppress(ValueError):  # an address that is none
                named += [urlsplit(value).password or ""]
    return tuple(value for value in named if len(value) >= 6)  # shorter ones are words of any text


def _tensorboard(_environment: Mapping[str, str], _home: Path) -> Access:
    return Access(offline=True)  # its files are all there is


def _own(_environment: Mapping[str, str], _home: Path) -> Access:
    return Access()


def _wandb(environment: Mapping[str, str], home: Path) -> Access:
    config = environment.get("WANDB_CONFIG_DIR") or str(home / ".config" / "wandb")
    settings = _ini("default", Path(config, "settings"), Path("wandb", "settings"))
    mode = environment.get("WANDB_MODE") or settings.get("mode", "online")
    if mode != "online":
        return Access(offline=True, why=f"WANDB_MODE is {mode}")
    address = environment.get("WANDB_BASE_URL") or settings.get("base_url")
    address = address or "https://api.wandb.ai"
    if environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return Access(address=address)
    key, name = environment.get("WANDB_API_KEY"), "WANDB_API_KEY"
    if not key:
        path = Path(environment.get("NETRC") or home / ".netrc").expanduser()
        key, name = _netrc_password(path, urlsplit(address).netloc), f"the key in {path}"
    if not key:
        return Access(
            offline=True, why="WANDB_API_KEY is not set, nor is there a key of `wandb login`"
        )
    secret = key.rpartition("-")[2] if "." not in key else key
    if len(secret) < 40 or not re.fullmatch(r"[\w.-]+", key):
        why = f"{name} is malformed: W&B's keys are 40 or more letters and digits"
        return Access(offline=True, why=why, secrets=(key,))
    return Access(address=address, secrets=(key,))


def _comet(environment: Mapping[str, str], home: Path) -> Access:
    if environment.get("COMET_START_ONLINE", "1").lower() in _OFF:
        return Access(offline=True, why="COMET_START_ONLINE is off")
    own = environment.get("COMET_CONFIG")
    own_path = Path(own).expanduser() if own else None
    if own_path is not None and own_path.is_dir():
        own_path /= ".comet.config"
    config = _ini("comet", home / ".comet.config", Path(".comet.config"), own_path)
    dotenv = _dotenv(Path(".env"))
    key = environment.get("COMET_API_KEY") or dotenv.get("COMET_API_KEY") or config.get("api_key")
    if not key:
        return Access(
            offline=True, why="COMET_API_KEY is not set, nor is there a key of `comet login`"
        )
    # A newer key is followed by * and, in base 64, the address that it is for.
    if not re.fullmatch(r"[A-Za-z0-9_-]{20,}(\*\S+)?", key):
        why = "COMET_API_KEY is malformed: Comet's keys are 25 letters and digits"
        return Access(offline=True, why=why, secrets=(key,))
    address = environment.get("COMET_URL_OVERRIDE") or dotenv.get("COMET_URL_OVERRIDE")
    address = address or config.get("url_override") or _address_in_key(key)
    return Access(address=address or "https://www.comet.com/clientlib/", secrets=(key,))


def _address_in_key(key: str) -> str | None:
    text = key.partition("*")[2]
    try:
        base = json.loads(base64.b64decode(text + "=" * (-len(text) % 4))).get("baseUrl")
    except (ValueError, AttributeError):
        return None
    return f"{base.rstrip('/')}/clientlib/" if isinstance(base, str) else None


def _mlflow(environment: Mapping[str, str], _home: Path) -> Access:
    uri = environment.get("MLFLOW_TRACKING_URI")
    if not uri:
        return Access(offline=True)
    scheme = urlsplit(uri).scheme
    if scheme in ("", "file"):
        return Access(
            offline=True,
            why=f"MLFLOW_TRACKING_URI names a folder ({uri}), a store that MLflow has given up; "
            "take sqlite:///FILE, or a server",
        )
    for first, second in (("USERNAME", "PASSWORD"), ("PASSWORD", "USERNAME")):
        have = environment.get(f"MLFLOW_TRACKING_{first}")
        if have and not environment.get(f"MLFLOW_TRACKING_{second}"):
            why = f"MLFLOW_TRACKING_{first} is set without MLFLOW_TRACKING_{second}"
            return Access(offline=True, why=why, secrets=(have,))
    return Access(address=uri if scheme in ("http", "https") else None)


def _ini(section: str, *paths: Path | None) -> dict[str, str]:
    """Return a section of the files that are there, the later ones winning."""
    parser = configparser.ConfigParser(interpolation=None)
    for path in paths:
        try:
            parser.read([path] if path else [])
        except (configparser.Error, UnicodeDecodeError, OSError):
            continue  # the tracker will say so; what else there is counts
    return dict(parser[section]) if parser.has_section(section) else {}


def _dotenv(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    pairs = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return {name.strip(): value.strip().strip("'\"") for name, _, value in pairs}


def _netrc_password(path: Path, host: str) -> str | None:
    try:
        found = netrc.netrc(path).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return found[2] if found else None


def why_unreachable(address: str) -> str | None:
    """Return why an address does not answer, or None if it does, whatever it says.

    Asked before a tracker starts online: without a network some hang, and some drop everything.
    """
    import requests  # noqa: PLC0415 - only where something has to be reached

    try:
        # By the proxy of the environment, as the trackers do, but without any credentials.
        requests.head(address, timeout=_LOOK_S, auth=lambda request: request).close()
    except requests.exceptions.SSLError:
        return None  # it has answered; whose certificate it takes is the tracker's matter
    except (requests.RequestException, ValueError, OSError) as error:
        shown = _host(address)
        slow = isinstance(error, requests.Timeout)
        word = f"no answer in {_LOOK_S:.0f} s" if slow else "no connection"
        return f"{shown} cannot be reached: {word}"
    return None


def _host(address: str) -> str:
    try:
        return urlsplit(address).hostname or without_credentials(address)
    except ValueError:
        return without_credentials(address)
