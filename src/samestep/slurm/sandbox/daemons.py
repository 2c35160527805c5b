"""Start the daemons of a sandbox, and ask Slurm's programs about it."""

import os
import secrets
import shutil
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from samestep.errors import UserError
from samestep.slurm.programs import outside_of_any_job
from samestep.slurm.sandbox.processes import MARK, MARK_DAEMON, wait_until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "squeue", "scancel")
_ADMIN_FOLDERS = "/usr/sbin:/usr/local/sbin:/sbin"
_START_WITHIN_S = 20.0
_ANSWER_WITHIN_S = 10.0
_LOG_TAIL_LINES = 15

# Below the ports that Linux gives to outgoing connections (32768 and up), so that a port is still
# free when its daemon comes to it, and when a killed daemon comes back to it.
_PORTS = range(12_000, 32_000)


class DaemonError(UserError):
    """A daemon did not come up; the message ends with what it logged."""

    def __init__(self, folder: Path, daemon: str, what: str) -> None:
        try:
            lines = log_file(folder, daemon).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        tail = "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:]) or "  (nothing)"
        super().__init__(f"The sandbox did not come up: {what}. {daemon} logged last:\n{tail}")


def missing_programs() -> list[str]:
    """Return the programs that a sandbox needs and that are not here."""
    return [name for name in _PROGRAMS if _find(name) is None]


def log_file(folder: Path, daemon: str) -> Path:
    """Return where a daemon logs: munged, slurmctld, or a node's slurmd by the node's name."""
    return folder / "log" / f"{daemon}.log"


def start(folder: Path, daemon: str) -> None:
    """Start munged, slurmctld, or a node's slurmd, which tells the controller of itself.

    Raises:
        DaemonError: it did not come up.
    """
    conf, munge = f"{folder}/slurm.conf", folder / "munge"
    if daemon not in ("munged", "slurmctld"):
        _run(folder, daemon, "slurmd", "-N", daemon, "-f", conf)
        return
    if daemon == "slurmctld":
        _run(folder, daemon, "slurmctld", "-f", conf)
    else:
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={munge}/{file}" for name, file in files.items()]
        log = f"--log-file={log_file(folder, 'munged')}"
        # --force: munged wants a folder that nobody else can write to, up to the root of the disk.
        _run(folder, daemon, "munged", "--force", "--origin=127.0.0.1", log, *options)

    def answers() -> bool:
        if daemon == "slurmctld":
            return ask(folder, "scontrol", "ping") is not None
        with socket.socket(socket.AF_UNIX) as one:
            return one.connect_ex(str(munge / "socket")) == 0

    if not wait_until(answers, _START_WITHIN_S):
        raise DaemonError(folder, daemon, f"{daemon} does not answer")


def ask(folder: Path, name: str, *arguments: str) -> str | None:
    """Return what one of Slurm's programs said of the sandbox; None if it got no answer."""
    words, shown = [_find(name) or name, *arguments], environment(folder)
    try:
        return subprocess.check_output(
            words, env=shown, text=True, stderr=subprocess.DEVNULL, timeout=_ANSWER_WITHIN_S
        )
    except (FileNotFoundError, subprocess.SubprocessError):
        return None


def environment(folder: Path) -> dict[str, str]:
    """Return this process' environment as seen by the sandbox: no other cluster, job or step."""
    outside = outside_of_any_job(os.environ)
    ours = {k: v for k, v in outside.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    return ours | {"SLURM_CONF": f"{folder}/slurm.conf"}


def node_states(folder: Path) -> dict[str, str]:
    """Return each node's state, which ends in `*` if its slurmd is silent; {} if no controller."""
    said = ask(folder, "sinfo", "--noheader", "--Node", "--partition=debug", "--format=%N %T")
    return dict(line.split(maxsplit=1) for line in (said or "").splitlines())


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now.

    Raises:
        UserError: there are not so many.
    """
    free: list[int] = []
    for port in secrets.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as one, suppress(OSError):
            one.bind(("", port))  # on all addresses, as Slurm's daemons do
            free.append(port)
        if len(free) == count:
            return free
    raise UserError(f"There are no {count} free ports between {_PORTS.start} and {_PORTS.stop}.")


def _find(name: str) -> str | None:
    """Return where a program is; daemons are often not on an ordinary user's PATH."""
    return shutil.which(name) or shutil.which(name, path=_ADMIN_FOLDERS)


def _run(folder: Path, daemon: str, name: str, *arguments: str) -> None:
    marks = {MARK: str(folder), MARK_DAEMON: daemon}
    # It goes on in the background by itself; what it says before that belongs in its log.
    with log_file(folder, daemon).open("ab") as log:
        try:
            code = subprocess.run(
                [_find(name) or name, *arguments],
                env=environment(folder) | marks,
                check=False,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=_START_WITHIN_S,
                start_new_session=True,
            ).returncode
        except subprocess.TimeoutExpired:
            raise DaemonError(folder, daemon, f"{name} did not start in time") from None
    if code:
        raise DaemonError(folder, daemon, f"{name} stopped with exit code {code}")
