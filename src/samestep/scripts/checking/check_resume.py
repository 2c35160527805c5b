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
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from samestep.base.errors import UserError
from samestep.base.words import count
from samestep.scripts.checking.check_report import CheckReport
from samestep.scripts.checking.check_script import (
    NEEDS_GPU,
    job_of,
    prepare,
    refuse_failures,
    report_on,
    what_was_seen,
)
from samestep.scripts.checking.events import Job, Seen, write_job
from samestep.scripts.checking.ranks_of_script import (
    SPAWNS,
    STOPPED,
    Starter,
    end,
    rank_variables,
    script_variables,
    start_processes,
    wait,
)
from samestep.scripts.checking.rules.resume import mistakes
from samestep.scripts.checking.scratch import Scratch
from samestep.scripts.checking.starts import Attempt, Resumed

AUTO = "auto"
"""The script finds its checkpoint by itself."""
CHECKPOINT = "{checkpoint}"
"""What stands for the newest checkpoint in the words that resume."""
_TORN, _OTHERS = 1, 4
"""Steps of a start from a torn file; what part of the training other numbers of ranks take."""
_SHOWN = {"samples": "rows", "losses": "loss"}
_BEYOND = 2  # steps after the last one that show that a training does not end


def check_resume(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    resume: str,
    resume_nproc: Sequence[int] = (),
    nproc: int = 2,
    module: bool = False,
    seconds: float = 40.0,
    stall_s: float | None = None,
    start: Starter | None = None,
    tell: Callable[[str], object] = lambda _text: None,
) -> CheckReport:
    """Run a script whole, and killed and resumed twice; return in what the two trainings differ.

    `resume`: what is added to the arguments to resume, or "auto". `seconds` bound each start, from
    its first step. `tell` is given what it will cost.

    Raises UserError if the script cannot be checked: it fails, or writes no checkpoint in time.
    """
    began = time.perf_counter()
    job = job_of(script, arguments, module=module, steps=0, nproc=nproc)
    job = structs.replace(job, resumes=True)
    words = _words(resume)
    most = 4 + len(resume_nproc) / _OTHERS
    tell(
        f"{script} runs whole, then killed and resumed twice, and whole again if anything differs: "
        f"at most {most:g} times its own time, each start at most {seconds:g} s from its first step"
    )
    with tempfile.TemporaryDirectory(prefix="samestep-check-", ignore_cleanup_errors=True) as top:
        lab = _Lab(script, Path(top).resolve(), seconds, stall_s, start or start_processes)
        try:
            resumed, seen = _resumed(lab, job, words, resume_nproc)
        except OSError as error:
            raise UserError(f"The scratch copy of {script} cannot be kept: {error}") from error
        return report_on(seen, resumed.whole.output, script, began)


def _words(resume: str) -> list[str]:
    try:
        return [] if resume == AUTO else shlex.split(resume)
    except ValueError as error:
        raise UserError(f"--resume {resume}: {error}.") from error


@dataclass(frozen=True)
class _Lab:
    """Where and how the script is started."""

    script: Path
    top: Path
    seconds: float
    stall_s: float | None
    start: Starter

    def place(self, name: str, job: Job) -> tuple[Scratch, Job]:
        """Make a scratch copy of its own for a training."""
        (self.top / name).mkdir()
        return prepare(job, self.script, self.top / name)

    def run(self, scratch: Scratch, job: Job, nproc: int, name: str) -> tuple[Attempt, Seen, bool]:
        """Attempt the script in a scratch copy; return what it did, and whether it starts ranks."""
        folder = Path(scratch.place) / name
        folder.mkdir()
        job = structs.replace(job, folder=str(folder), nproc=nproc)
        each = [{}] if job.alone else rank_variables(nproc)
        own = [script_variables(scratch) | one for one in each]
        processes = self.start(write_job(job), own, Path(job.scratch))
        try:
            codes, stall = wait(processes, folder, self.seconds, self.stall_s)
        finally:
            end(processes, politely=not (folder / STOPPED).exists())
        seen, output = what_was_seen(scratch, folder, codes, stall, asked=True)
        ended = all(rank.exit_code == 0 for rank in seen.ranks) and stall is None
        spawns = (folder / SPAWNS).exists()
        return Attempt(ranks=seen.ranks, output=output, ended=ended), seen, spawns


