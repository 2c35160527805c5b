"""Check a script: run it in a scratch copy on a few ranks under watch, and judge what was seen."""

import functools
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

import samestep.scripts.checking.rules  # noqa: F401 - registers them
from samestep.base.errors import LOST_PEER, UserError
from samestep.launch.stall.judge import StallVerdict
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.events import Job, RankSeen, Seen, Stall, write_job
from samestep.scripts.checking.findings import judge, without_silenced
from samestep.scripts.checking.ranks_of_script import (
    FIRST_STEP_WITHIN_S,
    SPAWNS,
    Starter,
    end,
    rank_variables,
    ranks_seen,
    script_variables,
    start_processes,
    wait,
)
from samestep.scripts.checking.scratch import Scratch

_OF_ONE_PROCESS = (
    "The script never asks for its rank, so each rank was judged as a training of its own, which "
    "it would be on several. With --nproc 2 it is judged as a script for 2 ranks."
)
# A guess at who starts the ranks: a wrong one costs a start.
_STARTS, _IS_STARTED = re.compile(r"\b(spawn|start_processes|Process)\("), re.compile(r"RANK\b")
_LAST_LINES = 400
"""Characters at the end of a traceback that say what was raised."""
NEEDS_GPU = re.compile(r"cuda|nccl|gpu|nvidia|accelerator", re.IGNORECASE)


def check_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    nproc: int = 2,
    module: bool = False,
    steps: int = 10,
    seconds: float = 40.0,
    stall_s: float | None = None,
    asked: bool = True,
    start: Starter | None = None,
) -> CheckReport:
    """Run a script on new ranks under watch and return what is wrong with it.

    `stall_s`: for how long no rank may move; by default 20 median steps, and at least 30 s.
    `seconds` are counted from the first optimizer step; then the ranks are ended, and what they
    would have done later counts as not seen.

    Raises UserError if the script cannot be checked: it fails by itself, or takes no step.
    """
    began = time.perf_counter()
    job = job_of(script, arguments, module=module, steps=steps, nproc=nproc)
    run = functools.partial(
        _run, script, seconds=seconds, stall_s=stall_s, asked=asked, start=start or start_processes
    )
    text = "" if module else script.read_text(errors="replace")
    starts_ranks = bool(_STARTS.search(text)) and not _IS_STARTED.search(text)
    job, seen, output = run(structs.replace(job, alone=starts_ranks))
    uses_gpu = bool(seen.any("cuda", "device"))
    came_to_nothing = not any(rank.steps for rank in seen.ranks)
    if came_to_nothing and (uses_gpu or NEEDS_GPU.search("".join(output))):
        job, uses_gpu = structs.replace(job, substitute=True), True
        job, seen, output = run(job)
    if uses_gpu and nproc > 1 and len(output) > 1:  # else the script starts its ranks on one node
        _, apart, _ = run(structs.replace(job, substitute=True, one_per_node=True))
        for rank, there in zip(seen.ranks, apart.ranks, strict=False):
            rank.events.extend(there.of("device"))
    return report_on(seen, output, script, began)


def job_of(script: Path, arguments: Sequence[str], *, module: bool, steps: int, nproc: int) -> Job:
    """Return the job of running a script or module; UserError if there is none."""
    if not module and not script.is_file():
        raise UserError(f"There is no file {script} to check.", on_all_ranks=True)
    return Job(
        script=str(script), arguments=list(arguments), module=module, steps=steps, nproc=nproc
    )


def report_on(seen: Seen, output: list[str], script: Path, began: float) -> CheckReport:
    """Return what is wrong with a script that was run.

    Raises UserError if it could not be checked.
    """
    found, not_seen = judge(seen) if seen.ranks else ([], [])
    if not any(finding.severity == "error" for finding in found):
        refuse_failures(seen, output, script)
    findings = without_silenced(found, seen.folder)
    return CheckReport(
        findings=findings,
        not_seen=not_seen,
        steps=max(rank.steps for rank in seen.ranks),
        seconds=time.perf_counter() - began,
        notes=[*seen.notes, *([_OF_ONE_PROCESS] if seen.is_of_one_process else [])],
        output=output,
        ranks=seen.world_size,
        script=str(script),
        folder=seen.folder,
        silenced=len(found) - len(findings),
    )


