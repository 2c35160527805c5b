"""Slurm's programs as small scripts that tell what a test wrote for them, and note who called."""

import os
from dataclasses import dataclass
from pathlib import Path

_HEAD = '#!/bin/sh\nPATH=/usr/bin:/bin\ncd {folder} || exit 1\necho "${{0##*/}} $*" >> calls\n'
_PROGRAMS = {
    "squeue": "cat queue\n",
    "sinfo": "cat partitions\n",
    "scontrol": 'for job; do :; done\ncat "job-$job" 2>/dev/null && exit\n'
    'echo "slurm_load_jobs error: Invalid job id specified" >&2\nexit 1\n',
    "sbatch": "env > shell\necho 77\n",
    "scancel": "",
}
_DOWN = 'echo "Unable to contact slurm controller (connect failure)" >&2\nexit 1\n'


@dataclass(frozen=True, kw_only=True)
class FakeSlurm:
    folder: Path

    def add(
        self,
        job: int,
        run: Path,
        state: str = "RUNNING",
        *,
        uid: int | None = None,
        user: str = "ada",
        log: str = "",
        elapsed: str = "00:10:00",
        comment: str = "",
    ) -> None:
        """Let it know a job; only this user's are listed by `squeue --me`."""
        comment = comment or f"samestep:{run}"
        number = os.getuid() if uid is None else uid
        (self.folder / f"job-{job}").write_text(
            f"JobId={job} JobName=x UserId={user}({number}) JobState={state} Reason=Priority "
            f"ExitCode=0:0 RunTime={elapsed} TimeLimit=UNLIMITED Comment={comment} "
            f"StdOut={log}\n"
        )
        if number == os.getuid():
            values = (job, "x", user, state, "Priority", "", 0, elapsed, "UNLIMITED", "Unknown")
            row = "\x1f".join(map(str, (*values, 0, log, "", comment))) + "\x1f\n"
            queue = self.folder / "queue"
            rows = queue.read_text().splitlines(keepends=True) if queue.exists() else []
            others = [one for one in rows if one.partition("\x1f")[0] != str(job)]
            queue.write_text("".join([*others, row]))

    def break_down(self) -> None:  # let every program get no answer from now on
        for name in _PROGRAMS:
            self._write(name, _DOWN)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def shell(self) -> dict[str, str]:  # the variables that sbatch saw
        lines = (self.folder / "shell").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def _write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(_HEAD.format(folder=self.folder) + text)
        path.chmod(0o755)


def install(folder: Path, partitions: str = "debug|2|4|infinite|(null)\n") -> FakeSlurm:
    """Write the programs into a folder, which then is the one to put on the PATH."""
    folder.mkdir()
    fake = FakeSlurm(folder=folder)
    (folder / "queue").write_text("7\x1fx\x1fada\x1fRUNNING\x1f\n")
    (folder / "partitions").write_text(partitions)
    for name, text in _PROGRAMS.items():
        fake._write(name, text)
    return fake
