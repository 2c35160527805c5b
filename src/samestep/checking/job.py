"""What the process that checks a script tells the ranks that run it."""

from pathlib import Path

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a script under watch."""

    script: str
    """A file in the scratch copy, or with `module` the name of a module."""
    arguments: list[str] = []
    module: bool = False
    scratch: str = ""
    """The copy of the user's folder in which the script runs."""
    place: str = ""
    """Where the scratch copy of all that it may reach begins; empty if nothing is guarded."""
    began: float = 0.0
    """When the ranks were started, in seconds since 1970: newer files are the script's own."""
    folder: str = ""
    """Where the ranks write what was seen."""
    steps: int = 10
    """Batches of each of the first two epochs; then comes the last one of the epoch."""
    nproc: int = 1
    """How many devices there seem to be, with `substitute` or `alone`."""
    substitute: bool = False
    """Whether calls for CUDA are answered by the CPU."""
    one_per_node: bool = False
    """Whether each rank seems to have a node, and a GPU, of its own."""
    alone: bool = False
    """Whether the script starts its ranks itself."""


def write_job(job: Job) -> Path:
    """Write a job into its folder."""
    path = Path(job.folder) / "job.json"
    path.write_bytes(msgspec.json.encode(job))
    return path


def read_job(path: Path) -> Job:
    """Return a job that was written."""
    return msgspec.json.decode(path.read_bytes(), type=Job)
