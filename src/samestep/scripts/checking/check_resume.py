"""Check a script's resume: is the training that is killed and resumed twice the training?

One training is run whole; another is killed once a checkpoint is whole, resumed, killed after its
next one, and resumed to its end. If anything differs, a second whole run tells what the script does
not repeat by itself.
"""

import functools
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from samestep.base.errors import UserError
from samestep.base.words import count
from samestep.scripts.checking import check_script
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.ranks_of_script import Job, Run, Starter, run_ranks
from samestep.scripts.checking.rules.resume import mistakes
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.checking.starts import Attempt, Resumed, SeenResumed, StepFact

_AUTO, _CHECKPOINT = "auto", "{checkpoint}"
"""The script finds its checkpoint by itself; what stands for the newest one in the words."""
_TORN, _OTHERS = 1, 4
"""Steps of a start from a torn file; what part of the training other numbers of ranks take."""
_BEYOND = 2  # steps after the last one that show that a training does not end


def check_resume(
    job: Job,
    *,
    resume: str,
    resume_nproc: Sequence[int] = (),
    seconds: float = 40.0,
    stall_s: float | None = None,
    start: Starter | None = None,
    here: tuple[Path, Run] | None = None,
    tell: Callable[[str], object] = lambda _text: None,
) -> CheckReport:
    """Run a script whole, and killed and resumed twice; return in what the two trainings differ.

    `resume`: what is added to the arguments to resume, or "auto". `seconds` bound each start, from
    its first step. `here`: a folder for the scratch copies, and what runs the ranks of a job that
    was launched. `tell` is given what it will cost.

    Raises UserError if the script cannot be checked: it fails, or writes no checkpoint in time.
    """
    began = time.perf_counter()
    script, job = job.script, structs.replace(job, steps=0, resumes=True)
    try:
        words = [] if resume == _AUTO else shlex.split(resume)
    except ValueError as error:
        raise UserError(f"--resume {resume}: {error}.") from error
    most = 4 + len(resume_nproc) / _OTHERS
    tell(
        f"{script} runs whole, then killed and resumed twice, and whole again if anything differs: "
        f"at most {most:g} times its own time, each start at most {seconds:g} s from its first step"
    )
    own = functools.partial(run_ranks, seconds=seconds, stall_s=stall_s, start=start)
    folder, run = here or (None, own)
    with tempfile.TemporaryDirectory(
        prefix="samestep-check-", dir=folder, ignore_cleanup_errors=True
    ) as name:
        top = Path(name).resolve()
        try:
            if here is None:
                job, seen, output = check_script.run_as_it_starts(job, run)
                whole = Attempt(seen, output)
            else:
                whole = _run_whole(job, top / "whole", run)
            first, *later = _steps_to_kill_at(whole, script, seconds)
            copy = check_script.prepare(job, top / "chain")
            chain = _Chain(script, words, top / "kept", run, whole, *copy)
            resumed = chain.resumed(first, later, resume_nproc)
            if any(mistakes(resumed)):
                job = structs.replace(job, stop_at=None if whole.seen.complete else whole.end)
                resumed.again = _run_whole(job, top / "again", run)
        except OSError as error:
            raise UserError(f"The scratch copy of {script} cannot be kept: {error}") from error
    notes = [*whole.seen.notes, *_notes(resumed)]
    seen = SeenResumed(**vars(whole.seen) | {"resumed": resumed, "notes": notes})
    return check_script.report_on(seen, whole.output, script, began)


def _run_whole(job: Job, place: Path, run: Run) -> Attempt:
    return Attempt(*check_script.run_job(*check_script.prepare(job, place), run))


def _steps_to_kill_at(whole: Attempt, script: str, seconds: float) -> list[int]:
    """Return the steps of the first checkpoints after a third and two thirds of the training."""
    check_script.refuse_failures(whole.seen, whole.output, script)
    if saved := [save.step for save in whole.saves if 0 < save.step < whole.end]:
        parts = (next((s for s in saved if 3 * s >= n * whole.end), saved[-1]) for n in (1, 2))
        return sorted({*parts})
    more = "" if whole.seen.complete else f" It was ended after {seconds:g} s: --seconds is longer."
    raise UserError(
        f"{script} took {count(whole.end, 'step')} and wrote no checkpoint before its last, so "
        "there is nothing to resume from.",
        remedy=f"Let it write one earlier, or train longer (its arguments follow `--`).{more}",
    )


