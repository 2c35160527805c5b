"""Check a script: run it in a scratch copy on a few ranks under watch, and judge what was seen."""

import ast
import functools
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from msgspec import structs

import samestep.scripts.checking.rules  # noqa: F401 - registers them
from samestep.base.errors import LOST_PEER, UserError
from samestep.launch.stall.stall_verdict import StallVerdict
from samestep.scripts.checking import events as ev
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.findings import Found, apply_rules, without_silenced
from samestep.scripts.checking.ranks_of_script import (
    FIRST_STEP_WITHIN_S,
    SPAWNS,
    Job,
    Run,
    Starter,
    ranks_seen,
    run_ranks,
)
from samestep.scripts.checking.rules.model import separate_models
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.checking.seen import RankSeen, Seen, Stall, asks_for_gpu

_OF_ONE_PROCESS = (
    "The script never asks for its rank, so each rank was judged as a training of its own, which "
    "it would be on several. With --nproc 2 it is judged as a script for 2 ranks."
)
# A guess at who starts the ranks: a wrong one costs a start.
_STARTS, _IS_STARTED = re.compile(r"\b(spawn|start_processes|Process)\("), re.compile(r"RANK\b")
_LAST_LINES = 400  # characters at the end of a traceback that say what was raised
_NEEDS_GPU = re.compile(r"cuda|nccl|gpu|nvidia|accelerator", re.IGNORECASE)


def check_script(
    job: Job,
    *,
    seconds: float = 40.0,
    stall_s: float | None = None,
    asked: bool = True,
    start: Starter | None = None,
) -> CheckReport:
    """Run a script on new ranks under watch and return what is wrong with it.

    `asked`: whether the user has said on how many.
    `stall_s`: for how long no rank may move; by default 20 median steps, and at least 30 s.
    `seconds` are counted from the first optimizer step; then the ranks are ended, and what they
    would have done later counts as not seen.

    Raises UserError if the script cannot be checked: it fails by itself, or takes no step.
    """
    began = time.perf_counter()
    run = functools.partial(run_ranks, seconds=seconds, stall_s=stall_s, start=start)
    job, seen, output = run_as_it_starts(job, run, asked=asked)
    uses_gpu = job.substitute or asks_for_gpu(seen)
    on_several = job.nproc > 1 and len(output) > 1  # else the script starts its ranks on one node
    if uses_gpu and on_several:
        apart_job = structs.replace(job, substitute=True, one_per_node=True)
        _, apart, _ = _run(apart_job, run, asked=asked)
        for rank, there in zip(seen.ranks, apart.ranks, strict=False):
            rank.events.extend(there.of(ev.DeviceAsked))
    return report_on(seen, output, job.script, began)


def job_of(
    script: Path, arguments: Sequence[str], *, nproc: int, module: bool = False, steps: int = 10
) -> Job:
    """Return the job of running a script or module; UserError if there is none."""
    if not module and not script.is_file():
        raise UserError(f"There is no file {script} to check.", on_all_ranks=True)
    return Job(
        script=str(script), arguments=list(arguments), module=module, steps=steps, nproc=nproc
    )


def report_on(seen: Seen, output: list[str], script: str, began: float) -> CheckReport:
    """Return the report on a script that was run; UserError if it could not be checked."""
    mistakes, not_seen = apply_rules(seen) if seen.ranks else ([], [])
    if not any(mistake.severity == "error" for mistake in mistakes):
        refuse_failures(seen, output, script)
    findings = without_silenced(mistakes, seen.folder)
    return CheckReport(
        findings=findings,
        not_seen=not_seen,
        steps=max(rank.steps for rank in seen.ranks),
        seconds=time.perf_counter() - began,
        notes=[*seen.notes, *([_OF_ONE_PROCESS] if seen.is_of_one_process else [])],
        output=output,
        ranks=seen.world_size,
        script=script,
        folder=seen.folder,
        silenced=len(mistakes) - len(findings),
    )


