"""`samestep slurm logs`: rank 0's screen, or any rank's log, also while it grows."""

import io
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from samestep.base.errors import UserError
from samestep.base.flags import InShell
from samestep.cluster.slurm.queue import JobAndRun, QueuedJob, find_job, find_job_or_run
from samestep.cluster.slurm.rank_ends import lines_of
from samestep.shell.commands.forms import terminal_width, verb

_POLL_EVERY_S = 0.5
_ASK_EVERY_S = 5.0  # spares Slurm's controller


@verb("slurm logs", "slurm logs 1234 --follow", "slurm logs runs/ID --rank 3")
def main(
    job: Annotated[str, InShell("JOB|RUN")],
    *,
    rank: Annotated[str | None, InShell("N|all")] = None,
    follow: bool = False,
) -> int:
    """Show what a job printed.

    Args:
        job: Number of the job, or directory of the run.
        rank: Rank whose output to show; all: every rank, with a label on each line. By default the
            job's log: rank 0 of a training, all ranks of a script.
        follow: Show new lines as they come, until the job has ended.
    """
    job_and_run = find_job_or_run(job)
    in_queue = job_and_run.job
    if job_and_run.note:
        sys.stderr.write(f"{job_and_run.note}\n")
    if not (rank or "all").isdecimal() and rank not in (None, "all"):
        raise UserError(f"--rank {rank} should be a rank's number, or all.")
    path, label = _file(rank, in_queue, job_and_run.run)
    waits = in_queue is not None and not in_queue.ended
    if not path.is_file() and not (waits and follow):
        if in_queue is not None and in_queue.state in ("PENDING", "CONFIGURING"):
            reason = f"is pending ({in_queue.reason}): it has no log yet."
            sys.stdout.write(f"Job {in_queue.target} {reason}\n")
            return 0
        logs = sorted(job_and_run.run.glob("rank-*.log")) if job_and_run.run else []
        has = f" The run has {', '.join(log.name for log in logs)}." if logs else ""
        if in_queue is not None and in_queue.ended and not in_queue.elapsed_s:
            has = f" Job {in_queue.target} ended before it started ({in_queue.state})."
        raise UserError(f"There is no log {path}.{has}")

    def files() -> dict[Path, int | None]:
        of_ranks = job_and_run.run if rank == "all" else None  # a training's have a file each
        own = of_ranks.glob("rank-*.log") if of_ranks else ()
        return {path: label, **dict.fromkeys(sorted(own, key=_rank_of))}

    _show(files, in_queue if follow else None)
    if not any(place.is_file() and place.stat().st_size for place in files()):
        sys.stderr.write(f"samestep: {path} is empty: nothing was printed.\n")
    return 0


def _rank_of(path: Path) -> int:
    """Return the rank whose file this is; -1 for the log of the job."""
    number = path.stem.removeprefix("rank-")
    return int(number) if number.isdecimal() else -1


def _file(rank: str | None, job: QueuedJob | None, run: Path | None) -> tuple[Path, int | None]:
    """Return a rank's log file, and the rank if the file is shared with others."""
    log = job.log if job else None
    if log is None and run is not None:
        log = max(run.glob("slurm-*.out"), key=lambda p: p.stat().st_mtime, default=None)
    is_training = run is not None and (run / "settings.toml").is_file()
    if log is not None and (rank in (None, "all") or (rank == "0" and (is_training or not run))):
        return log, None
    rank = "0" if rank in (None, "all") else rank
    if run is None:
        raise UserError("This job was not submitted by samestep: it has one log for all ranks.")
    own = run / f"rank-{rank}.log"
    # srun and torchrun label the lines of a user's script, whose ranks share the job's log.
    if is_training or own.is_file() or log is None or not log.is_file():
        return own, None
    return log, int(rank)


def _show(logs: Callable[[], dict[Path, int | None]], job: QueuedJob | None) -> None:
    """Print files, of some only the lines of one rank; with a job, until that has ended.

    More files may come as its ranks begin.
    """
    asked = time.monotonic()
    positions = dict[Path, int]()
    width = terminal_width()
    while True:
        several = logs()
        for path, label in several.items():
            if not path.is_file():
                continue
            begin = positions.get(path, 0)
            text, positions[path] = _read(path, begin, to_end=job is None)
            if len(several) > 1:
                name = "0: " if _rank_of(path) < 0 else f"{_rank_of(path)}: "
                text = textwrap.indent(text, name, lambda _: True)
            text = text if label is None else "".join(lines_of(label, list(io.StringIO(text))))
            sys.stdout.write(_folded(text, width) if width else text)
            sys.stdout.flush()
        if job is None:
            return
        time.sleep(_POLL_EVERY_S)
        if time.monotonic() - asked > _ASK_EVERY_S:
            asked = time.monotonic()
            try:
                now = find_job(job.target)
            except UserError as error:  # a controller that is away may be back soon
                sys.stderr.write(f"{JobAndRun(queue_error=error).note}\n")
                continue
            job = now if now is not None and not now.ended else None  # read once more, then end


def _read(path: Path, position: int, *, to_end: bool) -> tuple[str, int]:
    """Return a file's whole lines from a position on, and the next position."""
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    if not to_end:
        data = data[: data.rfind(b"\n") + 1]
    return data.decode(errors="replace"), position + len(data)


def _folded(text: str, width: int) -> str:
    """Return a text with lines that fit the terminal, broken between words only."""
    wrapper = textwrap.TextWrapper(
        width,
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )
    return "".join(
        "\n".join(wrapper.wrap(line)) + "\n" * line.endswith("\n") if len(line) > width else line
        for line in text.splitlines(keepends=True)
    )