@dataclass
class _Chain:
    """The training that is killed and resumed in one scratch copy."""

    script: str
    words: list[str]
    kept: Path  # where the files are kept as they were at the first kill
    run: Run
    whole: Attempt
    scratch: Scratch
    job: Job

    def start(self, name: str, **limits: Any) -> Attempt:
        folder = Path(self.scratch.place) / name
        folder.mkdir()
        job = structs.replace(self.job, folder=str(folder), **limits)
        return Attempt(*check_script.run_job(self.scratch, job, self.run))

    def resumed(self, first: int, later: list[int], resume_nproc: Sequence[int]) -> Resumed:
        """Kill the training and resume it, from each kill and in all ways."""
        killed = self.start("killed", kill_from=first)
        if not killed.saves or killed.seen.complete:
            raise UserError(
                f"{self.script} wrote a checkpoint after {count(first, 'step')} in one run and "
                "none in the next, so its resume could not be checked."
            )
        shutil.copytree(self.scratch.place, self.kept, symlinks=True, ignore=_sockets)
        resumed = Resumed(whole=self.whole, chain=[killed], words=self.words)
        lasts = self.whole.end + (_BEYOND if self.whole.seen.complete else 0)
        for name, kill_at in (("first", sum(later)), ("second", 0)):
            before = resumed.chain[-1]
            kill_from = kill_at - before.end if kill_at > before.end else None
            start = self.resume(before, name, kill_from=kill_from, stop_at=lasts - before.end)
            resumed.chain.append(start)
            if kill_from is None or start.seen.complete or not start.saves or start.offset == 0:
                break
        part = max(1, min(self.whole.end - killed.end, self.whole.end // _OTHERS))
        for number in resume_nproc:
            other = self.resume(killed, f"on-{number}", tear="", nproc=number, stop_at=part)
            resumed.others.append(other)
        alone = {save.path for save in killed.saves if not save.renamed}
        read = [file.path for file in resumed.chain[1].loaded() if file.path in alone]
        if read and resumed.chain[1].offset:
            resumed.torn = self.resume(killed, "torn", tear=read[-1], stop_at=_TORN)
        return resumed

    def resume(self, before: Attempt, name: str, tear: str | None = None, **limits: Any) -> Attempt:
        """Resume the training; with `tear` from its files at the first kill, this one torn."""
        scratch = self.scratch
        if tear is not None:
            shutil.rmtree(scratch.place)
            shutil.copytree(self.kept, scratch.place, symlinks=True)
        if (file := Path(scratch.twin(Path(scratch.home) / (tear or "")))).is_file():
            os.truncate(file, file.stat().st_size // 2)
        words = [word.replace(_CHECKPOINT, before.newest or _CHECKPOINT) for word in self.words]
        # As a user would type them: paths that lie in the project are those of the scratch copy.
        start = self.start(name, arguments=[*self.job.arguments, *words], **limits)
        if not (start.steps or start.seen.complete or tear is not None):  # those may fail
            which = f"{self.script} {_resumed_with(words, before, scratch)}"
            check_script.refuse_failures(start.seen, start.output, which)
        start.resumes(before, self.whole)
        return start


def _resumed_with(words: list[str], before: Attempt, scratch: Scratch) -> str:
    """Return a phrase on a resumed start's words, and on a path in them that does not exist."""
    paths = [word.partition("=")[2] or word for word in words if "/" in word or "." in word]
    home = Path(scratch.twin(scratch.home))
    missing = [path for path in paths if not (home / path).exists()]
    saved = ", ".join(sorted({save.path for save in before.saves} - {""}))
    hint = f" (there is no {missing[0]}: it had saved {saved})" if missing else ""
    return f"resumed with {shlex.join(words) or 'no more arguments'}{hint}"


def _sockets(folder: str, names: list[str]) -> list[str]:
    """Return the sockets, which cannot be copied: killed processes listened to them."""
    return [name for name in names if Path(folder, name).is_socket()]


def _notes(resumed: Resumed) -> Iterator[str]:
    stops = " and ".join(str(start.end) for start in resumed.chain[:-1])
    begins = " and ".join(str(start.offset) for start in resumed.chain[1:])
    yield f"killed after step {stops} of {resumed.whole.end}, resumed from step {begins}"
    shown: dict[str, StepFact] = {"samples": "rows", "losses": "loss"}
    if unsteady := [name for name, what in shown.items() if resumed.unsteady(what)]:
        yield f"two starts of the script differ by themselves in {', '.join(unsteady)}"
    for start in resumed.others:
        if not start.steps:
            lines = check_script.last_words(start.seen.ranks[0], start.output).split("\n")
            says = next((line.strip() for line in lines[::-1] if line.strip()), "it took no step")
            on = count(start.seen.world_size, "rank")
            yield f"resumed on {on} it fails by itself: {says}"
