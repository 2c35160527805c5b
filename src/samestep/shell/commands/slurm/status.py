"""`samestep slurm status`: the state of the queue and of the training."""

import contextlib
import math
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from samestep.base.errors import UserError, escape, printable
from samestep.base.flags import InShell
from samestep.base.run.directory import seconds_since_sign
from samestep.base.table import Table, text_lines
from samestep.base.words import count, duration, measured
from samestep.cluster.slurm import queue
from samestep.cluster.slurm.rank_ends import LastSign, last_signs
from samestep.cluster.slurm.restarts import BEGUN, go_on_command, last_start, read_restarts
from samestep.cluster.slurm.submission import is_script
from samestep.shell.commands.forms import (
    print_json,
    print_lines,
    rich_console,
    terminal_width,
    verb,
)

_REDRAW_S = 5.0
_SILENT_S = 5.0  # a healthy rank's last sign may be a few seconds old
_QUIET_S = 30.0  # an evaluation or a checkpoint may take as long


@verb("slurm status", "slurm status", "slurm status 1234 --json")
def main(
    job: Annotated[str | None, InShell("JOB|RUN")] = None,
    *,
    json: bool = False,
    watch: bool = False,
) -> int:
    """Show jobs: their state in the queue, and the progress of their training.

    Args:
        job: Number of a job, or directory of a run; by default all your jobs that samestep
            submitted.
        json: Print one JSON object for a job, or a JSON array for all jobs.
        watch: Refresh every few seconds, until the jobs have ended or you press Ctrl-C.
    """
    if not watch:
        _show(job, as_json=json)
        return 0
    if json:
        raise UserError("--watch is for a terminal and --json for a program: leave one out.")
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    with contextlib.suppress(KeyboardInterrupt):
        while _show(job, clear=clear):
            time.sleep(_REDRAW_S)
    return 0


def _show(job: str | None, *, as_json: bool = False, clear: str | None = None) -> bool:
    """Show the jobs once; return whether any may still change. To watch them, clear first."""
    if job:
        entries = [queue.find_job_or_run(job)]
    else:
        try:
            jobs = sorted(queue.my_jobs(), key=lambda job: [*map(int, job.target.split("_"))])
        except UserError as error:
            if clear is None:
                raise
            sys.stderr.write(f"{queue.JobAndRun(queue_error=error).note}\n")  # it may be back soon
            return True
        entries = [queue.JobAndRun(job=job, run=job.run) for job in jobs]
        queued = [job.run for job in jobs]
        entries = [
            *(queue.JobAndRun(run=run) for run in queue.ended_runs(Path("runs"), queued)),
            *entries,
        ]
    rows = [(entry, _progress_of(entry)) for entry in entries]
    sys.stdout.write(clear or "")
    if as_json:
        objects = [
            {
                "queue": asdict(entry.job) if entry.job else None,
                "queue_error": entry.note or None,
                "training": asdict(progress) if progress else None,
                "run": entry.run,
            }
            for entry, progress in rows
        ]
        print_json(objects[0] if job else objects, indent=2)
    elif job:
        for name, value in details(*rows[0]).items():
            rich_console().print(f"[bold]{name:<8}[/] {escape(value)}", soft_wrap=True)
    elif not rows:
        sys.stdout.write("Slurm has no job that you submitted with samestep.\n")
    else:
        print_lines(text_lines(jobs_table(rows), terminal_width()))
    sys.stdout.flush()
    return any(f.queue_error or (f.job is not None and not f.job.ended) for f in entries)


def _progress_of(entry: queue.JobAndRun) -> queue.Progress | None:
    """Return a run's progress, corrected by its job's state; None if a later job continued it."""
    if _continued_by(entry) or _never_began(entry):
        return None
    progress = queue.read_progress(entry.run) if entry.run else None
    if progress is not None and entry.run is not None:  # a rank's pulse is newer than the records
        steps = [sign.step or 0 for sign in _signs(entry)]
        progress = replace(progress, step=max([progress.step, *steps]))
    if progress is None or entry.run is None or entry.job is None:
        return progress
    job = entry.job
    if not job.ended:  # the status is of an earlier start
        progress = replace(progress, status="", why="")
    if job.state != "RUNNING":
        return replace(progress, eta_s=None)
    quiet_s = seconds_since_sign(entry.run)
    return replace(progress, quiet_s=None if quiet_s is None else min(quiet_s, job.elapsed_s))


def _continued_by(entry: queue.JobAndRun) -> int | None:
    """Return the job that has continued the run since this one ended; None if none has."""
    if entry.run is None or entry.job is None or not entry.job.ended:
        return None
    newest = last_start(entry.run)
    return newest.job if newest and newest.job > entry.job.job else None


def _never_began(entry: queue.JobAndRun) -> bool:
    """Whether a job ended before it began, so that the run's training is an earlier one's."""
    if entry.run is None or entry.job is None or not entry.job.ended:
        return False
    newest = last_start(entry.run)
    return newest.job < entry.job.job if newest else not entry.job.elapsed_s


def _signs(entry: queue.JobAndRun) -> list[LastSign]:
    """Return the pulses of a job that runs, of this start."""
    if entry.run is None or entry.job is None or entry.job.state != "RUNNING":
        return []
    begun = queue.has_begun(entry.job, entry.run)
    return last_signs(entry.run, (entry.run / BEGUN).stat().st_mtime) if begun else []


