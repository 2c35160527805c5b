"""A running Slurm for tests: call its programs, and wait for what should happen."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from samestep.cluster.slurm.sandbox_daemons import missing_programs

WITHIN_S = 300.0
"""Ends what hangs, and nothing that is only slow."""
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def reason_to_skip() -> str | None:
    """Return why no sandbox can run here, and what to do about it."""
    missing = ", ".join(missing_programs())
    return f"{missing} not installed: apt install slurm-wlm munge" if missing else None


@dataclass(frozen=True, kw_only=True)
class RunningSandbox:
    folder: Path
    """Where it lives; what `down`, `start_node`, … take."""

    nodes: tuple[str, ...]
    """The names of its nodes."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables for whatever should meet this Slurm and no other; samestep is on PATH."""
        bin_folder = Path(sys.executable).parent
        ours = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        return ours | {
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            "PATH": f"{bin_folder}:{ours.get('PATH', '')}",
        }

    def run(self, *command: str, within_s: float = WITHIN_S, **more: str) -> str:
        """Return what a command printed; it must succeed. `more` are variables for it."""
        done = subprocess.run(
            command,
            env=self.environment | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            cwd=self.folder,
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout

    def submit(self, folder: Path, script: str, *options: str) -> str:
        """Submit a batch script that writes to `folder`/out; return the job's id."""
        path = folder / "job.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        at = (f"--output={folder}/out", "--open-mode=append", f"--chdir={folder}")
        return self.run("sbatch", "--parsable", *at, *options, str(path)).strip()

    def state(self, job: str) -> str:
        return self.field(job, "JobState")

    def field(self, job: str, name: str) -> str:
        said = self.run("scontrol", "show", "job", job, "--oneliner")
        return next(word for word in said.split() if word.startswith(f"{name}=")).split("=", 1)[1]

    def wait_for_state(self, job: str, *states: str, within_s: float = WITHIN_S) -> float:
        """Wait until a job is in one of some states; return how many seconds it took."""

        def is_there() -> bool:
            state = self.state(job)
            if state in states:
                return True
            assert state not in FINAL, f"job {job} is {state}, not {' or '.join(states)}"
            return False

        return wait_for(is_there, within_s=within_s)


def wait_for(condition: Callable[[], bool], *, within_s: float = WITHIN_S) -> float:
    """Wait until a condition is true; return how many seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + within_s, f"not within {within_s} s"
        time.sleep(0.1)  # Slurm tells nobody of a change: whoever waits asks again
    return time.monotonic() - started
