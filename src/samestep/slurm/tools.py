"""Call Slurm's own programs; what they refuse is shown whole."""

import os
import shutil
import subprocess

from samestep.errors import UserError

_TIMEOUT_S = 60.0

NO_SLURM = (
    "There is no Slurm here: {name} is not on the PATH. On a cluster's login node it is (perhaps "
    "after `module load slurm`); on Debian or Ubuntu, `apt install slurm-wlm munge` installs it "
    "and `samestep slurm sandbox up` starts one. `samestep slurm submit … --dry-run` prints the "
    "job script without it."
)


def has_slurm() -> bool:
    """Whether Slurm's programs are on the PATH."""
    return shutil.which("sbatch") is not None


def call(name: str, *arguments: str) -> str:
    """Return what one of Slurm's programs printed.

    Raises:
        UserError: it is not here, it refused, or its controller did not answer.
    """
    if shutil.which(name) is None:
        raise UserError(NO_SLURM.format(name=name))
    try:
        done = subprocess.run(
            [name, *arguments], capture_output=True, text=True, check=False,
            timeout=_TIMEOUT_S, env=outside_of_any_step(dict(os.environ)),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{name}` got no answer from Slurm within {_TIMEOUT_S:.0f} s. Try `scontrol ping`: "
            "the controller may be down, or SLURM_CONF may name another cluster."
        ) from None
    if done.returncode:
        raise ToolError(name, arguments, done.stderr.strip() or done.stdout.strip())
    return done.stdout


def outside_of_any_step(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment without the variables of the step it may have come from.

    A job that is submitted from inside another would inherit them and take itself for a rank.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
                                "SLURM_TASK_PID", "SLURM_SRUN", "SRUN_", "PMI_"))
    }  # fmt: skip


class ToolError(UserError):
    """One of Slurm's programs refused; its own words are in `said`."""

    def __init__(self, name: str, arguments: tuple[str, ...], said: str) -> None:
        super().__init__(f"`{' '.join([name, *arguments])}` was refused:\n{said}")
        self.said = said