def run_as_it_starts(job: Job, run: Run, *, asked: bool = True) -> tuple[Job, Seen, list[str]]:
    """Run the script in a scratch copy, in the way in which it can be started here.

    Returns the job that says how, what was seen, and what each rank printed.
    """
    text = "" if job.module else Path(job.script).read_text(errors="replace")
    starts_ranks = bool(_STARTS.search(text)) and not _IS_STARTED.search(text)
    job, seen, output = _run(structs.replace(job, alone=starts_ranks), run, asked=asked)
    # A training that is to be resumed has no events that tell whether it asks for a GPU.
    says = "".join([*output, text if job.resumes else ""])
    needs_gpu = asks_for_gpu(seen) or _NEEDS_GPU.search(says)
    idle = not any(rank.steps for rank in seen.ranks)
    # It may wrap its model only where there is a GPU.
    several = seen.world_size > 1 and not (job.resumes or seen.is_of_one_process)
    bare = several and any(isinstance(told, Found) for told in separate_models(seen))
    if not needs_gpu or job.substitute or not (idle or bare):
        return job, seen, output
    on_gpu = _run(structs.replace(job, substitute=True), run, asked=asked)
    wraps = any(r.steps for r in on_gpu[1].ranks) and on_gpu[1].any(ev.ModelWrapped)
    return on_gpu if idle or wraps else (job, seen, output)


def _run(
    asked_for: Job, run: Run, *, asked: bool, before: tuple[Job, Seen, list[str]] | None = None
) -> tuple[Job, Seen, list[str]]:
    """Run the script in a scratch copy; `before` is what came of the other way to start it.

    Returns the job with whether the script starts its ranks itself, what was seen, and what each
    rank printed.
    """
    with tempfile.TemporaryDirectory(prefix="samestep-check-", ignore_cleanup_errors=True) as place:
        scratch, job = prepare(asked_for, Path(place))
        seen, output = run_job(scratch, job, run, asked=asked)
        folder = Path(job.folder)
        joined, spawns = any(folder.glob("events-[0-9]*")), (folder / SPAWNS).exists()
        # Ranks that it starts itself are not ranks of `check`: without a GPU they need a stand-in.
        error = "".join(output).rstrip().rpartition("\n")[2]
        in_vain = not joined and (job.substitute or not _NEEDS_GPU.search(error))
        otherwise = before is None and (in_vain if job.alone else spawns)
    idle = spawns or not any(rank.steps or rank.exit_code for rank in seen.ranks)
    if before is not None and idle and not asked_for.alone:
        return before  # it does start its ranks itself, and they failed before they joined a group
    if not otherwise:
        return asked_for, seen, output
    other = structs.replace(asked_for, alone=not asked_for.alone)
    return _run(other, run, asked=asked, before=(asked_for, seen, output))


def prepare(asked: Job, place: Path) -> tuple[Scratch, Job]:
    """Make a scratch copy in a folder of its own; return it, and the job of the script in it."""
    cwd, script = Path.cwd().resolve(), Path(asked.script).resolve()
    first = cwd if asked.module else script.parent
    home = cwd if first.is_relative_to(cwd) else first
    place = place.resolve()
    scratch, folder = Scratch(place, home), place / "seen"
    folder.mkdir(parents=True)
    scratch.create(first)
    job = structs.replace(
        asked,
        script=asked.script if asked.module else scratch.twin(script),
        arguments=[_in_scratch(argument, cwd, scratch) for argument in asked.arguments],
        scratch=scratch.twin(home),
        place=scratch.place,
        folder=str(folder),
        began=time.time(),
    )
    return scratch, job


def run_job(scratch: Scratch, job: Job, run: Run, *, asked: bool = True) -> tuple[Seen, list[str]]:
    """Run a job in a scratch copy; return what the ranks noted, and what each printed."""
    folder, (codes, stall) = Path(job.folder), run(scratch, job)
    outputs = sorted(folder.glob("output-*.txt"), key=lambda path: int(path.stem[7:]))
    output = [scratch.shown(path.read_text(errors="replace")) for path in outputs]
    ranks = ranks_seen(folder, codes)
    for event in (event for rank in ranks for event in rank.of(ev.RankEnded)):
        event.text = scratch.shown(event.text)
    notes = [scratch.shown(event.text) for rank in ranks for event in rank.of(ev.Remark)]
    seen = Seen(
        ranks=ranks,
        folder=Path(scratch.home),
        asked=asked,
        notes=list(dict.fromkeys(notes)),
        stall=None if stall is None else _shown(stall, scratch, ranks),
    )
    return seen, output