def _resumed(
    lab: _Lab, job: Job, words: list[str], resume_nproc: Sequence[int]
) -> tuple[Resumed, Seen]:
    whole, seen, job = _whole(lab, job)
    saved = sorted({save.step for save in whole.saves if 0 < save.step < whole.taken})
    if not saved:
        _refuse_without_checkpoint(lab, whole)
    nproc, total = job.nproc, whole.taken
    first = next((step for step in saved if 3 * step >= total), saved[-1])
    later = [step for step in saved if step > first]
    second = next((step for step in later if 3 * step >= 2 * total), later[-1] if later else None)

    scratch, base = lab.place("chain", job)
    killed, _, _ = lab.run(scratch, structs.replace(base, kill_from=first), nproc, "killed")
    if not killed.saves or killed.ended:
        raise UserError(
            f"{lab.script} wrote a checkpoint after {count(first, 'step')} in one run and none in "
            "the next, so its resume could not be checked."
        )
    result = Resumed(whole=whole, chain=[killed], words=words)
    lasts = total + (_BEYOND if whole.ended else 0)
    kept = _Kept(lab, scratch)
    kept.keep()
    go_on = functools.partial(_go_on, lab, scratch, base, words)
    for name, kill_at in (("first", second), ("second", None)):
        before = result.chain[-1]
        at = before.offset + before.taken
        own = None if kill_at is None or kill_at <= at else kill_at - at
        start = go_on(nproc, name, before, kill_from=own, stop_at=lasts - at)
        result.align(start, before)
        result.chain.append(start)
        if own is None or start.ended or not start.saves or start.offset == 0:
            break
    for number in resume_nproc:
        kept.bring_back()
        part = max(1, min(total - killed.taken, total // _OTHERS))
        other = go_on(number, f"on-{number}", killed, stop_at=part, may_fail=True)
        result.align(other, killed)
        result.others.append((number, other))
    _try_torn(result, kept, go_on)
    if any(mistakes(result)):
        again_place, again_job = lab.place("again", job)
        stop = None if whole.ended else total
        again, _, _ = lab.run(again_place, structs.replace(again_job, stop_at=stop), nproc, "again")
        result.again = again
    return result, replace(seen, resumed=result, notes=[*seen.notes, *_notes(result)])


def _notes(result: Resumed) -> Iterator[str]:
    """Yield where the training was killed, and what became of each start."""
    stops = [start.offset + start.taken for start in result.chain[:-1]]
    begins = [start.offset for start in result.chain[1:]]
    yield (
        f"killed after step {' and '.join(map(str, stops))} of {result.total}, resumed from step "
        f"{' and '.join(map(str, begins))}"
    )
    if unsteady := [name for name, what in _SHOWN.items() if result.unsteady(what)]:
        yield f"two starts of the script differ by themselves in {', '.join(unsteady)}"
    for number, start in result.others:
        if not start.steps:
            yield f"resumed on {count(number, 'rank')} it fails by itself: {_last(start)}"


def _last(start: Attempt) -> str:
    ends = [event["text"] for rank in start.ranks for event in rank.of("end") if event["text"]]
    lines = (ends[0] if ends else "".join(start.output)).rstrip().splitlines()
    return lines[-1] if lines else "it took no step"


def _whole(lab: _Lab, job: Job) -> tuple[Attempt, Seen, Job]:
    """Run the training whole, in the way in which it can be started here."""
    text = "" if job.module else lab.script.read_text(errors="replace")
    for name in ("whole", "whole-alone", "whole-cpu"):
        scratch, made = lab.place(name, job)
        start, seen, spawns = lab.run(scratch, made, job.nproc, "whole")
        needs_gpu = not start.steps and NEEDS_GPU.search("".join([text, *start.output]))
        if spawns and not job.alone:
            job = structs.replace(job, alone=True)
        elif needs_gpu and not job.substitute:
            job = structs.replace(job, substitute=True)
        else:
            break
    refuse_failures(seen, start.output, lab.script)
    return start, seen, job


def _refuse_without_checkpoint(lab: _Lab, whole: Attempt) -> None:
    at_end = any(save.step >= whole.taken for save in whole.saves)
    why = "its only checkpoint after its last step" if at_end else "no checkpoint"
    bound = "" if whole.ended else f" within {lab.seconds:g} s"
    raise UserError(
        f"{lab.script} took {count(whole.taken, 'step')} and wrote {why}{bound}, so there is "
        "nothing to resume from.",
        remedy="Let it write one earlier, train longer (its arguments follow `--`)"
        + ("." if whole.ended else ", or give it more time: --seconds."),
    )


def _go_on(
    lab: _Lab,
    scratch: Scratch,
    base: Job,
    words: list[str],
    nproc: int,
    name: str,
    before: Attempt,
    *,
    kill_from: int | None = None,
    stop_at: int | None = None,
    may_fail: bool = False,
) -> Attempt:
    """Resume a training that was killed."""
    words = [word.replace(CHECKPOINT, before.newest or CHECKPOINT) for word in words]
    # As a user would type them: paths that lie in the project are those of the scratch copy.
    job = structs.replace(
        base, arguments=[*base.arguments, *words], kill_from=kill_from, stop_at=stop_at
    )
    start, seen, _ = lab.run(scratch, job, nproc, name)
    failed = [rank for rank in seen.ranks if rank.exit_code]
    if not start.steps and not may_fail and not start.ended:
        told = failed[0].first("end") if failed else None
        text = (told["text"] if told else "") or "".join(start.output)
        files = sorted({save.path for save in before.saves if save.path})
        missing = [
            word for word in words if ("/" in word or "." in word) and not _exists(scratch, word)
        ]
        hint = f" There is no {missing[0]}: it had saved {', '.join(files)}." if missing else ""
        how = "fails by itself" if failed else "takes no step and does not end"
        raise UserError(
            f"{lab.script} resumed with {shlex.join(words) or 'no more arguments'} {how}:{hint}\n"
            f"{text.rstrip()}"
        )
    return start


def _exists(scratch: Scratch, word: str) -> bool:
    path = Path(word.partition("=")[2] or word)
    return (Path(scratch.twin(scratch.home)) / path).exists() or path.exists()


def _real(scratch: Scratch, path: str) -> Path:
    """Return where a file that a rank has named is."""
    return Path(scratch.twin(path if path.startswith(os.sep) else f"{scratch.home}/{path}"))


class _Kept:
    """The state of the files at the first kill, to be resumed from more than once."""

    def __init__(self, lab: _Lab, scratch: Scratch) -> None:
        self.scratch, self._aside = scratch, lab.top / "kept"

    def keep(self) -> None:
        """Keep the files as they are."""
        shutil.copytree(self.scratch.place, self._aside, symlinks=True, ignore=_sockets)

    def bring_back(self) -> None:
        """Bring them back, under the same paths."""
        shutil.rmtree(self.scratch.place)
        shutil.copytree(self._aside, self.scratch.place, symlinks=True)


def _sockets(folder: str, names: list[str]) -> list[str]:
    """Return what cannot be copied: what processes that were killed listened to."""
    return [name for name in names if Path(folder, name).is_socket()]


def _try_torn(result: Resumed, kept: _Kept, go_on: Callable[..., Attempt]) -> None:
    """Resume from the first half of the file that was resumed from, if it can be torn."""
    killed, first = result.chain[:2]
    files = [event["path"] for event in first.loaded()]
    saved = {save.path for save in killed.saves if not save.renamed}
    torn = [path for path in dict.fromkeys(files) if path in saved]
    if not torn or not first.offset:
        return
    kept.bring_back()
    file = _real(kept.scratch, torn[-1])
    if file.is_file():
        os.truncate(file, file.stat().st_size // 2)
        result.torn = go_on(len(killed.ranks), "torn", killed, stop_at=_TORN, may_fail=True)
