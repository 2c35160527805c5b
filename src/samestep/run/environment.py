"""What a run records of the machine and the environment: an allow-list, and no secrets."""

import os
import platform
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.machine import usable_cores
from samestep.version import __version__

# What is recorded of the environment. Everything else may hold a secret.
_ALLOWED = re.compile(
    r"(?!SLURM_SPANK)(NCCL|GLOO|TORCH|TORCHELASTIC|PYTORCH|SLURM|OMP|MKL|CUDA|OMPI_COMM_WORLD|PMI)_[A-Z0-9_]+"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
)
# Whole words of a name: TOKENIZERS_PARALLELISM holds none.
_SECRET = re.compile(
    r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|CREDENTIALS?|AUTH|COOKIE|JWT)S?(_|$)",
    re.IGNORECASE,
)


def describe_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the machine, the command and the variables on an allow-list."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "cores_usable": len(usable_cores()),
        "command": _without_secrets(sys.argv),
        "variables": {
            name: value
            for name, value in sorted(environment.items())
            if _ALLOWED.fullmatch(name) and not names_secret(name)
        },
    }


def git_commit(folder: Path) -> str:
    """Return the commit that a folder's repository is at; "" where there is none.

    It is read from git's own files: to ask git takes longer than a short training.
    """
    for parent in (folder, *folder.parents):
        if not (parent / ".git").is_dir():
            continue
        try:
            head = (parent / ".git" / "HEAD").read_text().strip()
            if not head.startswith("ref: "):
                return head
            name = head.removeprefix("ref: ")
            if (parent / ".git" / name).is_file():
                return (parent / ".git" / name).read_text().strip()
            packed = (parent / ".git" / "packed-refs").read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return ""
        return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
    return ""


def names_secret(name: str) -> bool:
    """Whether a variable or a flag is named like a secret: WANDB_API_KEY, --hf-token."""
    return bool(_SECRET.search(re.sub(r"[-.]", "_", name.lstrip("-"))))


def _without_secrets(command: list[str]) -> list[str]:
    """Return a command without the values of flags that are named like a secret."""
    shown: list[str] = []
    hides_next = False
    for word in command:
        name, equals, _value = word.partition("=")
        secret = name.startswith("-") and names_secret(name)
        shown.append("…" if hides_next else f"{name}=…" if secret and equals else word)
        hides_next = secret and not equals
    return shown


def versions() -> dict[str, str]:
    """Return the versions that results depend on."""
    import torch  # noqa: PLC0415 - readers of a run need no torch

    found = {"samestep": __version__, "python": platform.python_version()}
    found["torch"] = torch.__version__
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})