def _shown(stall: StallVerdict, scratch: Scratch, ranks: Sequence[RankSeen]) -> Stall:
    """Return a verdict on ranks that hang, with the user's own paths from the project's folder."""

    def name(text: str) -> str:
        return scratch.shown(text).replace(f"{scratch.home}/", "")

    culprit = stall.culprits[0] if stall.culprits else min(stall.places)
    where, sentence = name(stall.places[culprit]), name(stall.sentence)
    if stall.cause == "ended":
        waits = next((n for r, n in stall.places.items() if r not in stall.culprits), "")
        events = [event for rank in ranks if rank.rank == culprit for event in rank.events]
        where = _left_at(Path(scratch.home), name(waits), events) or where
    return Stall(where=where, sentence=sentence, gone=stall.cause == "gone")


def _left_at(folder: Path, waits: str, events: Sequence[ev.Event]) -> str:
    """Return the line at which a rank seems to have left the loops that another waits in.

    It is the first `break` or `return` there after what the rank did last, or that line itself.
    """
    file, _, line = waits.rpartition(":")
    try:
        nodes = [*ast.walk(ast.parse((folder / file).read_bytes()))]
    except (OSError, SyntaxError, ValueError):
        return ""
    loops = [n for n in nodes if isinstance(n, ast.For | ast.While)]
    loops = [n for n in loops if n.lineno <= int(line) <= (n.end_lineno or 0)]
    inside = {node.lineno for loop in loops for node in ast.walk(loop) if hasattr(node, "lineno")}
    at = [int(e.where.rpartition(":")[2]) for e in events if e.where.startswith(f"{file}:")]
    last = next((n for n in at[::-1] if n in inside), 0)
    leaves = [n.lineno for loop in loops for n in ast.walk(loop) if _leaves(n) and n.lineno >= last]
    return f"{file}:{min(leaves, default=last)}" if last else ""


def _leaves(node: ast.AST) -> TypeGuard[ast.stmt | ast.expr]:
    exits = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("exit")
    return exits or isinstance(node, ast.Break | ast.Return)


def _in_scratch(argument: str, cwd: Path, scratch: Scratch) -> str:
    """Return an argument in which a path into the project is that of the scratch copy."""
    if scratch.home != str(cwd) and not argument.startswith("-") and (cwd / argument).exists():
        argument = str(cwd / argument)  # the ranks' own working directory is the project
    return argument.replace(f"{scratch.home}/", f"{scratch.twin(scratch.home)}/")


def last_words(rank: RankSeen, output: Sequence[str]) -> str:
    """Return the traceback that a rank has ended with, or else all that it printed."""
    end = rank.first(ev.RankEnded)
    return (end.text if end is not None else "") or output[min(rank.rank, len(output) - 1)]


def refuse_failures(seen: Seen, output: Sequence[str], script: str) -> None:
    """Raise UserError for a script that starts no rank, fails by itself, or takes no step."""
    if not seen.ranks:
        text = "\n".join(output).rstrip()
        raise UserError(f"{script} started no rank, so it could not be checked:\n{text}")
    failed = [(rank, last_words(rank, output)) for rank in seen.ranks if rank.exit_code]
    if failed:  # the first that has not merely lost another
        rank, text = min(failed, key=lambda pair: bool(LOST_PEER.search(pair[1][-_LAST_LINES:])))
        if rank.of(ev.EpochRanOut) and rank.steps:
            return
        why = "with its epochs cut short by `check`" if rank.of(ev.EpochRanOut) else "by itself"
        raise UserError(
            f"{script} fails {why}: exit code {rank.exit_code} on rank {rank.rank} after "
            f"{rank.steps} steps, so it could not be checked:\n{text.rstrip()}"
        )
    if not any(rank.steps for rank in seen.ranks):
        within = f" within {FIRST_STEP_WITHIN_S:.0f} s" if not seen.complete else ""
        raise UserError(
            f"{script} took no optimizer step{within}, so there was nothing to check. Does it "
            "train with these arguments (they follow `--`)?"
        )
