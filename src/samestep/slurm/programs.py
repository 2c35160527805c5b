"""Call Slurm's own programs; what they refuse is shown whole."""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

from samestep.errors import UserError

_TIMEOUT_S = 60.0

# What Slurm, MPI and torchrun tell the processes of a job.
_OF_A_JOB = re.compile(
    r"SLURM(?!_CONF$|_CLUSTERS$).*|(SRUN_|SALLOC_|PMI|TORCHELASTIC_).*|ROLE_NAME"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
)


def call(name: str, *arguments: str, without: Collection[str] = ()) -> str:
    """Return what one of Slurm's programs printed, to which some variables were not shown.

    Raises:
        UserError: it is not here, it refused, or its controller did not answer.
    """
    if shutil.which(name) is None:
        raise UserError(
            f"There is no Slurm here: {name} is not on the PATH. On a cluster's login node it is "
            "(perhaps after `module load slurm`); on Debian or Ubuntu, `apt install slurm-wlm "
            "munge` installs it and `samestep slurm sandbox up` starts one. `samestep slurm submit "
            "… --dry-run` prints the job script without it."
        )
    conf = os.environ.get("SLURM_CONF", "")
    if conf and not Path(conf).exists():
        raise UserError(
            f"SLURM_CONF is {conf}, and there is no such file; perhaps it was that of a sandbox "
            "which is down. Say `unset SLURM_CONF` to use this machine's own Slurm, or start a "
            "sandbox again: samestep slurm sandbox up."
        )
    # What narrows the user's own lists (SQUEUE_PARTITION, …) must not hide a job from us.
    narrows = () if name == "sbatch" else (f"{name.upper()}_",)
    outside = outside_of_any_job(os.environ)
    shown = {k: v for k, v in outside.items() if k not in without and not k.startswith(narrows)}
    words = [name, *arguments]
    try:
        done = subprocess.run(
            words, env=shown, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`{name}` got no answer from Slurm within {_TIMEOUT_S:.0f} s. Try `scontrol ping`: "
            "the controller may be down, or SLURM_CONF may name another cluster."
        ) from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        if "Unable to contact slurm controller" in said and conf:
            said += (
                f"\nSLURM_CONF is {conf}. If that is a sandbox's, `samestep slurm sandbox status` "
                "shows whether it is up."
            )
        raise ProgramError(name, arguments, said)
    return done.stdout


def outside_of_any_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of the job that it may have come from.

    A job that is submitted from inside another would inherit its sizes, and take itself for a rank.
    """
    return {k: v for k, v in environment.items() if not _OF_A_JOB.fullmatch(k)}


class ProgramError(UserError):
    """One of Slurm's programs refused; its own words are in `said`."""

    def __init__(self, name: str, arguments: tuple[str, ...], said: str) -> None:
        super().__init__(f"`{' '.join([name, *arguments])}` was refused:\n{said}")
        self.said = said