def _is_quiet(progress: queue.Progress) -> bool:
    left = progress.total_steps - progress.step
    step_s = progress.eta_s / left if progress.eta_s and left else 0.0
    return progress.quiet_s is not None and progress.quiet_s > max(_QUIET_S, 5 * step_s)


def details(entry: queue.JobAndRun, progress: queue.Progress | None) -> dict[str, str]:
    """Return the rows shown of one job, by name."""
    job = entry.job
    rows: dict[str, str] = {}
    if job is not None:
        waits = f" ({job.reason})" if job.state == "PENDING" else ""
        nodes = f" on {job.nodes}" if job.nodes else ""
        rows["job"] = f"{job.target}, {job.name}: {job.state}{waits}{nodes}"
        if job.state == "PENDING" and job.starts_at not in ("Unknown", "N/A"):
            rows["starts"] = job.starts_at
        limit = duration(job.limit_s) if job.limit_s else "no limit"
        rows["time"] = f"{duration(job.elapsed_s)} of {limit}, {job.restarts} restarts"
    else:
        forgot = "no longer known to Slurm, which forgets jobs some minutes after their end"
        rows["job"] = entry.note or forgot
    unseen = progress is None or not progress.total_steps
    if unseen and entry.run is not None and is_script(entry.run):
        rows["training"] = "your own script; samestep does not see its steps"
        if job is not None and job.ended:
            rows["ended"] = f"{job.state.lower()}, exit code {job.exit_code.partition(':')[0]}"
    elif newest := _continued_by(entry):
        rows["training"] = f"continued by job {newest}: samestep slurm status {newest}"
    elif progress is None:
        rows["training"] = "has not begun"
    if progress is not None:
        rows |= _training(job, progress)
    return rows | _run_rows(entry, progress)


def _run_rows(entry: queue.JobAndRun, progress: queue.Progress | None) -> dict[str, str]:
    if entry.run is None:
        return {}
    rows = {}
    if (signs := _signs(entry)) and signs[0].age_s >= _SILENT_S:
        rows["ranks"] = signs[0].sentence
        if len(signs) > 1:
            rows["ranks"] += f"; the others: at most {duration(signs[1].age_s)}"
    if entry.job and (excluded := read_restarts(entry.run, entry.job.job).excluded):
        rows["excluded"] = f"{', '.join(excluded)}, which failed this job"
    rows["run"] = str(entry.run)
    done = progress is not None and progress.status == "completed"
    failed = entry.job is not None and entry.job.ended and entry.job.state != "COMPLETED"
    if failed and not done and not _continued_by(entry):
        rows["go on"] = go_on_command(entry.run)
    return rows


def _training(job: queue.QueuedJob | None, progress: queue.Progress) -> dict[str, str]:
    rows: dict[str, str] = {}
    if progress.damage:
        rows["damaged"] = progress.damage
    if progress.epoch:
        loss = f", loss {measured(progress.loss)}" if progress.loss is not None else ""
        of = (f"/{n:,}" if n else "" for n in (progress.epochs, progress.total_steps))
        rows["training"] = (
            f"epoch {progress.epoch}{next(of)}, step {progress.step:,}{next(of)}{loss}"
        )
        if progress.checkpoint_step is not None:
            rows["saved"] = f"step {progress.checkpoint_step:,}"
    if progress.status:
        rows["ended"] = f"{progress.status} ({progress.why})"
    elif _is_quiet(progress):
        rows["ETA"] = f"unknown: no step for {duration(progress.quiet_s or 0)}"
    elif progress.eta_s is not None:
        rows["ETA"] = duration(progress.eta_s)
        if job is not None and job.limit_s is not None:
            left = max(0, job.limit_s - job.elapsed_s)
            if progress.eta_s <= left:
                rows["ETA"] += f", within the {duration(left)} left"
            else:
                more = math.ceil((progress.eta_s - left) / job.limit_s)
                rows["ETA"] += f"; {duration(left)} left, so {count(more, 'more start')}"
    return rows


def jobs_table(rows: list[tuple[queue.JobAndRun, queue.Progress | None]]) -> Table:
    """Return a table of jobs, one line each."""
    lines = []
    for entry, progress in rows:
        job, p = entry.job, progress or queue.Progress()
        if job is None:  # Slurm forgot it; the run directory did not
            run = entry.run or Path()
            number, _, name = last_start(run) or ("", 0, "")
            step, state = f"{p.step:,}", p.status or "ended"
            lines.append((str(number), printable(name or run.name), state, "", step, "", "", ""))
            continue
        eta = "" if p.eta_s is None else duration(p.eta_s)
        step = f"{p.step:,}" + (f" {p.step / p.total_steps:.0%}" if p.total_steps else "")
        if _is_quiet(p):
            eta = f"no step for {duration(p.quiet_s or 0)}"
        lines.append(
            (
                job.target,
                printable(job.run.name if job.array_task and job.run else job.name),
                job.state,
                duration(job.elapsed_s),
                "" if progress is None else step,
                "" if p.loss is None else measured(p.loss),
                "" if job.ended else eta,
                "" if progress is None else str(p.starts),
            )
        )
    columns = ("job", "name", "state", "time", "step", "loss", "left", "starts")
    return Table(columns=columns, rows=lines, left=frozenset({"name", "state"}), cut=1)