def _run(
    script: Path,
    asked_for: Job,
    *,
    seconds: float,
    stall_s: float | None,
    asked: bool,
    start: Starter,
    before: tuple[Job, Seen, list[str]] | None = None,
) -> tuple[Job, Seen, list[str]]:
    """Run the script in a scratch copy; `before` is what came of the other way to start it.

    Returns the job with whether the script starts its ranks itself, what was seen, and what each
    rank printed.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-check-", ignore_cleanup_errors=True) as place:
        scratch, job = prepare(asked_for, script, Path(place))
        folder = Path(job.folder)
        each = rank_variables(job.nproc, one_per_node=job.one_per_node)
        own = [script_variables(scratch) | one for one in ([{}] if job.alone else each)]
        processes, otherwise = start(write_job(job), own, Path(job.scratch)), False
        try:
            most_s = 0.0 if job.one_per_node else seconds  # until the first step
            codes, stall = wait(processes, folder, most_s, stall_s)
            joined, spawns = any(folder.glob("events-[0-9]*")), (folder / SPAWNS).exists()
            otherwise = before is None and (not joined if job.alone else spawns)
        finally:
            end(processes, politely=not (otherwise or job.one_per_node))
        found = asked_for, *what_was_seen(scratch, folder, codes, stall, asked=asked)
    idle = spawns or not any(rank.steps or rank.exit_code for rank in found[1].ranks)
    if before is not None and idle and not asked_for.alone:
        return before  # it does start its ranks itself, and they failed before they joined a group
    if not otherwise:
        return found
    other = structs.replace(asked_for, alone=not asked_for.alone)
    return _run(
        script, other, seconds=seconds, stall_s=stall_s, asked=asked, start=start, before=found
    )


def prepare(asked: Job, script: Path, place: Path) -> tuple[Scratch, Job]:
    """Make a scratch copy in an empty folder; return it, and the job that runs the script in it."""
    cwd = Path.cwd().resolve()
    first = cwd if asked.module else script.resolve().parent
    home = cwd if first.is_relative_to(cwd) else first
    place = place.resolve()
    scratch, folder = Scratch(place, home), place / "seen"
    folder.mkdir()
    scratch.create(first)
    job = structs.replace(
        asked,
        script=asked.script if asked.module else scratch.twin(script.resolve()),
        arguments=[_in_scratch(one, cwd, scratch) for one in asked.arguments],
        scratch=scratch.twin(home),
        place=scratch.place,
        folder=str(folder),
        began=time.time(),
    )
    return scratch, job


def what_was_seen(
    scratch: Scratch,
    folder: Path,
    codes: Sequence[int | None],
    stall: StallVerdict | None,
    *,
    asked: bool,
) -> tuple[Seen, list[str]]:
    """Return what the ranks noted in a folder, and what each printed."""
    outputs = sorted(folder.glob("output-*.txt"), key=lambda path: int(path.stem[7:]))
    output = [scratch.shown(path.read_text(errors="replace")) for path in outputs]
    ranks = ranks_seen(folder, codes)
    for event in (event for rank in ranks for event in rank.of("end")):
        event.facts["text"] = scratch.shown(event["text"])
    notes = [scratch.shown(event["text"]) for rank in ranks for event in rank.of("note")]
    seen = Seen(
        ranks=ranks,
        folder=Path(scratch.home),
        asked=asked,
        notes=list(dict.fromkeys(notes)),
        stall=None if stall is None else _shown(stall, scratch),
    )
    return seen, output


def _shown(stall: StallVerdict, scratch: Scratch) -> Stall:
    """Return a verdict on ranks that hang, with the user's own paths from the project's folder."""

    def name(text: str) -> str:
        return scratch.shown(text).replace(f"{scratch.home}/", "")

    culprit = stall.culprits[0] if stall.culprits else min(stall.places)
    where, sentence = name(stall.places[culprit]), name(stall.sentence)
    return Stall(where=where, sentence=sentence, gone=stall.cause == "gone")


def _in_scratch(argument: str, cwd: Path, scratch: Scratch) -> str:
    """Return an argument in which a path into the project is that of the scratch copy."""
    if scratch.home != str(cwd) and not argument.startswith("-") and (cwd / argument).exists():
        argument = str(cwd / argument)  # the ranks' own working directory is the project
    return argument.replace(f"{scratch.home}/", f"{scratch.twin(scratch.home)}/")


def _told(rank: RankSeen, output: Sequence[str]) -> str:
    """Return the traceback that a rank has ended with, or else all that it printed."""
    end = rank.first("end")
    return (end["text"] if end is not None else "") or output[min(rank.rank, len(output) - 1)]


def refuse_failures(seen: Seen, output: Sequence[str], script: Path) -> None:
    """Raise UserError for a script that starts no rank, fails by itself, or takes no step."""
    if not seen.ranks:
        told = "\n".join(output).rstrip()
        raise UserError(f"{script} started no rank, so it could not be checked:\n{told}")
    failed = [(rank, _told(rank, output)) for rank in seen.ranks if rank.exit_code]
    if failed:  # the first that has not merely lost another
        rank, told = min(failed, key=lambda one: bool(LOST_PEER.search(one[1][-_LAST_LINES:])))
        if rank.of("ran_out") and rank.steps:
            return
        how = "with its epochs cut short by `check`" if rank.of("ran_out") else "by itself"
        raise UserError(
            f"{script} fails {how}: exit code {rank.exit_code} on rank {rank.rank} after "
            f"{rank.steps} steps, so it could not be checked:\n{told.rstrip()}"
        )
    if not any(rank.steps for rank in seen.ranks):
        within = f" within {FIRST_STEP_WITHIN_S:.0f} s" if not seen.complete else ""
        raise UserError(
            f"{script} took no optimizer step{within}, so there was nothing to check. Does it "
            "train with these arguments (they follow `--`)?"
        )
