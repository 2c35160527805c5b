"""The files of a sandbox: where they are, what is written at its start, what is removed."""

import os
import pwd
import secrets
import shlex
import shutil
import socket
from pathlib import Path

from samestep.errors import UserError
from samestep.slurm.sandbox.conf import HEADER, TASK_PROLOG, node_names, slurm_conf
from samestep.slurm.sandbox.daemons import free_ports

# All that a sandbox writes. `down` removes these and no other file of the folder; slurm.conf is
# the last to go, for by it the folder is known.
_FOLDERS = ("munge", "state", "spool", "log")
_FILES = ("task_prolog.sh", "slurm.conf")


def default_folder() -> Path:
    """Return where a sandbox lives if nothing else is said: in the user's state folder."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "samestep" / "sandbox"


def export_line(folder: Path) -> str:
    """Return the line of shell by which Slurm's programs find the sandbox."""
    return f"export SLURM_CONF={shlex.quote(str(folder.absolute().resolve() / 'slurm.conf'))}"


def down_line(folder: Path) -> str:
    """Return the command that takes the sandbox of a folder down."""
    is_default = folder.absolute().resolve() == default_folder().absolute().resolve()
    where = "" if is_default else f" --dir {shlex.quote(str(folder))}"
    return f"samestep slurm sandbox down{where}"


def make_folder(folder: Path) -> None:
    """Make the folder, for this user's eyes only.

    Raises:
        UserError: it cannot be made, or it holds files of the user's own.
    """
    try:
        if folder.is_dir() and not is_sandbox(folder) and any(folder.iterdir()):
            raise UserError(
                f"{folder} holds files and is no sandbox. Give a new or empty folder with --dir."
            )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise UserError(
            f"{folder} cannot hold a sandbox: {error.strerror}. Give another with --dir."
        ) from error


def write_files(folder: Path, *, nodes: int, cpus: int, first_job: int = 1) -> None:
    """Write the configuration, a new key, and the folders that the daemons write to.

    Raises:
        UserError: this user has no name, or there are too few free ports.
    """
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        raise UserError(
            f"This user (uid {os.getuid()}) has no name in /etc/passwd; Slurm needs one."
        ) from None
    host, (port, *ports) = socket.gethostname().partition(".")[0], free_ports(nodes + 1)
    text = slurm_conf(
        folder,
        user=user,
        host=host,
        controller_port=port,
        node_ports=ports,
        cpus=cpus,
        first_job=first_job,
    )
    # First, for by it a folder is known as a sandbox, should we be killed in between.
    (folder / "slurm.conf").write_text(text)
    for name in (*_FOLDERS, *(f"spool/{node}" for node in node_names(nodes))):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
    (folder / "munge" / "key").chmod(0o600)
    (folder / "task_prolog.sh").write_text(TASK_PROLOG)
    (folder / "task_prolog.sh").chmod(0o700)


def remove_files(folder: Path) -> None:
    """Remove what a sandbox wrote, and no other file that may be in its folder."""
    for name in _FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in _FILES:
        (folder / name).unlink(missing_ok=True)


def is_sandbox(folder: Path) -> bool:
    """Return whether a folder holds, or held, a sandbox."""
    try:
        return (folder / "slurm.conf").read_text(errors="replace").startswith(HEADER)
    except OSError:
        return False
